"""What the host has: the GPUs, from NVML and sysfs together."""

from __future__ import annotations

from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import machine_id, scan

__all__ = ["Nvml", "machine_id", "scan"]
