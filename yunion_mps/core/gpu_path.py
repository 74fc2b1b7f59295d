"""The ways in which an entry names its GPU."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from yunion_mps.core.addresses import normalise_address

#: The kinds of `GpuPath`.
RENDER_NODE = "render node"
ADDRESS = "PCI address"
UUID = "UUID"

_RENDER_NODE = re.compile(r"/dev/dri/renderD[1-9][0-9]*")
_LINK = re.compile(r"/dev/dri/by-path/pci-(.+)-render")
_UUID = re.compile(r"gpu-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class GpuPath(NamedTuple):
    """What a path of an entry names; equal for all spellings of the same thing.

    A link of /dev/dri/by-path names a PCI address.

    Source: systemd, rules.d/60-drm.rules, for these links; nvidia-smi(1), --list-gpus, for UUIDs.
    """

    #: One of `RENDER_NODE`, `ADDRESS` and `UUID`.
    kind: str
    #: `/dev/dri/renderD128`, `0000:06:00.0` or `gpu-76aef7ff-…`.
    name: str


@functools.lru_cache(maxsize=256)
def parse_gpu_path(text: str) -> GpuPath | None:
    """Return what the path of an entry names; None if it cannot be a GPU."""
    path = text.strip()
    if _RENDER_NODE.fullmatch(path):
        return GpuPath(RENDER_NODE, path)
    link = _LINK.fullmatch(path)
    address = normalise_address(link[1] if link else path)
    if address:
        return GpuPath(ADDRESS, address)
    if _UUID.fullmatch(path.lower()):
        return GpuPath(UUID, path.lower())
    return None
