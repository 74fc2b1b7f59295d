"""GPUs that are shared without MPS, and the change of a GPU from one way of sharing to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from yunion_mps.core.enums import MIG, MPS, NOT_SHARED, TIME_SLICING
from yunion_mps.core.identity import uuid5
from yunion_mps.core.models import (
    DEFAULT,
    EXCLUSIVE_PROCESS,
    Device,
    DirectGpu,
    DomainPlan,
    Gpu,
    Plan,
    PlannedGpu,
    gpus_by_uuid,
)
from yunion_mps.core.reasons import LEASES_PENDING
from yunion_mps.core.settings import DeviceEntry
from yunion_mps.core.waits import NO_USERS, Users, wait_reason

#: Instead of a way of sharing: the GPU is no longer divided.
_REMOVED = ""
_CHANGES = {
    MIG: "its MIG layout",
    NOT_SHARED: "the change to a single device",
    _REMOVED: "the removal of its devices",
}


def mode_for(gpu: Gpu, way: str) -> tuple[str, str]:
    """Return the UUID of the whole GPU, and the compute mode that this way of sharing requires of it.

    Under MPS, only its server should create contexts, for which NVIDIA recommends EXCLUSIVE_PROCESS. Time
    slices are shared in the mode Default, and so are MIG instances: MIG does not support EXCLUSIVE_PROCESS.

    Source: NVIDIA: Multi-Process Service, section "GPU Compute Modes"; Multi-Instance GPU User Guide, section
    "MIG with CUDA MPS".
    """
    is_exclusive = way == MPS and not gpu.parent
    return gpu.parent or str(gpu.uuid), EXCLUSIVE_PROCESS if is_exclusive else DEFAULT


def divide_directly(entry: DeviceEntry, gpu: Gpu) -> DirectGpu:
    """Divide the GPU, which is not shared through MPS, into the equal devices of a valid entry."""
    uuid = str(gpu.uuid)
    count = entry.virtual_number
    if entry.sharing == NOT_SHARED:
        percentage = gpu.sm_percentage or 100.0
        return DirectGpu(uuid, gpu.memory_mib, 1, NOT_SHARED, percentage)
    share_mib = None if gpu.memory_mib is None else gpu.memory_mib // count
    return DirectGpu(uuid, share_mib, count, entry.sharing)


def direct_devices(host_id: str, direct: Iterable[DirectGpu], gpus: Iterable[Gpu]) -> list[Device]:
    """Return the devices of these GPUs, in the order of slots, as far as the GPUs are among `gpus`."""
    by_uuid = gpus_by_uuid(gpus)
    devices: list[Device] = []
    for shared in direct:
        gpu = by_uuid.get(shared.uuid)
        if gpu is None:
            continue
        for slot in range(shared.device_count):
            device = Device(
                id=uuid5(host_id, f"{gpu.identity or shared.uuid}/{slot}"),
                addr=gpu.address if shared.sharing == NOT_SHARED else f"{gpu.address}-{slot}",
                gpu_uuid=shared.uuid,
                slot=slot,
                memory_limit_mib=shared.memory_limit_mib,
                memory_total_mib=gpu.memory_mib,
                thread_percentage=shared.thread_percentage,
                budget_enforced=shared.sharing == NOT_SHARED,
                domain="",
                sharing=shared.sharing,
            )
            devices.append(device)
    return devices


def ways_of_sharing(plan: Plan) -> dict[str, str]:
    """Return how each GPU (UUID) of the plan is shared."""
    ways: dict[str, str] = {}
    for domain in (*plan.parked, *plan.domains):
        ways.update(dict.fromkeys(domain.gpu_uuids, MPS))
    for gpu in plan.direct:
        ways[gpu.uuid] = gpu.sharing
    return ways


def keep_sharing(
    plan: Plan,
    former: Plan,
    leased: Mapping[str, str],
    gpus: Sequence[Gpu],
    users_of: Callable[[str], Users] = lambda _: NO_USERS,
) -> Plan:
    """Return the plan with each GPU shared as its leases require until they end.

    Until then, the GPU is divided as in the `former` plan. After a restart, when that plan is unknown, a
    time-sliced GPU has only the leased devices.

    A GPU or MIG instance that the plan does not divide, or that a MIG layout removes, keeps its control
    daemon or time-slicing, too. Leases of whole instances need nothing to be kept.

    leased: the way of sharing of the leased devices of each GPU, by UUID.
    users_of: returns what the change of a GPU waits for.
    """
    for gpu in gpus:
        uuid = str(gpu.uuid)
        desired = _desired_sharing(plan, gpu, leased)
        before = leased.get(uuid, desired)
        if desired is None or before is None or desired == before:
            continue
        if gpu.mig_enabled and not gpu.parent:  # nothing can use it as a whole anymore
            continue
        if before == MPS:
            kept = _kept_in_domain(plan, former, uuid, gpus)
        else:
            kept = _kept_directly(plan, former, uuid, before)
        if kept is None:
            continue
        modes = dict(kept.compute_modes)
        whole_uuid, mode = mode_for(gpu, before)
        if whole_uuid in kept.compute_modes or whole_uuid in former.compute_modes:
            modes[whole_uuid] = mode
        what = _CHANGES.get(desired, f"the change to {desired}")
        why = wait_reason(what, users_of(uuid) or "the leases of its devices", LEASES_PENDING)
        plan = kept._replace(
            compute_modes=modes,
            sharing={**kept.sharing, gpu.pci_address: before},
            pending={**kept.pending, uuid: why},
        )
    return plan


def _desired_sharing(plan: Plan, gpu: Gpu, leased: Mapping[str, str]) -> str | None:
    """Return how the GPU should be shared; None if nothing that is leased has to be kept."""
    desired = ways_of_sharing(plan).get(str(gpu.uuid))
    if desired is not None or leased.get(str(gpu.uuid)) not in (MPS, TIME_SLICING):
        return desired
    if plan.has_layout(gpu):
        return MIG
    is_removed = gpu.pci_address not in plan.sharing and not gpu.reason
    return _REMOVED if is_removed else None


def _kept_in_domain(plan: Plan, former: Plan, uuid: str, gpus: Sequence[Gpu]) -> Plan | None:
    """Return the plan with the GPU in the domain of its former one; None if no domain had it."""
    former_domain = None
    for domain in former.domains:
        if uuid in domain.gpu_uuids:
            former_domain = domain
    if former_domain is None:
        return None
    kept = former_domain._replace(gpus=())
    domains: list[DomainPlan] = []
    for domain in plan.domains:
        if domain.name == former_domain.name:
            kept = domain
        else:
            domains.append(domain)
    order = [gpu.uuid for gpu in gpus]
    members = [*kept.gpus, *(gpu for gpu in former_domain.gpus if gpu.uuid == uuid)]
    members.sort(key=lambda planned: order.index(planned.uuid))
    domains.append(_with_gpus(kept, members))
    domains.sort(key=lambda domain: order.index(domain.gpu_uuids[0]))
    return plan._replace(domains=tuple(domains), direct=_direct_without(uuid, plan.direct))


def _kept_directly(plan: Plan, former: Plan, uuid: str, sharing: str) -> Plan:
    """Return the plan with the GPU shared without MPS, as in its former one."""
    kept = DirectGpu(uuid, 0, 0, sharing)
    for gpu in former.direct:
        if gpu.uuid == uuid:
            kept = gpu
    return plan._replace(
        domains=tuple(_without(uuid, plan.domains)),
        parked=tuple(_without(uuid, plan.parked)),
        direct=(*_direct_without(uuid, plan.direct), kept),
    )


def _direct_without(uuid: str, direct: Iterable[DirectGpu]) -> tuple[DirectGpu, ...]:
    return tuple(gpu for gpu in direct if gpu.uuid != uuid)


def _with_gpus(domain: DomainPlan, gpus: Sequence[PlannedGpu]) -> DomainPlan:
    """Return the domain with these GPUs, and the default limit of the largest of their devices."""
    most = max(gpu.thread_percentage for gpu in gpus)
    return domain._replace(gpus=tuple(gpus), thread_percentage=most)


def _without(uuid: str, domains: Iterable[DomainPlan]) -> Iterable[DomainPlan]:
    """Yield the domains without the GPU; a domain that had only this one is left out."""
    for domain in domains:
        gpus = tuple(gpu for gpu in domain.gpus if gpu.uuid != uuid)
        if gpus:
            yield _with_gpus(domain, gpus)
