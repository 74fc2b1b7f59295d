"""Snapshots as the supervisor takes them, made by hand: the reference case, and hosts where much is amiss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yunion_mps.core.enums import FAILED, READY, TIME_SLICING
from yunion_mps.core.mig import MigInstance, MigProfile
from yunion_mps.core.models import DomainStatus, Driver, Gpu, Inventory, PcieLink, Snapshot
from yunion_mps.core.reasons import (
    CONTROL_DAEMON_ERROR,
    DISABLED,
    GPU_LOST,
    NO_REASON,
    PROGRAM_MISSING,
    Reason,
)
from yunion_mps.core.settings import DeviceEntry
from yunion_mps.planning.plan import make_plan
from yunion_mps.supervisor.host_conditions import ConditionFacts, conditions_of

from unit import builders

MACHINE_ID = "0123456789abcdef0123456789abcdef"
P40 = builders.P40._replace(
    compute_mode="Exclusive_Process", link=PcieLink("3.0", "8GT/s", 16, "15.76 GB/s"), numa_node=-1
)
H100 = Gpu(
    "0001:e1:00.0",
    uuid="GPU-11111111-2222-3333-4444-555555555555",
    name="NVIDIA H100",
    nvml_index=1,
    minor=1,
    memory_mib=81559,
    compute_mode="Default",
    compute_capability=(9, 0),
    mig_enabled=False,
    vendor_device_id="10de:2330",
    numa_node=1,
)
#: All that is known of a GPU which does not answer.
SILENT = Gpu("10000:00:07.0", reason=Reason("the GPU is lost", GPU_LOST))
IN_MIG_MODE = H100._replace(
    pci_address="0000:81:00.0", uuid="GPU-aaaaaaaa-2222-3333-4444-555555555555", mig_enabled=True
)

#: An entry that lets only pods lease the memory of P40, in units.
RESERVED_POOL = builders.entry("00:06.0", 0)._replace(memory_unit_mib=1024, reserved_for="kubernetes")
#: Entries that divide P40 by 4, and IN_MIG_MODE into instances.
MIG_ENTRIES = (
    builders.entry("00:06.0", 4),
    builders.entry("81:00.0", 0)._replace(mig=("all-3g.40gb",)),
)


def snapshot(
    *gpus: Gpu, entries: Sequence[DeviceEntry] = (), replicas: int = 4, scope: str = "host",
    multiuser: bool = False, state: str = READY, reason: str = "", code: str = CONTROL_DAEMON_ERROR,
) -> Snapshot:  # fmt: skip
    """The snapshot of a host with these GPUs, divided as `entries` say or by `replicas`.

    Its domain is in `state`.
    """
    config = builders.config(*entries, cuda_mps_replicas=replicas, cuda_mps_scope=scope)
    inventory = builders.inventory(*gpus)
    plan, problems = make_plan(config, inventory, MACHINE_ID)
    assert not problems
    pid = 4242 if state == READY else None
    why = Reason(reason, code) if reason else NO_REASON
    plan = plan._replace(domains=tuple(one._replace(multiuser=multiuser) for one in plan.domains))
    domains = tuple(DomainStatus(domain, state, why, pid, 0.0, 0) for domain in plan.domains)
    return with_conditions(Snapshot(1, True, plan, inventory, domains))


def with_conditions(host: Snapshot, **more: Any) -> Snapshot:
    """The snapshot with the conditions of what it has now, and of `more` facts."""
    facts = ConditionFacts(host.plan, host.inventory, host.domains, **more)
    return host._replace(conditions=conditions_of(facts))


def reference() -> Snapshot:
    return snapshot(P40)


def troubled() -> Snapshot:
    """GPUs of every sort, and a control daemon that does not start."""
    return snapshot(
        P40, H100, SILENT, IN_MIG_MODE, replicas=3, state=FAILED,
        reason="nvidia-cuda-mps-control is missing", code=PROGRAM_MISSING,
    )  # fmt: skip


def mig() -> Snapshot:
    """A GPU that is divided into two MIG instances, and one that is not."""
    return snapshot(P40, *in_instances(IN_MIG_MODE, "3g.40gb", "3g.40gb"), entries=MIG_ENTRIES)


_BALANCED, _HALVES = ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"), ("3g.40gb", "3g.40gb")
#: Entries of five H100s: MPS, time-slicing, and MIG alone, with MPS, and with time-slicing.
WAYS = (
    builders.entry("01:00.0", 4),
    builders.entry("02:00.0", 3)._replace(sharing=TIME_SLICING, time_slice="short"),
    builders.entry("03:00.0", 0)._replace(mig=_BALANCED),
    builders.entry("04:00.0", 2)._replace(mig=_HALVES),
    builders.entry("05:00.0", 2)._replace(mig=_HALVES, sharing=TIME_SLICING),
)
#: Profiles of an H100.
_PROFILES = {
    "3g.40gb": MigProfile(2, "3g.40gb", 3, 40448, 60, 2, 4, (0, 4)),
    "2g.20gb": MigProfile(1, "2g.20gb", 2, 20096, 32, 3, 2, (0, 2, 4)),
    "1g.10gb": MigProfile(0, "1g.10gb", 1, 9984, 16, 7, 1, (0, 1, 2, 3, 4, 5, 6)),
}


def in_instances(gpu: Gpu, *names: str) -> list[Gpu]:
    """The GPU in MIG mode, and its instances, side by side from the end of its memory."""
    instances: list[MigInstance] = []
    end = 8
    for number, name in enumerate(names, 1):
        size = _PROFILES[name].size
        end -= size
        uuid = f"MIG-{gpu.minor:04x}{number:04x}-2222-3333-4444-555555555555"
        instances.append(MigInstance(number, name, end, size, uuid))
    profiles = tuple(_PROFILES.values())
    whole = gpu._replace(mig_enabled=True, mig_profiles=profiles, mig_instances=tuple(instances))
    parts = [
        Gpu(
            f"{whole.pci_address}-g{one.id}",
            one.uuid,
            f"{whole.name} MIG {one.profile}",
            memory_mib=_PROFILES[one.profile].memory_mib,
            compute_capability=(9, 0),
            compute_mode=whole.compute_mode,
            parent=str(whole.uuid),
            identity=f"{whole.uuid}/{one.profile}@{one.start}",
        )
        for one in instances
    ]
    return [whole, *parts]


def every_way() -> Snapshot:
    """The GPUs of WAYS, divided as those say."""
    mps, sliced, *rest = [builders.gpu(slot) for slot in range(1, 6)]
    parts = [part for gpu, entry in zip(rest, WAYS[2:]) for part in in_instances(gpu, *entry.mig)]
    return snapshot(mps._replace(compute_mode="Exclusive_Process"), sliced, *parts, entries=WAYS)


def disabled() -> Snapshot:
    nothing = reference()._replace(
        enabled=False,
        plan=reference().plan._replace(domains=(), devices=(), compute_modes={}),
        inventory=Inventory(Driver("", None), ()),
        domains=(),
    )
    return with_conditions(nothing, disabled=Reason("enable_cuda_mps is false", DISABLED))


def gone() -> Snapshot:
    """A GPU of the plan is no longer present."""
    return with_conditions(reference()._replace(inventory=Inventory(Driver("535.261.03", None), ())))


def lost() -> Snapshot:
    """The only GPU is lost, and its control daemon still answers."""
    silent = P40._replace(reason=Reason("the GPU is lost", GPU_LOST))
    return with_conditions(reference()._replace(inventory=builders.inventory(silent)))


def large(devices: int) -> Snapshot:
    """As many devices as that, of GPUs divided by 48."""
    gpus = [
        H100._replace(pci_address=f"0000:{n:02x}:00.0", uuid=f"GPU-{n:08x}-2222-3333-4444-555555555555")
        for n in range(devices // 48)
    ]
    return snapshot(*gpus, replicas=48, scope="gpu")


ALL = {"reference": reference, "troubled": troubled, "disabled": disabled, "gone": gone, "lost": lost}
