"""The state of the host, its GPUs and devices, and the reason if one is unusable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from yunion_mps import reasons as codes
from yunion_mps.errors import HostError
from yunion_mps.models import DomainStatus, Gpu, Lease, Plan, Snapshot
from yunion_mps.mps.states import READY
from yunion_mps.reasons import NO_REASON, Reason

if TYPE_CHECKING:
    from yunion_mps import answers

NO_DOMAIN = Reason("no control daemon serves it", codes.NO_DOMAIN)
_GONE = Reason("its GPU is no longer present", codes.GPU_GONE)
_NOT_SERVED = Reason(
    "the running control daemon does not serve its GPU; the next one will, once the running one has ended",
    codes.GPU_NOT_SERVED,
)


def unusable_reasons(snapshot: Snapshot) -> dict[str, Reason]:
    """Why the devices of a GPU (by UUID) cannot be used now, empty if they can."""
    gpus = {gpu.uuid: gpu for gpu in snapshot.inventory.gpus}
    domains = {domain.plan.name: domain for domain in snapshot.domains}
    names = domain_names(snapshot.plan)
    return {uuid: why_unusable(gpus.get(uuid), domains.get(name)) for uuid, name in names.items()}


def why_unusable(gpu: Gpu | None, domain: DomainStatus | None) -> Reason:
    """Why the devices of a GPU cannot be used now, empty if they can."""
    if gpu is None:
        return _GONE
    if gpu.reason:
        return gpu.reason
    if domain is None:
        return NO_DOMAIN
    if gpu.uuid not in domain.plan.gpu_uuids:
        return _NOT_SERVED
    if domain.state != READY:
        return Reason(f"its domain is {domain.state}: {domain.reason}", codes.DOMAIN_NOT_READY)
    return NO_REASON


def refuse_unserved(lease: Lease, snapshot: Snapshot) -> None:
    """Raise HostError if a device is not served now, or not by the control daemon in its environment.

    If CUDA finds no control daemon, it runs without one, and without limits.
    """
    reasons = unusable_reasons(snapshot)
    for device in lease.devices:
        why = reasons.get(device.gpu_uuid, "its GPU is no longer present")
        if why:
            raise HostError(f"device {device.addr} is unavailable: {why}", "see: yunion-mps status")
    name = domain_names(snapshot.plan).get(lease.devices[0].gpu_uuid)
    served = [status.plan.pipe_directory for status in snapshot.domains if status.plan.name == name]
    if lease.environment["CUDA_MPS_PIPE_DIRECTORY"] not in served:
        what = f"the control daemon of {lease.addresses} was replaced after the lease was granted"
        raise HostError(what, f"release it, and take a new one: yunion-mps lease release {lease.id}")


def gpu_reason(gpu: Gpu, snapshot: Snapshot) -> Reason:
    return gpu.reason or snapshot.plan.unavailable.get(gpu.pci_address, NO_REASON)


def domain_names(plan: Plan) -> dict[str, str]:
    """The domain of each GPU (UUID) that has devices or a pool."""
    names = {device.gpu_uuid: device.domain for device in plan.devices}
    return {**names, **{pool.gpu_uuid: pool.domain for pool in plan.pools}}


def state_of(snapshot: Snapshot) -> str:
    """`ready`, `degraded` (something that should serve does not), `failed` (nothing does) or `disabled`."""
    if not snapshot.enabled:
        return "disabled"
    serving = sum(domain.state == READY for domain in snapshot.domains)
    if not serving:
        return "failed"
    broken = any(gpu_reason(gpu, snapshot) for gpu in snapshot.inventory.gpus)
    broken = broken or any(unusable_reasons(snapshot).values())
    return "degraded" if broken or serving < len(snapshot.domains) else "ready"


def not_ready_reasons(snapshot: Snapshot) -> list[str]:
    """Why no device can be used although MPS is enabled, one line each; empty if one can."""
    unusable = unusable_reasons(snapshot)
    if not snapshot.enabled or not all(unusable.values()):
        return []
    lines: list[str] = [snapshot.notice]
    lines += [f"{one.plan.name}: {one.reason or one.state}" for one in snapshot.domains if one.state != READY]
    faulty = {gpu: reason for gpu in snapshot.inventory.gpus if (reason := gpu_reason(gpu, snapshot))}
    lines += [f"GPU {gpu.address}: {reason}" for gpu, reason in faulty.items()]
    explained = {gpu.uuid for gpu in faulty}
    lines += [
        f"devices of GPU {uuid}: {reason}"
        for uuid, reason in unusable.items()
        if reason.code != codes.DOMAIN_NOT_READY and uuid not in explained
    ]
    return [line.replace("\n", "; ") for line in lines if line] or ["no GPU is divided into devices"]


def one_line(status: answers.ServiceFields) -> str:
    """The status in one line, for systemd and for logs."""
    devices, domains = status["devices"], status["domains"]
    serving = sum(domain["state"] == READY for domain in domains)
    if status["notice"]:
        return str(status["notice"])
    line = f"{devices['available']} of {devices['total']} devices available, "
    line += f"{devices['pending']} pending, " if devices["pending"] else ""
    line += f"{serving} of {len(domains)} control daemons serving"
    errors: Sequence[str] = [d["reason"] for d in domains if d["state"] != READY]
    return line + (f"; {errors[0]}" if errors else "")
