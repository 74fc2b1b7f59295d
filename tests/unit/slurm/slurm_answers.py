"""Devices and leases as the daemon answers them, and the record of gres.conf, for tests of Slurm's hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from yunion_mps.core.paths import Paths
from yunion_mps.slurm.gres_conf import (
    Record,
    RecordedDevice,
)

RECORD = Record(False, [RecordedDevice("00:06.0-0", 4096, "mps"), RecordedDevice("00:06.0-1", 4096, "mps")])


def device(addr: str, memory_mib: int = 4096, **fields: str) -> Any:
    default = {"reserved_for": None, "sharing": "mps", "mig_profile": None}
    return {"addr": addr, "memory_mib": memory_mib, **default, **fields}


def instance(addr: str, profile: str = "1g.10gb") -> Any:
    return device(addr, 9984, sharing="none", mig_profile=profile)


def sliced(addr: str) -> Any:
    return device(addr, sharing="time-slicing")


#: A GPU of each kind.
MIXED = [
    device("00:06.0-0"),
    device("00:06.0-1"),
    sliced("00:07.0-0"),
    *[instance(f"00:08.0-g{number}") for number in (9, 10)],
    instance("00:08.0-g11", "1g.10gb+me"),
    device("00:09.0-g1-0", mig_profile="3g.40gb"),
]


def lease(name: str | None, devices: tuple[str, ...] = ("00:06.0-0",), **fields: Any) -> Any:
    default = {"binding": "name", "expires": None, "user": "root", "pid": None, "id": "7c1f0e7a"}
    return {"name": name, "devices": list(devices), **default, **fields}


def write_record(paths: Paths, content: Record) -> None:
    place = Path(paths.slurm_devices)
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(content._asdict()))
