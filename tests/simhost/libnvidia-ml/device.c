/* What a GPU is and does: identity, link, memory, modes. */
#include <stdio.h>
#include <unistd.h>

#include "nvml.h"

enum { COMPUTE_DEFAULT = 0, COMPUTE_PROHIBITED = 2, COMPUTE_EXCLUSIVE_PROCESS = 3 };

typedef struct {
    char bus_id_legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned int version, domain, bus, device, pci_device_id, pci_subsystem_id, base_class, sub_class;
    char bus_id[32];
} nvmlPciInfoExt_v1_t;

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;

NVML nvmlDeviceGetUUID(nvmlDevice_t gpu, char *uuid, unsigned int size)
{
    ENTER_PART(gpu, uuid);
    return give_text(uuid, size, part.compute ? part.compute->uuid : part.gpu->uuid);
}

NVML nvmlDeviceGetName(nvmlDevice_t gpu, char *name, unsigned int size)
{
    char text[sizeof gpu->name + 32];

    ENTER_PART(gpu, name);
    snprintf(text, sizeof text, "%s%s%s", part.gpu->name, part.instance ? " MIG " : "",
             part.instance ? profile_of(part)->name : "");
    return give_text(name, size, text);
}

#define NUMBER_OF_GPU(function, value)                        \
    NVML function(nvmlDevice_t gpu, unsigned int *out)        \
    {                                                         \
        ENTER_DEVICE(gpu, out);                               \
        return give(out, value);                              \
    }

NUMBER_OF_GPU(nvmlDeviceGetMinorNumber, gpu->minor)
NUMBER_OF_GPU(nvmlDeviceGetPersistenceMode, 0)
NUMBER_OF_GPU(nvmlDeviceGetDisplayActive, 0)
NUMBER_OF_GPU(nvmlDeviceGetPerformanceState, 0)

NVML nvmlDeviceGetCudaComputeCapability(nvmlDevice_t gpu, int *major, int *minor)
{
    ENTER_DEVICE(gpu, major && minor);
    *major = (int)gpu->capability_major;
    *minor = (int)gpu->capability_minor;
    return SUCCESS;
}

NVML nvmlDeviceGetArchitecture(nvmlDevice_t gpu, unsigned int *architecture)
{
    static const unsigned int first_of[] = {30, 50, 60, 70, 75, 80, 89, 90, 100}; /* from Kepler, which is 2 */
    unsigned int found = 0;

    ENTER_DEVICE(gpu, architecture);
    while (found < COUNT(first_of) && first_of[found] <= gpu->capability_major * 10 + gpu->capability_minor)
        found++;
    return give(architecture, found + 1);
}

NVML nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, nvmlPciInfo_t *pci)
{
    ENTER_DEVICE(gpu, pci);
    *pci = (nvmlPciInfo_t){
        .domain = gpu->pci_domain, .bus = gpu->pci_bus, .device = gpu->pci_device,
        .pci_device_id = gpu->pci_device_id,
    };
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return SUCCESS;
}

/* nvidia-smi 550 and later ask for this one. */
NVML nvmlDeviceGetPciInfoExt(nvmlDevice_t gpu, nvmlPciInfoExt_v1_t *pci)
{
    ENTER_DEVICE(gpu, pci);
    *pci = (nvmlPciInfoExt_v1_t){
        .version = pci->version, .domain = gpu->pci_domain, .bus = gpu->pci_bus, .device = gpu->pci_device,
        .pci_device_id = gpu->pci_device_id, .base_class = 3, .sub_class = 2, /* a 3D controller */
    };
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return SUCCESS;
}

static unsigned int utilization_of(const struct sim_gpu *gpu)
{
    unsigned int sum = 0;
    int lock = lock_state();

    for (size_t i = 0; i < COUNT(gpu->processes); i++)
        if (gpu->processes[i].pid && gpu->processes[i].sm_percent != SIM_UNSET)
            sum += gpu->processes[i].sm_percent;
    unlock_state(lock);
    if (gpu->utilization != SIM_UNSET)
        return gpu->utilization;
    return sum < 100 ? sum : 100;
}

/* What a GPU or a GPU instance has, in bytes; an instance's share of what the driver reserves is not part of it. */
static nvmlMemory_v2_t memory_of(struct part part)
{
    unsigned long long used = 0, reserved = part.instance ? 0 : part.gpu->reserved_mib;
    unsigned long long total = part.instance ? profile_of(part)->memory_mib : part.gpu->memory_mib;
    struct part whole = {part.gpu, part.instance, NULL}; /* its compute instances share the memory */
    int lock = lock_state();

    for (size_t i = 0; i < COUNT(part.gpu->processes); i++) {
        const struct sim_process *process = &part.gpu->processes[i];
        if (has_process(whole, process) && process->used_mib != SIM_UNKNOWN_MIB)
            used += process->used_mib;
    }
    unlock_state(lock);
    used = used < total - reserved ? used : total - reserved;
    return (nvmlMemory_v2_t){0, total * MIB, reserved * MIB, (total - reserved - used) * MIB, used * MIB};
}

