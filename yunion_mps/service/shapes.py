"""Devices, GPUs and domains as JSON: what the API answers, and the command line prints."""

from __future__ import annotations

from typing import Any

from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.offers import Offer
from yunion_mps.models import DEV_TYPE, Device, DomainStatus, Gpu, PcieLink, Snapshot
from yunion_mps.planning import enforces_budgets
from yunion_mps.service.state import (
    AVAILABLE,
    NO_DOMAIN,
    NOT_USED,
    PENDING,
    UNAVAILABLE,
    gpu_reason,
    reasons,
    why_unusable,
)

Json = dict[str, Any]


def devices_json(snapshot: Snapshot, ledger: Ledger | None = None) -> list[Json]:
    """Every device of the snapshot, with Cloudpods' own field names and ours, and those made for a lease.

    One that a former division has given is shown as it was given.
    """
    ledger = ledger or Ledger()
    former = ledger.former_leases(snapshot.plan.devices)
    pending = {name: one.waits for one in former.values() for name in one.pending}
    given = {device.id: device for lease in ledger.leases.values() for device in lease.devices}
    planned = {device.id for device in snapshot.plan.devices}
    made = [device for device in given.values() if device.id not in planned]
    gpus = {gpu.uuid: gpu for gpu in snapshot.inventory.gpus}
    why = reasons(snapshot)
    offers = [Offer(device, why.get(device.gpu_uuid, NO_DOMAIN)) for device in snapshot.plan.devices]
    free = ledger.free_devices(offers)
    shown = []
    for device in (*snapshot.plan.devices, *made):
        gpu, reason = gpus.get(device.gpu_uuid), why.get(device.gpu_uuid, NO_DOMAIN)
        state = UNAVAILABLE if reason else PENDING if device.id in pending else AVAILABLE
        now = given.get(device.id, device) if state == PENDING else device
        fields = _device_json(now, gpu, snapshot.plan.host_id, state, reason or pending.get(device.id, ""))
        shown.append({**fields, "lease": ledger.owners.get(device.id), "free": device.id in free})
    return shown


def _device_json(device: Device, gpu: Gpu | None, host_id: str, state: str, reason: str) -> Json:
    """A device with Cloudpods' own field names and ours; `reason` says why it is not available."""
    return {
        "id": device.id,
        "dev_type": DEV_TYPE,
        "model": gpu.name if gpu else None,
        "addr": device.addr,
        "vendor_device_id": gpu.vendor_device_id if gpu else None,
        "host_id": host_id,
        "numa_node": gpu.numa_node if gpu else None,
        "device_path": device.gpu_uuid,
        "pcie_info": _link_json(gpu.link) if gpu else None,
        "index": -1,
        "device_minor": -1,
        "mps_memory_limit": device.memory_limit_mib,
        "mps_memory_total": device.memory_total_mib,
        "mps_thread_percentage": _plain(device.thread_percentage),
        "gpu_uuid": device.gpu_uuid,
        "state": state,
        "reason": reason,
        "budget_enforced": device.budget_enforced,
    }


def _plain(percentage: float) -> float | int:
    """A percentage as JSON has it: 25, 33.3."""
    return int(percentage) if percentage == int(percentage) else percentage


def _link_json(link: PcieLink | None) -> Json | None:
    """The link as Cloudpods has it, its keys in alphabetical order."""
    return dict(sorted(link._asdict().items())) if link else None


def gpu_json(gpu: Gpu, domain: DomainStatus | None, snapshot: Snapshot, devices: int, *, used: bool) -> Json:
    """A GPU with so many devices, the domain that serves it, and whether it is `used` for MPS at all."""
    capability = gpu.compute_capability
    reason = gpu_reason(gpu, snapshot) or (why_unusable(gpu, domain) if used else "")
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "addr": gpu.address,
        "pci_address": gpu.pci_address,
        "memory_total": gpu.memory_mib,
        "compute_mode": gpu.compute_mode,
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "mig_enabled": gpu.mig_enabled,
        "vendor_device_id": gpu.vendor_device_id,
        "numa_node": gpu.numa_node,
        "pcie_info": _link_json(gpu.link),
        "render_node": gpu.render_node,
        "index": gpu.nvml_index,
        "device_minor": gpu.minor,
        "devices": devices,
        "state": UNAVAILABLE if reason else AVAILABLE if used else NOT_USED,
        "reason": reason,
        "budget_enforced": enforces_budgets(gpu),
    }


def domain_json(domain: DomainStatus) -> Json:
    """A domain, and what of it is pending."""
    plan = domain.plan
    return {
        "name": plan.name,
        "state": domain.state,
        "reason": domain.reason,
        "pending": domain.pending,
        "waits_for": list(domain.waits_for),
        "pid": domain.pid,
        "restarts": domain.restarts,
        "pipe_directory": plan.pipe_directory,
        "log_directory": plan.log_directory,
        "gpus": list(plan.gpu_uuids),
        "memory_limits": list(plan.memory_limits_mib),
        "thread_percentage": _plain(plan.thread_percentage),
    }
