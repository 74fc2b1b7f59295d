"""How GPUs are shared until the leases of their devices end, while another way is desired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from yunion_mps.core.enums import MIG, MPS, NOT_SHARED, TIME_SLICING
from yunion_mps.core.models import (
    DirectGpu,
    DomainPlan,
    Gpu,
    Plan,
    PlannedGpu,
)
from yunion_mps.core.reasons import LEASES_PENDING
from yunion_mps.core.waits import NO_USERS, Users, wait_reason
from yunion_mps.planning.division import mode_for

#: Instead of a way of sharing: the GPU is no longer divided.
_REMOVED = ""
_CHANGES = {
    MIG: "its MIG layout",
    NOT_SHARED: "the change to a single device",
    _REMOVED: "the removal of its devices",
}


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
            changed = _kept_in_domain(plan, former, uuid, gpus)
        else:
            changed = _kept_directly(plan, former, uuid, before)
        if changed is None:
            continue
        modes = dict(changed.compute_modes)
        whole_uuid, mode = mode_for(gpu, before)
        if whole_uuid in changed.compute_modes or whole_uuid in former.compute_modes:
            modes[whole_uuid] = mode
        text = _CHANGES.get(desired, f"the change to {desired}")
        why = wait_reason(text, users_of(uuid) or "the leases of its devices", LEASES_PENDING)
        plan = changed._replace(
            compute_modes=modes,
            sharing={**changed.sharing, gpu.pci_address: before},
            pending={**changed.pending, uuid: why},
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
    domain_of_gpu = former_domain._replace(gpus=())
    domains: list[DomainPlan] = []
    for domain in plan.domains:
        if domain.name == former_domain.name:
            domain_of_gpu = domain
        else:
            domains.append(domain)
    order = [gpu.uuid for gpu in gpus]
    members = [*domain_of_gpu.gpus, *(gpu for gpu in former_domain.gpus if gpu.uuid == uuid)]
    members.sort(key=lambda planned: order.index(planned.uuid))
    domains.append(_with_gpus(domain_of_gpu, members))
    domains.sort(key=lambda domain: order.index(domain.gpu_uuids[0]))
    return plan._replace(domains=tuple(domains), direct=_direct_without(uuid, plan.direct))


def _kept_directly(plan: Plan, former: Plan, uuid: str, sharing: str) -> Plan:
    """Return the plan with the GPU shared without MPS, as in its former one."""
    as_before = DirectGpu(uuid, 0, 0, sharing)
    for gpu in former.direct:
        if gpu.uuid == uuid:
            as_before = gpu
    return plan._replace(
        domains=tuple(_without(uuid, plan.domains)),
        parked=tuple(_without(uuid, plan.parked)),
        direct=(*_direct_without(uuid, plan.direct), as_before),
    )


def _direct_without(uuid: str, direct: Iterable[DirectGpu]) -> tuple[DirectGpu, ...]:
    return tuple(gpu for gpu in direct if gpu.uuid != uuid)


def _with_gpus(domain: DomainPlan, gpus: Sequence[PlannedGpu]) -> DomainPlan:
    """Return the domain with these GPUs, and the default limit of the largest of their devices."""
    most_percentage = max(gpu.thread_percentage for gpu in gpus)
    return domain._replace(gpus=tuple(gpus), thread_percentage=most_percentage)


def _without(uuid: str, domains: Iterable[DomainPlan]) -> Iterable[DomainPlan]:
    """Yield the domains without the GPU; a domain that had only this one is left out."""
    for domain in domains:
        gpus = tuple(gpu for gpu in domain.gpus if gpu.uuid != uuid)
        if gpus:
            yield _with_gpus(domain, gpus)
