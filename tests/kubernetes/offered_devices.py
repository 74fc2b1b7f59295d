"""Devices, pools and GPUs as the daemon lists them, which the DRA tests turn into ResourceSlices."""

from __future__ import annotations

from typing import Any, cast

from yunion_mps import answers
from yunion_mps.kubernetes.dra.slice_devices import HostFacts, OfferedDevice, offered_devices

V100, H100 = "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3"


def uuid_of(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012x}"


def share(gpu: int, slot: int, **changed: object) -> answers.DeviceJson:
    """A share of 4 GiB."""
    made: dict[str, Any] = {
        "addr": f"{gpu:02x}:00.0-{slot}",
        "model": V100,
        "gpu_uuid": uuid_of(gpu),
        "numa_node": 1,
        "memory_mib": 4096,
        "thread_percentage": 25.0,
        "state": "free",
        "reason": "",
        "reason_code": "",
        "budget_enforced": True,
        "reserved_for": None,
        "lease": None,
        "holder": None,
        "sharing": "mps",
        "mig_profile": None,
        **changed,
    }
    return cast("answers.DeviceJson", made)


def instance(gpu: int, number: int, profile: str, **changed: object) -> answers.DeviceJson:
    """A MIG instance of a GPU, which is one device unless a slot and a way of sharing are given."""
    made = {
        "addr": f"{gpu:02x}:00.0-g{number}",
        "model": f"{H100} MIG {profile}",
        "sharing": "none",
        **changed,
    }
    return share(gpu, 0, gpu_uuid=mig_uuid_of(gpu, number), **made)


def mig_uuid_of(gpu: int, number: int) -> str:
    return f"MIG-00000000-0000-0000-{number:04x}-{gpu:012x}"


def pool(gpu: int, **changed: object) -> answers.PoolJson:
    """A GPU of 16 GiB in units of 128 MiB."""
    made: dict[str, Any] = {
        "gpu_uuid": uuid_of(gpu),
        "addr": f"{gpu:02x}:00.0",
        "model": V100,
        "numa_node": -1,
        "memory_unit_mib": 128,
        "memory_reserve_mib": 0,
        "memory_mib": 16384,
        "thread_percentage": None,
        "thread_percentage_total": None,
        "state": "available",
        "reason": "",
        "reason_code": "",
        "budget_enforced": True,
        "reserved_for": None,
        **changed,
    }
    return cast("answers.PoolJson", made)


def lease(
    gpu: int, memory_mib: int, name: str = "theirs", thread_percentage: float = 0.0
) -> answers.LeaseRecordJson:
    """A lease of so much memory and of the SM threads of a GPU."""
    budget = {"gpu": f"{gpu:02x}:00.0", "memory_mib": memory_mib, "thread_percentage": thread_percentage}
    return cast("answers.LeaseRecordJson", {"id": name, "budgets": [budget]})


def gpu_of(gpu: int, instance: int = 0, profile: str = "") -> answers.GpuJson:
    """A GPU, or a MIG instance of it."""
    suffix = f"-g{instance}" if profile else ""
    made = {
        "uuid": mig_uuid_of(gpu, instance) if profile else uuid_of(gpu),
        "name": f"{H100} MIG {profile}" if profile else H100,
        "pci_address": f"00000000:{gpu:02x}:00.0{suffix}",
        "compute_capability": "8.6",
        "parent": uuid_of(gpu) if profile else None,
        "reserved_for": None,
        "mig_profile": profile or None,
    }
    return cast("answers.GpuJson", made)


def facts(
    devices: list[answers.DeviceJson] | None = None,
    pools: list[answers.PoolJson] | None = None,
    other_leases: list[answers.LeaseRecordJson] | None = None,
    memory_limit_mib: int | None = 4096,
    thread_percentage: float = 25.0,
) -> HostFacts:
    uuids = {one["gpu_uuid"] for one in [*(devices or []), *(pools or [])]}
    gpus = {uuid: gpu_of(int(uuid[-12:], 16)) for uuid in uuids}
    for one in devices or []:
        if one["gpu_uuid"].startswith("MIG-"):
            *_, number, gpu = one["gpu_uuid"].split("-")
            profile = (one["model"] or "").rpartition(" ")[2]
            made = gpu_of(int(gpu, 16), int(number, 16), profile)
            gpus.update({one["gpu_uuid"]: made, uuid_of(int(gpu, 16)): gpu_of(int(gpu, 16))})
    for row in (*(devices or []), *(pools or [])):
        gpus[row["gpu_uuid"]]["reserved_for"] = row["reserved_for"]
    limits = {"memory_limits_mib": [memory_limit_mib] * len(uuids), "thread_percentage": thread_percentage}
    domain = cast("answers.DomainJson", {"name": "host", "gpus": list(uuids), **limits})
    domains, roots = dict.fromkeys(uuids, domain), dict.fromkeys(uuids, "pci0000:00")
    others = {one["id"]: one for one in other_leases or ()}
    return HostFacts(devices or [], pools or [], gpus, domains, roots, "535.104.05", others)


def shares(gpus: int, each: int, **changed: object) -> list[OfferedDevice]:
    """The devices of so many GPUs; `changed` are members of the first one."""
    devices = [share(gpu, slot) for gpu in range(gpus) for slot in range(each)]
    devices[0] = share(0, 0, **changed)
    return offered_devices(facts(devices))
