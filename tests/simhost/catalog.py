"""The kinds of GPU that a simulated host can have, from Kepler to Blackwell, and NVML's numbers by name.

Names, PCI ids and memory are what nvidia-smi and lspci print for such a board (memory with ECC as delivered);
compute capabilities are those of NVIDIA's "CUDA GPU Compute Capability" page. NVML's numbers are those of its
API Reference.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTROLLER_3D = 0x030200
_CONTROLLER_VGA = 0x030000
_TESLA, _GEFORCE, _RTX, _NVIDIA = 2, 5, 13, 14  # nvmlBrandType_t


@dataclass(frozen=True)
class Kind:
    """What all boards of one kind have in common."""

    name: str
    device: int  # PCI device id; the vendor is always 10de
    subsystem: int
    memory_mib: int
    capability: tuple[int, int]
    generation: int  # of the PCIe link
    power_limit_w: int
    mig: bool = False  # can be put into MIG mode
    brand: int = _NVIDIA
    pci_class: int = _CONTROLLER_3D


KINDS = {
    "tesla-k80": Kind("Tesla K80", 0x102D, 0x106C, 11441, (3, 7), 3, 150, brand=_TESLA),
    "tesla-m60": Kind("Tesla M60", 0x13F2, 0x115E, 7680, (5, 2), 3, 150, brand=_TESLA),
    "tesla-p40": Kind("Tesla P40", 0x1B38, 0x11D9, 23040, (6, 1), 3, 250, brand=_TESLA),
    "tesla-p100": Kind("Tesla P100-PCIE-16GB", 0x15F8, 0x118F, 16384, (6, 0), 3, 250, brand=_TESLA),
    "v100": Kind("Tesla V100-SXM2-16GB", 0x1DB1, 0x1212, 16384, (7, 0), 3, 300, brand=_TESLA),
    "t4": Kind("Tesla T4", 0x1EB8, 0x12A2, 15360, (7, 5), 3, 70, brand=_TESLA),
    "rtx-2080ti": Kind(
        "NVIDIA GeForce RTX 2080 Ti",
        0x1E07,
        0x12A4,
        11264,
        (7, 5),
        3,
        250,
        brand=_GEFORCE,
        pci_class=_CONTROLLER_VGA,
    ),
    "a100": Kind("NVIDIA A100-SXM4-40GB", 0x20B0, 0x134F, 40960, (8, 0), 4, 400, mig=True),
    "a10": Kind("NVIDIA A10", 0x2236, 0x1482, 23028, (8, 6), 4, 150),
    "l4": Kind("NVIDIA L4", 0x27B8, 0x16CA, 23034, (8, 9), 4, 72),
    "l40s": Kind("NVIDIA L40S", 0x26B9, 0x1851, 46068, (8, 9), 4, 350),
    "h100": Kind("NVIDIA H100 80GB HBM3", 0x2330, 0x16C1, 81559, (9, 0), 5, 700, mig=True),
    "h200": Kind("NVIDIA H200", 0x2335, 0x18BE, 143771, (9, 0), 5, 700, mig=True),
    "b200": Kind("NVIDIA B200", 0x2901, 0x1999, 183359, (10, 0), 5, 1000, mig=True),
    "rtx-pro-6000": Kind(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        0x2BB5,
        0x204E,
        97887,
        (12, 0),
        5,
        600,
        mig=True,
        brand=_RTX,
    ),
    "rtx-5090": Kind(
        "NVIDIA GeForce RTX 5090",
        0x2B85,
        0x2057,
        32607,
        (12, 0),
        5,
        575,
        brand=_GEFORCE,
        pci_class=_CONTROLLER_VGA,
    ),
}

# PCI Express: GT/s a lane of each generation, as the kernel prints it in max_link_speed.
LINK_SPEEDS = {1: "2.5 GT/s PCIe", 2: "5.0 GT/s PCIe", 3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe",
               5: "32.0 GT/s PCIe", 6: "64.0 GT/s PCIe", 7: "128.0 GT/s PCIe"}  # fmt: skip
LINK_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


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
XID_FELL_OFF_THE_BUS = 79  # NVIDIA's Xid catalogue: "GPU has fallen off the bus"

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
