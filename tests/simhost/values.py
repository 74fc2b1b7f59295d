"""A description of a simulated host once everything in it is decided."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import PROCESS_COMPUTE, PROCESS_GRAPHICS, PROCESS_MPS

# As nvidia-smi's table has them: compute, a client of MPS, graphics.
PROCESS_TYPES = {"C": PROCESS_COMPUTE, "M+C": PROCESS_MPS, "G": PROCESS_GRAPHICS}


@dataclass(frozen=True)
class ProcessDescription:
    """A process on a GPU; `used_mib` is None where the driver cannot tell."""

    pid: int
    used_mib: int | None
    type: str = "C"


@dataclass(frozen=True)
class GpuDescription:
    """One GPU, everything decided."""

    kind: str
    name: str
    uuid: str
    pci: tuple[int, int, int]  # domain, bus, device; the function is always 0
    vendor: int
    device: int
    memory_mib: int
    capability: tuple[int, int]
    compute_mode: int  # nvmlComputeMode_t
    mig: bool | None  # None: the kind has no MIG
    numa_node: int  # -1: none, as the kernel says it
    render: int | None
    minor: int
    link: tuple[int, int]  # the most that the slot gives: generation, lanes
    current_link: tuple[int, int]
    virtual_number: int
    processes: tuple[ProcessDescription, ...]
    lost: bool

    @property
    def address(self) -> str:
        """The PCI address as Linux writes it, e.g. 0000:00:06.0."""
        return "{:04x}:{:02x}:{:02x}.0".format(*self.pci)


@dataclass(frozen=True)
class FailureDescription:
    """A rule by which NVML calls fail; `gpu` and `times` None mean all and until cleared."""

    call: str
    error: str
    gpu: int | None = None
    times: int | None = None
    delay_ms: int = 0


@dataclass(frozen=True)
class HostDescription:
    """A whole host; the GPUs are in the order of their PCI addresses, which is NVML's."""

    driver_version: str
    cuda_version: tuple[int, int]
    gpus: tuple[GpuDescription, ...]
    failures: tuple[FailureDescription, ...]
