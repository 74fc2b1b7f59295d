"""GPUs that are shared without MPS, and the change of a GPU from one way of sharing to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from yunion_mps.enums import MIG, MPS, NOT_SHARED, TIME_SLICING
from yunion_mps.identity import uuid5
from yunion_mps.models import DEFAULT, EXCLUSIVE_PROCESS, Device, DirectGpu, DomainPlan, Gpu, Plan
from yunion_mps.reasons import LEASES_PENDING
from yunion_mps.settings import DeviceEntry
from yunion_mps.users import NO_USERS, Users, wait_reason

#: Instead of a way of sharing: the GPU is no longer divided.
_REMOVED = ""
_CHANGES = {
    MIG: "its MIG layout",
    NOT_SHARED: "the change to a single device",
    _REMOVED: "the removal of its devices",
}


def mode_for(gpu: Gpu, way: str) -> tuple[str, str]:
    """Return the UUID of the whole GPU, and the compute mode that this way of sharing requires of it."""
    is_exclusive = way == MPS and not gpu.parent
    return gpu.parent or str(gpu.uuid), EXCLUSIVE_PROCESS if is_exclusive else DEFAULT


def divide_directly(entry: DeviceEntry, gpu: Gpu) -> DirectGpu:
    """Divide the GPU, which is not shared through MPS, into the equal devices of a valid entry."""
    number, uuid = entry.virtual_number, str(gpu.uuid)
    if entry.sharing == NOT_SHARED:
        return DirectGpu(uuid, gpu.memory_mib, 1, NOT_SHARED, gpu.sm_percentage or 100.0)
    share_mib = None if gpu.memory_mib is None else gpu.memory_mib // number
    return DirectGpu(uuid, share_mib, number, entry.sharing)


def direct_devices(host: str, direct: Iterable[DirectGpu], gpus: Iterable[Gpu]) -> list[Device]:
    """Return the devices of these GPUs, in the order of slots, as far as the GPUs are among `gpus`."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return [
        Device(
            id=uuid5(host, f"{by_uuid[shared.uuid].identity or shared.uuid}/{slot}"),
            addr=by_uuid[shared.uuid].address + ("" if shared.sharing == NOT_SHARED else f"-{slot}"),
            gpu_uuid=shared.uuid,
            slot=slot,
            memory_limit_mib=shared.memory_limit_mib,
            memory_total_mib=by_uuid[shared.uuid].memory_mib,
            thread_percentage=shared.thread_percentage,
            budget_enforced=shared.sharing == NOT_SHARED,
            domain="",
            sharing=shared.sharing,
        )
        for shared in direct
        if shared.uuid in by_uuid
        for slot in range(shared.device_count)
    ]


def ways_of_sharing(plan: Plan) -> dict[str, str]:
    """Return how each GPU (UUID) of the plan is shared."""
    through_mps = (uuid for domain in (*plan.parked, *plan.domains) for uuid in domain.gpu_uuids)
    return {**dict.fromkeys(through_mps, MPS), **{gpu.uuid: gpu.sharing for gpu in plan.direct}}


def keep_sharing(
    plan: Plan,
    former: Plan,
    leased: Mapping[str, str],
    gpus: Sequence[Gpu],
    users_of: Callable[[str], Users] = lambda _: NO_USERS,
) -> Plan:
    """Return the plan with each GPU shared as its leases require (`leased`, by UUID) until they end.

    `users_of` returns what the change of a GPU waits for. Until then, the GPU is divided as in the `former`
    plan. After a restart, when that plan is unknown, a time-sliced GPU has only the leased devices.

    A GPU or MIG instance that the plan does not divide, or that a MIG layout removes, keeps its control
    daemon or time-slicing, too. Leases of whole instances need nothing to be kept.
    """
    for gpu in gpus:
        uuid, desired = str(gpu.uuid), ways_of_sharing(plan).get(str(gpu.uuid))
        if desired is None and leased.get(uuid) in (MPS, TIME_SLICING):
            if plan.has_layout(gpu):
                desired = MIG
            elif gpu.pci_address not in plan.sharing and not gpu.reason:
                desired = _REMOVED
        before = leased.get(uuid, desired)
        if desired is None or before is None or desired == before:
            continue
        if gpu.mig_enabled and not gpu.parent:  # nothing can use it as a whole anymore
            continue
        is_mps = before == MPS
        kept = _with_domain(plan, former, uuid, gpus) if is_mps else _direct(plan, former, uuid, before)
        if kept is None:
            continue
        whole, mode = mode_for(gpu, before)
        has_mode = whole in kept.compute_modes or whole in former.compute_modes
        modes = {**kept.compute_modes, **({whole: mode} if has_mode else {})}
        what = _CHANGES.get(desired, f"the change to {desired}")
        why = wait_reason(what, users_of(uuid) or "the leases of its devices", LEASES_PENDING)
        plan = kept._replace(
            compute_modes=modes,
            sharing={**kept.sharing, gpu.pci_address: before},
            pending={**kept.pending, uuid: why},
        )
    return plan


def _with_domain(plan: Plan, former: Plan, uuid: str, gpus: Sequence[Gpu]) -> Plan | None:
    source = next((domain for domain in former.domains if uuid in domain.gpu_uuids), None)
    if source is None:
        return None
    present = next((domain for domain in plan.domains if domain.name == source.name), None)
    both = (*(present.gpus if present else ()), *(gpu for gpu in source.gpus if gpu.uuid == uuid))
    order = [gpu.uuid for gpu in gpus]
    ordered = tuple(sorted(both, key=lambda planned: order.index(planned.uuid)))
    most = max(planned.thread_percentage for planned in ordered)
    domain = (present or source)._replace(gpus=ordered, thread_percentage=most)
    others = [other for other in plan.domains if other is not present]
    domains = sorted([*others, domain], key=lambda domain: order.index(domain.gpu_uuids[0]))
    direct = tuple(gpu for gpu in plan.direct if gpu.uuid != uuid)
    return plan._replace(domains=tuple(domains), direct=direct)


def _direct(plan: Plan, former: Plan, uuid: str, sharing: str) -> Plan:
    kept = next((gpu for gpu in former.direct if gpu.uuid == uuid), DirectGpu(uuid, 0, 0, sharing))
    domains, parked = (tuple(_without(uuid, some)) for some in (plan.domains, plan.parked))
    others = (gpu for gpu in plan.direct if gpu.uuid != uuid)
    return plan._replace(domains=domains, parked=parked, direct=(*others, kept))


def _without(uuid: str, domains: Iterable[DomainPlan]) -> Iterable[DomainPlan]:
    for domain in domains:
        gpus = tuple(gpu for gpu in domain.gpus if gpu.uuid != uuid)
        if gpus:
            yield domain._replace(gpus=gpus, thread_percentage=max(gpu.thread_percentage for gpu in gpus))
