/*
 * Calls that exist and say NOT_SUPPORTED: what this host does not measure. nvidia-smi shows N/A for them, where a
 * call that does not exist would show ERR!. They are the ones that nvidia-smi 535 and 550 look up for its views.
 */
#define UNSUPPORTED_CALLS(call) \
    call(nvmlDeviceGetAccountingBufferSize) \
    call(nvmlDeviceGetAccountingMode) \
    call(nvmlDeviceGetAccountingPids) \
    call(nvmlDeviceGetAccountingStats) \
    call(nvmlDeviceGetApplicationsClock) \
    call(nvmlDeviceGetAttributes_v2) \
    call(nvmlDeviceGetAutoBoostedClocksEnabled) \
    call(nvmlDeviceGetBAR1MemoryInfo) \
    call(nvmlDeviceGetBoardId) \
    call(nvmlDeviceGetBoardPartNumber) \
    call(nvmlDeviceGetBridgeChipInfo) \
    call(nvmlDeviceGetClock) \
    call(nvmlDeviceGetClockInfo) \
    call(nvmlDeviceGetCpuAffinity) \
    call(nvmlDeviceGetCurrentClocksThrottleReasons) \
    call(nvmlDeviceGetDecoderUtilization) \
    call(nvmlDeviceGetDefaultApplicationsClock) \
    call(nvmlDeviceGetDriverModel) \
    call(nvmlDeviceGetEccMode) \
    call(nvmlDeviceGetEncoderSessions) \
    call(nvmlDeviceGetEncoderStats) \
    call(nvmlDeviceGetEncoderUtilization) \
    call(nvmlDeviceGetFBCSessions) \
    call(nvmlDeviceGetFBCStats) \
    call(nvmlDeviceGetFanSpeed) \
    call(nvmlDeviceGetGpcClkVfOffset) \
    call(nvmlDeviceGetGpuOperationMode) \
    call(nvmlDeviceGetGspFirmwareMode) \
    call(nvmlDeviceGetGspFirmwareVersion) \
    call(nvmlDeviceGetInforomImageVersion) \
    call(nvmlDeviceGetInforomVersion) \
    call(nvmlDeviceGetJpgUtilization) \
    call(nvmlDeviceGetLastBBXFlushTime) \
    call(nvmlDeviceGetMaxClockInfo) \
    call(nvmlDeviceGetMemoryAffinity) \
    call(nvmlDeviceGetMemoryErrorCounter) \
    call(nvmlDeviceGetModuleId) \
    call(nvmlDeviceGetMultiGpuBoard) \
    call(nvmlDeviceGetNumaNodeId) \
    call(nvmlDeviceGetOfaUtilization) \
    call(nvmlDeviceGetPcieReplayCounter) \
    call(nvmlDeviceGetPcieThroughput) \
    call(nvmlDeviceGetPowerManagementDefaultLimit) \
    call(nvmlDeviceGetPowerManagementLimitConstraints) \
    call(nvmlDeviceGetPowerManagementMode) \
    call(nvmlDeviceGetPowerState) \
    call(nvmlDeviceGetRemappedRows) \
    call(nvmlDeviceGetRetiredPages) \
    call(nvmlDeviceGetRetiredPagesPendingStatus) \
    call(nvmlDeviceGetRetiredPages_v2) \
    call(nvmlDeviceGetRowRemapperHistogram) \
    call(nvmlDeviceGetSerial) \
    call(nvmlDeviceGetSramEccErrorStatus) \
    call(nvmlDeviceGetSupportedClocksThrottleReasons) \
    call(nvmlDeviceGetSupportedGraphicsClocks) \
    call(nvmlDeviceGetSupportedMemoryClocks) \
    call(nvmlDeviceGetTemperatureThreshold) \
    call(nvmlDeviceGetTotalEccErrors) \
    call(nvmlDeviceGetVbiosVersion) \
    call(nvmlDeviceGetViolationStatus) \
    call(nvmlDeviceGetVirtualizationMode)