NVML nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, nvmlMemory_t *memory)
{
    ENTER_PART(gpu, memory);
    nvmlMemory_v2_t all = memory_of(part);
    *memory = (nvmlMemory_t){all.total, all.free, all.used + all.reserved}; /* version 1 counts it as used */
    return SUCCESS;
}

NVML nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *memory)
{
    ENTER_PART(gpu, memory);
    unsigned int version = memory->version;
    if (version != (sizeof *memory | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    *memory = memory_of(part);
    memory->version = version;
    return SUCCESS;
}

NUMBER_OF_GPU(nvmlDeviceGetComputeMode, gpu->compute_mode)

NVML nvmlDeviceSetComputeMode(nvmlDevice_t gpu, unsigned int mode)
{
    ENTER_DEVICE(gpu, mode == COMPUTE_DEFAULT || mode == COMPUTE_PROHIBITED || mode == COMPUTE_EXCLUSIVE_PROCESS);
    if (geteuid() != 0)
        return NO_PERMISSION;
    if (gpu->mig_current && mode == COMPUTE_EXCLUSIVE_PROCESS)
        return NOT_SUPPORTED;
    int lock = lock_state();
    __atomic_store_n(&gpu->compute_mode, mode, __ATOMIC_RELEASE);
    unlock_state(lock);
    changed();
    return SUCCESS;
}

NVML nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *utilization)
{
    ENTER_DEVICE(gpu, utilization);
    if (gpu->mig_current)
        return NOT_SUPPORTED;
    *utilization = (nvmlUtilization_t){utilization_of(gpu), 0};
    return SUCCESS;
}

NUMBER_OF_GPU(nvmlDeviceGetPowerUsage, gpu->power_mw)
NUMBER_OF_GPU(nvmlDeviceGetEnforcedPowerLimit, gpu->power_limit_mw)

NVML nvmlDeviceGetTemperature(nvmlDevice_t gpu, unsigned int sensor, unsigned int *temperature)
{
    ENTER_DEVICE(gpu, temperature && sensor == 0); /* NVML_TEMPERATURE_GPU is the only sensor */
    return give(temperature, gpu->temperature_c);
}

/* What nvidia-smi 535 and 550 look up and this host does not measure: N/A, where a call that does not exist is ERR!.
 * All take the GPU first; what else they take is left alone, which the C ABIs of Linux allow. */
#define UNSUPPORTED(function)             \
    NVML function(nvmlDevice_t gpu)       \
    {                                     \
        ENTER_PART(gpu, true);            \
        return NOT_SUPPORTED;             \
    }
#define GET(what) UNSUPPORTED(nvmlDeviceGet##what)

UNSUPPORTED(nvmlDeviceSetPersistenceMode)
GET(AccountingBufferSize) GET(AccountingMode) GET(AccountingPids) GET(AccountingStats)
GET(ApplicationsClock) GET(AutoBoostedClocksEnabled)
GET(BoardId) GET(BoardPartNumber) GET(Brand) GET(BridgeChipInfo) GET(Clock)
GET(ClockInfo) GET(CpuAffinity) GET(CurrPcieLinkGeneration) GET(CurrPcieLinkWidth)
GET(CurrentClocksThrottleReasons) GET(DecoderUtilization) GET(DefaultApplicationsClock) GET(DisplayMode)
GET(DriverModel) GET(EccMode) GET(EncoderSessions) GET(EncoderStats) GET(EncoderUtilization)
GET(FBCSessions) GET(FBCStats) GET(FanSpeed) GET(GpcClkVfOffset) GET(GpuMaxPcieLinkGeneration)
GET(GpuOperationMode) GET(GspFirmwareMode) GET(GspFirmwareVersion) GET(InforomImageVersion)
GET(InforomVersion) GET(JpgUtilization) GET(LastBBXFlushTime) GET(MaxClockInfo)
GET(MaxPcieLinkGeneration) GET(MaxPcieLinkWidth) GET(MemoryAffinity)
GET(ModuleId) GET(MultiGpuBoard) GET(NumaNodeId) GET(OfaUtilization)
GET(PcieReplayCounter) GET(PcieThroughput) GET(PowerManagementDefaultLimit) GET(PowerManagementLimit)
GET(PowerManagementLimitConstraints) GET(PowerManagementMode) GET(PowerState) GET(RemappedRows)
GET(RetiredPages) GET(RetiredPagesPendingStatus) GET(RetiredPages_v2) GET(RowRemapperHistogram)
GET(Serial) GET(SramEccErrorStatus) GET(SupportedClocksThrottleReasons) GET(SupportedGraphicsClocks)
GET(SupportedMemoryClocks) GET(TemperatureThreshold) GET(TotalEccErrors) GET(VbiosVersion)
GET(ViolationStatus) GET(VirtualizationMode)
