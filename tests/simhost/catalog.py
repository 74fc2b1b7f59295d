"""The kinds of GPU that a simulated host can have, from Kepler to Blackwell, and NVML's numbers by name.

Names, PCI ids and memory are what nvidia-smi and lspci print for such a board (memory with ECC as delivered);
compute capabilities are those of NVIDIA's "CUDA GPU Compute Capability" page. NVML's numbers are those of its
API Reference.
"""

from __future__ import annotations

from typing import NamedTuple

VENDOR = 0x10DE


class Kind(NamedTuple):
    name: str
    device: int  # PCI device id
    memory_mib: int
    capability: tuple[int, int]
    generation: int  # of the PCIe link
    power_limit_w: int
    mig: bool = False  # can be put into MIG mode


KINDS = {
    "tesla-k80": Kind("Tesla K80", 0x102D, 11441, (3, 7), 3, 150),
    "tesla-m60": Kind("Tesla M60", 0x13F2, 7680, (5, 2), 3, 150),
    "tesla-p40": Kind("Tesla P40", 0x1B38, 23040, (6, 1), 3, 250),
    "tesla-p100": Kind("Tesla P100-PCIE-16GB", 0x15F8, 16384, (6, 0), 3, 250),
    "v100": Kind("Tesla V100-SXM2-16GB", 0x1DB1, 16384, (7, 0), 3, 300),
    "t4": Kind("Tesla T4", 0x1EB8, 15360, (7, 5), 3, 70),
    "rtx-2080ti": Kind("NVIDIA GeForce RTX 2080 Ti", 0x1E07, 11264, (7, 5), 3, 250),
    "a30": Kind("NVIDIA A30", 0x20B7, 24576, (8, 0), 4, 165, mig=True),
    "a100": Kind("NVIDIA A100-SXM4-40GB", 0x20B0, 40960, (8, 0), 4, 400, mig=True),
    "a100-80gb": Kind("NVIDIA A100-SXM4-80GB", 0x20B2, 81920, (8, 0), 4, 400, mig=True),
    "a10": Kind("NVIDIA A10", 0x2236, 23028, (8, 6), 4, 150),
    "l4": Kind("NVIDIA L4", 0x27B8, 23034, (8, 9), 4, 72),
    "l40s": Kind("NVIDIA L40S", 0x26B9, 46068, (8, 9), 4, 350),
    "h100": Kind("NVIDIA H100 80GB HBM3", 0x2330, 81559, (9, 0), 5, 700, mig=True),
    "h100-nvl": Kind("NVIDIA H100 NVL", 0x2321, 95830, (9, 0), 5, 400, mig=True),
    "h200": Kind("NVIDIA H200", 0x2335, 143771, (9, 0), 5, 700, mig=True),
    "b200": Kind("NVIDIA B200", 0x2901, 183359, (10, 0), 5, 1000, mig=True),
    "rtx-pro-6000": Kind("NVIDIA RTX PRO 6000 Blackwell Server Edition", 0x2BB5, 97887, (12, 0), 5, 600,
                         mig=True),
    "rtx-5090": Kind("NVIDIA GeForce RTX 5090", 0x2B85, 32607, (12, 0), 5, 575),
}  # fmt: skip


class OtherKind(NamedTuple):
    """A display controller of another vendor."""

    vendor: int
    device: int
    driver: str
    has_render_node: bool


OTHER_KINDS = {
    "aspeed": OtherKind(0x1A03, 0x2000, "ast", has_render_node=False),  # a BMC's, on most servers
    "amd": OtherKind(0x1002, 0x73BF, "amdgpu", has_render_node=True),
    "intel": OtherKind(0x8086, 0x56C0, "i915", has_render_node=True),
}

#: nvmlReturn_t in its order.
_ERRORS = (
    "success", "uninitialized", "invalid_argument", "not_supported", "no_permission",
    "already_initialized", "not_found", "insufficient_size", "insufficient_power", "driver_not_loaded",
    "timeout", "irq_issue", "library_not_found", "function_not_found", "corrupted_inforom", "gpu_is_lost",
    "reset_required", "operating_system", "lib_rm_version_mismatch", "in_use", "memory", "no_data",
    "vgpu_ecc_not_supported", "insufficient_resources", "freq_not_supported", "argument_version_mismatch",
    "deprecated", "not_ready", "gpu_not_found", "invalid_state", "reset_type_not_supported",
)  # fmt: skip
ERRORS = {**{name: number for number, name in enumerate(_ERRORS)}, "unknown": 999}

# Mode 1, EXCLUSIVE_THREAD, is gone from all drivers that have MPS for more than one client.
COMPUTE_MODES = {"default": 0, "prohibited": 2, "exclusive_process": 3}

EVENT_XID = 0x8  # nvmlEventTypeXidCriticalError
XID_FELL_OFF_THE_BUS = 79  # NVIDIA's Xid catalogue: "GPU has fallen off the bus"
