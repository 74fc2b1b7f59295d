"""GPUs, configurations and inventories for tests, each right in what the test does not name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from yunion_mps.config import KEYS
from yunion_mps.core.gpu_path import parse_gpu_path
from yunion_mps.core.models import Driver, Gpu, Inventory, Plan
from yunion_mps.core.settings import Config, DeviceEntry, Source
from yunion_mps.planning.entries import resolve_entries
from yunion_mps.planning.plan import make_plan

HOST = "/etc/yunion/host.conf"
DEVICES = "/etc/yunion/host_container_device.yml"
MACHINE_ID = "5c3f2b1de4a94f60b7c8d9e0f1a2b3c4"

#: The GPU of the reference case.
P40 = Gpu(
    "0000:00:06.0",
    uuid="GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400",
    name="Tesla P40",
    nvml_index=0,
    minor=0,
    memory_mib=23040,
    compute_mode="Default",
    compute_capability=(6, 1),
    vendor_device_id="10de:1b38",
    render_node="/dev/dri/renderD128",
)


def gpu(slot: int = 0, **given: Any) -> Gpu:
    found = Gpu(
        f"0000:{slot:02x}:00.0",
        uuid=f"GPU-00000000-0000-0000-0000-{slot:012x}",
        name="NVIDIA H100 80GB HBM3",
        nvml_index=slot,
        minor=slot,
        memory_mib=81559,
        compute_mode="Default",
        compute_capability=(9, 0),
        mig_enabled=False,
        vendor_device_id="10de:2330",
        render_node=f"/dev/dri/renderD{128 + slot}",
    )
    return found._replace(**given)


def inventory(*gpus: Gpu, driver: str = "535.261.03") -> Inventory:
    return Inventory(Driver(driver, "12.2"), gpus)


def entry(path: str, virtual_number: int, line: int = 2) -> DeviceEntry:
    """An entry of the device file of three lines, its path on `line`."""
    return DeviceEntry(path, virtual_number, Source(DEVICES, line), Source(DEVICES, line + 2))


def config(*entries: DeviceEntry, **given: Any) -> Config:
    """An enabled configuration; a key that is given stands in line 9 of host.conf."""
    unknown = set(given) - set(KEYS)
    assert not unknown, unknown
    written = {"enable_cuda_mps", *given}
    sources = {name: Source(HOST, 9) if name in written else Source("default", None) for name in KEYS}
    values = {**{name: key.default for name, key in KEYS.items()}, "enable_cuda_mps": True, **given}
    return Config(**values, devices=entries, sources=sources)


def planned(settings: Config, found: Inventory) -> Plan:
    plan, problems = make_plan(settings, found, MACHINE_ID)
    assert problems == []
    return plan


def messages(settings: Config, found: Inventory) -> list[str]:
    return [str(problem) for problem in make_plan(settings, found, MACHINE_ID)[1]]


def find_gpu(path: str, gpus: Iterable[Gpu]) -> Gpu | None:
    """The one of these GPUs that an entry with this path divides; None if none is, or it cannot be a GPU."""
    if parse_gpu_path(path) is None:
        return None
    host = inventory(*gpus)
    entries = resolve_entries(config(entry(path, 1)), host).entries
    return next((gpu for gpu in host.gpus if gpu.pci_address in entries), None)
