"""Which GPUs can serve their devices now, and why not: by the GPU, its compute mode and its domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from yunion_mps.core import reasons
from yunion_mps.core.enums import DEGRADED, MIG, MPS, READY
from yunion_mps.core.models import DomainStatus, Gpu, Plan
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.waits import Servers, Users, wait_reason

NO_DOMAIN = Reason("no control daemon serves it", reasons.NO_DOMAIN)
GONE = Reason("its GPU is no longer present", reasons.GPU_GONE)
_IN_MIG_MODE = Reason(
    "its GPU is in MIG mode now, so no program can use it as a whole", reasons.LEASE_OUTDATED
)
_NEXT_ONE = "the running control daemon does not serve its GPU; the next one"
_NOT_SERVED = wait_reason(_NEXT_ONE, "the running one", reasons.GPU_NOT_SERVED)


def find_unusable(plan: Plan, gpus: Iterable[Gpu], domains: Iterable[DomainStatus]) -> dict[str, Reason]:
    """Return why the devices of GPUs (UUIDs) cannot be used now; GPUs whose devices can are left out."""
    known = {gpu.uuid: gpu for gpu in gpus}
    by_name = {domain.plan.name: domain for domain in domains}
    unusable = {}
    for uuid, name in domain_names(plan).items():
        reason = why_unusable(known.get(uuid), name, by_name.get(name), plan)
        if reason:
            unusable[uuid] = reason
    return unusable


def why_unusable(gpu: Gpu | None, name: str, domain: DomainStatus | None, plan: Plan) -> Reason:
    """Return why the devices of a GPU cannot be used now, empty if they can.

    `name` is that of their domain; empty if they need none.
    """
    if gpu is None:
        return GONE
    if gpu.reason:
        return gpu.reason
    planned = plan.unavailable.get(gpu.pci_address, NO_REASON)
    if planned.code == reasons.COMPUTE_MODE_FIXED:  # which the next poll notes with the GPU
        return planned
    if gpu.mig_enabled and not gpu.parent:
        return _IN_MIG_MODE
    if not name or gpu.parent:
        why = _why_wrong_mode(gpu, plan)
        if why or not name:
            return why
    if domain is None:
        return NO_DOMAIN
    if gpu.uuid not in domain.plan.gpu_uuids:
        awaited = Users(servers=(Servers(domain.waits_for),))
        return wait_reason(_NEXT_ONE, awaited, reasons.GPU_NOT_SERVED) if domain.waits_for else _NOT_SERVED
    if domain.state != READY:
        code = reasons.SERVER_START_FAILED if domain.state == DEGRADED else reasons.DOMAIN_NOT_READY
        return Reason(f"its domain is {domain.state}: {domain.reason}", code)
    return NO_REASON


def _why_wrong_mode(gpu: Gpu, plan: Plan) -> Reason:
    """Return why devices that require mode Default cannot be used: a single process would keep others out."""
    mode = plan.compute_modes.get(gpu.parent or gpu.uuid or "", gpu.compute_mode)
    if mode == gpu.compute_mode:
        return NO_REASON
    whose = "the compute mode of its GPU" if gpu.parent else "its compute mode"
    return Reason(f"{whose} is {gpu.compute_mode}, not {mode}", reasons.COMPUTE_MODE_CHANGED)


def domain_names(plan: Plan) -> dict[str, str]:
    """Return the domain of each GPU (UUID) that has devices or a pool; empty if it needs none."""
    names = {gpu.uuid: "" for gpu in plan.direct}
    names.update((device.gpu_uuid, device.domain) for device in plan.devices)
    names.update((pool.gpu_uuid, pool.domain) for pool in plan.pools)
    return names


def ways_in_effect(plan: Plan) -> Mapping[str, str]:
    """Return how each GPU (UUID) that has devices or a pool is shared now; `plan` is in effect."""
    ways = {layout.gpu_uuid: MIG for layout in plan.layouts if layout.enabled}
    ways.update((gpu.uuid, gpu.sharing) for gpu in plan.direct)
    ways.update((device.gpu_uuid, device.sharing) for device in plan.devices)
    ways.update((pool.gpu_uuid, MPS) for pool in plan.pools)
    return ways
