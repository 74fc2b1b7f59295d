"""Lease requests: so many devices, or so much memory."""

from __future__ import annotations

from typing import NamedTuple

from yunion_mps.models import ALL, Device

BINPACK = "binpack"
SPREAD = "spread"


class LeaseRequest(NamedTuple):
    """A request for `number` devices, of one GPU or each of another (`across`), or so much memory.

    `device` (id or address, or all) and `gpu` (UUID or address) bound the choice where they are not empty,
    and `enforced` bounds it to GPUs that hold their clients to the budget.
    """

    number: int = 1
    device: str = ""
    gpu: str = ""
    across: bool = False
    placement: str = BINPACK
    memory_mib: int = 0
    enforced: bool = False

    def takes(self, device: Device) -> bool:
        """Whether the device would do, free or not."""
        if device.memory_limit_mib < self.memory_mib or (self.enforced and not device.budget_enforced):
            return False
        if self.device not in ("", ALL, device.id, device.addr):
            return False
        return not self.gpu or self.gpu in (device.gpu_uuid, device.gpu_address)

    def __str__(self) -> str:
        """In words: `2 devices on different GPUs`."""
        if self.device:
            return "all devices" if self.device == ALL else f"device {self.device}"
        where = f" of GPU {self.gpu}" if self.gpu else ""
        if self.memory_mib:
            return f"{self.memory_mib} MiB{where}"
        what = "1 device" if self.number == 1 else f"{self.number} devices"
        together = " on different GPUs" if self.across else " on one GPU"
        return what + where + (together if self.number > 1 and not self.gpu else "")
