"""Why devices and GPUs cannot be used now."""

from __future__ import annotations

from yunion_mps.models import DomainStatus, Gpu, Plan, Snapshot
from yunion_mps.mps.states import READY

NO_DOMAIN = "no control daemon serves it"


def reasons(snapshot: Snapshot) -> dict[str, str]:
    """Why the devices of a GPU (by UUID) cannot be used now, empty where they can."""
    gpus = {gpu.uuid: gpu for gpu in snapshot.inventory.gpus}
    domains = {domain.plan.name: domain for domain in snapshot.domains}
    names = domain_names(snapshot.plan)
    return {uuid: why_unusable(gpus.get(uuid), domains.get(name)) for uuid, name in names.items()}


def why_unusable(gpu: Gpu | None, domain: DomainStatus | None) -> str:
    """Why the devices of a GPU cannot be used now, empty where they can."""
    if gpu is None:
        return "its GPU is not there any more"
    if gpu.reason:
        return gpu.reason
    if domain is None:
        return NO_DOMAIN
    if gpu.uuid not in domain.plan.gpu_uuids:
        return "the running control daemon does not serve it; it will be served once that has ended"
    if domain.state != READY:
        return f"its domain is {domain.state}: {domain.reason}"
    return ""


def gpu_reason(gpu: Gpu, snapshot: Snapshot) -> str:
    """What is wrong with a GPU, empty where nothing is."""
    return gpu.reason or snapshot.plan.unavailable.get(gpu.pci_address, "")


def domain_names(plan: Plan) -> dict[str, str]:
    """The domain of each GPU (UUID) that has devices, or a pool to make them of."""
    names = {device.gpu_uuid: device.domain for device in plan.devices}
    return {**names, **{pool.gpu_uuid: pool.domain for pool in plan.pools}}
