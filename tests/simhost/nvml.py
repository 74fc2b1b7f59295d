"""NVML's numbers and their names, from NVIDIA's NVML API Reference."""

from __future__ import annotations

ERRORS = {
    "success": 0,
    "uninitialized": 1,
    "invalid_argument": 2,
    "not_supported": 3,
    "no_permission": 4,
    "already_initialized": 5,
    "not_found": 6,
    "insufficient_size": 7,
    "insufficient_power": 8,
    "driver_not_loaded": 9,
    "timeout": 10,
    "irq_issue": 11,
    "library_not_found": 12,
    "function_not_found": 13,
    "corrupted_inforom": 14,
    "gpu_is_lost": 15,
    "reset_required": 16,
    "operating_system": 17,
    "lib_rm_version_mismatch": 18,
    "in_use": 19,
    "memory": 20,
    "no_data": 21,
    "vgpu_ecc_not_supported": 22,
    "insufficient_resources": 23,
    "freq_not_supported": 24,
    "argument_version_mismatch": 25,
    "deprecated": 26,
    "not_ready": 27,
    "gpu_not_found": 28,
    "invalid_state": 29,
    "reset_type_not_supported": 30,
    "unknown": 999,
}

# Mode 1, EXCLUSIVE_THREAD, is gone from all drivers that have MPS for more than one client.
COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}

EVENT_XID = 0x8  # nvmlEventTypeXidCriticalError
XID_FELL_OFF_THE_BUS = 79  # NVIDIA's XID catalogue: "GPU has fallen off the bus"

# nvmlDeviceArchitecture_t by compute capability.
_ARCHITECTURES = {
    (3, 0): 2,
    (5, 0): 3,
    (6, 0): 4,
    (7, 0): 5,
    (7, 5): 6,
    (8, 0): 7,
    (8, 9): 8,
    (9, 0): 9,
    (10, 0): 10,
}


def architecture(capability: tuple[int, int]) -> int:
    """Return the nvmlDeviceArchitecture_t of a compute capability, e.g. 4 (Pascal) for (6, 1)."""
    return max(number for least, number in _ARCHITECTURES.items() if least <= capability)
