"""Devices, GPUs and domains as the API answers them: their state, and why one is unusable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from yunion_mps.core import reasons as codes
from yunion_mps.core.enums import (
    AVAILABLE,
    FREE,
    LEASED,
    MIG,
    NO_MEMORY,
    NOT_USED,
    PENDING,
    RESERVED,
    TIME_SLICING,
    UNAVAILABLE,
)
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import (
    Device,
    DomainStatus,
    Gpu,
    Holder,
    Lease,
    PcieLink,
    Pool,
    ServedUser,
    Snapshot,
)
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import user_name
from yunion_mps.inventory.nvml import GpuLoad
from yunion_mps.inventory.scan import INSTANCE_GONE
from yunion_mps.leases.ledger import Ledger
from yunion_mps.planning.division import enforces_budgets, thread_tenths, with_memory
from yunion_mps.planning.mig import describe_layout
from yunion_mps.supervisor.serving import GONE, NO_DOMAIN, domain_names, why_unusable

if TYPE_CHECKING:
    from yunion_mps import answers

_OUTDATED = Reason("the control daemon of its lease is gone", codes.LEASE_OUTDATED)


def unusable_reasons(snapshot: Snapshot) -> dict[str, Reason]:
    """Return why the devices of each divided GPU (UUID) cannot be used now, empty if they can."""
    usable = dict.fromkeys(domain_names(snapshot.plan), NO_REASON)
    return {**usable, **snapshot.unusable}


def refuse_unserved(lease: Lease, snapshot: Snapshot) -> None:
    """Raise HostError if a device is not served now, or not by the control daemon in its environment.

    If CUDA finds no control daemon, it runs without one, and without limits.
    """
    reasons = unusable_reasons(snapshot)
    for device in lease.devices:
        why = _why_device(device, reasons, snapshot, _OUTDATED)
        if why:
            message = f"device {device.addr} is unavailable: {why}"
            if why.code in (codes.MIG_INSTANCE_GONE, codes.LEASE_OUTDATED):
                raise HostError(message, codes.hint_of(why.code, lease=lease.id), why.code)
            raise HostError(message, "see: yunion-mps status")
    name = domain_names(snapshot.plan).get(lease.devices[0].gpu_uuid, "")
    if name == lease.devices[0].domain == "":
        return
    served = [status.plan.pipe_directory for status in snapshot.domains if status.plan.name == name]
    if lease.environment.get("CUDA_MPS_PIPE_DIRECTORY") not in served:
        message = f"the control daemon of {lease.addresses} was replaced after the lease was granted"
        hint = codes.hint_of(codes.LEASE_OUTDATED, lease=lease.id)
        raise HostError(message, hint, codes.LEASE_OUTDATED)


def _why_device(
    device: Device, reasons: Mapping[str, Reason], snapshot: Snapshot, not_served: Reason = NO_DOMAIN
) -> Reason:
    """Why a device cannot be used now, given the `reasons` of the GPUs in the plan.

    A leased device without a control daemon stays usable when the plan no longer has it, as long as the GPU,
    or MIG instance, exists; one with a control daemon is `not_served` then.
    """
    if device.gpu_uuid in reasons:
        return reasons[device.gpu_uuid]
    gpu = next((gpu for gpu in snapshot.inventory.gpus if gpu.uuid == device.gpu_uuid), None)
    if gpu is None:
        return INSTANCE_GONE if device.is_on_instance else GONE
    if device.domain:
        return gpu.reason or not_served
    return why_unusable(gpu, "", None, snapshot.plan)


def devices_json(
    snapshot: Snapshot,
    ledger: Ledger,
    name_holder: Callable[[Holder], str] = str,
    used_by_others: Mapping[str, Reason] = {},
    free_for: Mapping[str, str] = {},
) -> list[answers.DeviceJson]:
    """Return all devices, also those created for a lease, with Cloudpods' field names and ours.

    A device that was leased before a reload is shown as it was leased.

    name_holder: describes a holder for people
    used_by_others: why GPUs (UUIDs) cannot be leased now
    free_for: the only user who can lease free devices of a domain, by its name; empty for no user
    """
    states = _DeviceStates(snapshot, ledger, used_by_others)
    not_free_for: dict[str, list[str]] = {}
    for domain in snapshot.domains:
        not_free_for[domain.plan.name] = [user_name(uid) for uid in domain.failing_users]
    gpus: dict[str, Gpu] = {}
    links: dict[str, answers.PcieLinkJson | None] = {}  # each is shared, because devices are many
    for gpu in snapshot.inventory.gpus:
        if gpu.uuid:
            gpus[gpu.uuid] = gpu
            links[gpu.uuid] = _link_json(gpu.link)
    rows: list[answers.DeviceJson] = []
    for device in states.devices:
        state, reason = states.of(device)
        its_gpu = gpus.get(device.gpu_uuid)
        lease = states.lease_of(device)
        # While its division changes, it is shown as it was leased.
        shown = states.as_leased(device) if state == PENDING else device
        rows.append(
            {
                "id": shown.id,
                "dev_type": shown.dev_type,
                "model": its_gpu.name if its_gpu else None,
                "addr": shown.addr,
                "vendor_device_id": its_gpu.vendor_device_id if its_gpu else None,
                "host_id": snapshot.plan.host_id,
                "numa_node": its_gpu.numa_node if its_gpu else None,
                "device_path": shown.gpu_uuid,
                "pcie_info": links.get(device.gpu_uuid),
                "index": -1,
                "device_minor": -1,
                "mps_memory_limit": shown.memory_limit_mib,
                "mps_memory_total": shown.memory_total_mib,
                "mps_thread_percentage": _plain(shown.thread_percentage),
                "memory_mib": shown.memory_limit_mib,
                "gpu_memory_mib": shown.memory_total_mib,
                "thread_percentage": _plain(shown.thread_percentage),
                "gpu_uuid": shown.gpu_uuid,
                "state": state,
                "reason": reason,
                "reason_code": reason.code,
                "budget_enforced": shown.budget_enforced,
                "mig_profile": (its_gpu.mig_profile or None) if its_gpu else None,
                "sharing": shown.sharing,
                "reserved_for": snapshot.plan.reserved.get(device.gpu_uuid),
                "free_for": free_for.get(shown.domain) if state == FREE else None,
                "not_free_for": not_free_for.get(shown.domain, []) if state == FREE else [],
                "lease": lease.id if lease else None,
                "holder": name_holder(lease.holder) if lease else None,
            }
        )
    return rows


class _DeviceStates:
    """The state of each device, and why."""

    def __init__(self, snapshot: Snapshot, ledger: Ledger, used_by_others: Mapping[str, Reason]) -> None:
        self._snapshot = snapshot
        self._ledger = ledger
        self._leased: dict[str, Device] = {}
        for lease in ledger.leases.values():
            for device in lease.devices:
                self._leased[device.id] = device
        planned = snapshot.plan.devices
        planned_ids = {device.id for device in planned}
        made_for_leases = [device for name, device in self._leased.items() if name not in planned_ids]
        #: Those of the plan, and those that only leases have.
        self.devices = (*planned, *made_for_leases)
        self._unusable = unusable_reasons(snapshot)
        for uuid in used_by_others.keys() - ledger.ways_of_sharing().keys():
            if not self._unusable.get(uuid, NO_DOMAIN):
                self._unusable[uuid] = used_by_others[uuid]
        served = [device for device in planned if not self._unusable.get(device.gpu_uuid, NO_DOMAIN)]
        self._free = ledger.free_devices(served)
        self._pending = self._pending_reasons()

    def _pending_reasons(self) -> dict[str, Reason]:
        """Return why devices (ids) are pending."""
        devices = self._snapshot.plan.devices
        pending: dict[str, Reason] = {}
        for wait in self._ledger.lease_waits(devices).values():
            for name in wait.pending:
                pending[name] = wait.reason
        waits = self._snapshot.waits
        for device in devices:
            if device.gpu_uuid in waits and device.id not in self._ledger.lease_of:
                pending[device.id] = waits[device.gpu_uuid]
        return pending

    def lease_of(self, device: Device) -> Lease | None:
        return self._ledger.leases.get(self._ledger.lease_of.get(device.id, ""))

    def as_leased(self, device: Device) -> Device:
        """Return the device as its lease has it, which may be from an earlier division."""
        return self._leased.get(device.id, device)

    def of(self, device: Device) -> tuple[str, Reason]:
        """Return the device's state, and why it cannot be leased."""
        held = self.as_leased(device)
        concerned = device if held.gpu_uuid == device.gpu_uuid else held
        unusable = _why_device(concerned, self._unusable, self._snapshot, _OUTDATED)
        if unusable:
            return UNAVAILABLE, unusable
        if device.id in self._pending:
            return PENDING, self._pending[device.id]
        if device.id in self._free:
            use = self._snapshot.plan.reserved.get(device.gpu_uuid)
            if use:
                return RESERVED, Reason(f"reserved for {use}", codes.RESERVED)
            return FREE, NO_REASON
        if self.lease_of(device):
            return LEASED, NO_REASON
        return NO_MEMORY, NO_REASON


def _plain(percentage: float) -> float | int:
    return int(percentage) if percentage == int(percentage) else percentage


def _link_json(link: PcieLink | None) -> answers.PcieLinkJson | None:
    """The link as Cloudpods has it, its keys in alphabetical order."""
    if link is None:
        return None
    return {
        "lane_width": link.lane_width,
        "throughput": link.throughput,
        "transfer_rate_per_lane": link.transfer_rate_per_lane,
        "version": link.version,
    }


def gpu_json(
    gpu: Gpu,
    snapshot: Snapshot,
    devices: int,
    memory_free_mib: int | None,
    free_for: str | None,
    load: GpuLoad,
    sharing: str | None,
    why_faulty: Reason,
    why_unusable: Reason,
    serving: Collection[str],
) -> answers.GpuJson:
    """Return the GPU as the API answers it.

    devices: how many devices it has
    memory_free_mib: how much of its pool one more client can get; None if it has no pool
    free_for: the only user who can lease its free devices; empty for no user, None for all
    sharing: how it is shared; None if it is not
    why_faulty: why it does not serve as configured
    why_unusable: why its devices cannot be used
    serving: the UUIDs of the GPUs that serve devices, themselves or by a MIG instance
    """
    uuid = gpu.uuid or ""
    plan = snapshot.plan
    capability = gpu.compute_capability
    reason = why_faulty or why_unusable
    is_used = bool(sharing) or plan.divides(gpu)
    is_waiting = bool(why_faulty) and not gpu.reason and uuid in serving
    state = _gpu_state(gpu, reason, is_used=is_used, is_shared=bool(sharing), is_waiting=is_waiting)
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "addr": gpu.address,
        "pci_address": gpu.pci_address,
        "memory_mib": with_memory(gpu, plan).memory_mib,
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
        "state": state,
        "reason": reason,
        "reason_code": reason.code,
        "budget_enforced": enforces_budgets(gpu) and sharing != TIME_SLICING,
        "sharing": sharing,
        "time_slice": plan.time_slices.get(uuid),
        "mig_layout": (describe_layout(plan, gpu) or None) if sharing == MIG else None,
        "parent": gpu.parent or None,
        "mig_profile": gpu.mig_profile or None,
        "reserved_for": plan.reserved.get(uuid),
        "memory_free_mib": memory_free_mib,
        "free_for": free_for,
        "memory_used_mib": load.memory_used_mib,
        "utilization": load.utilization,
        "temperature_c": load.temperature_c,
        "power_w": load.power_w,
        "power_limit_w": load.power_limit_w,
    }


def _gpu_state(gpu: Gpu, reason: Reason, *, is_used: bool, is_shared: bool, is_waiting: bool) -> str:
    """Return the state of a GPU; `is_waiting`: it serves, though not as configured."""
    is_foreign_instance = gpu.is_instance and gpu.uuid is None
    if is_foreign_instance or not is_used:  # not ours, so it is no problem
        return NOT_USED
    if is_waiting:
        return PENDING
    if reason:
        return UNAVAILABLE
    return AVAILABLE if is_shared else NOT_USED


def pool_json(
    pool: Pool,
    gpu: Gpu,
    *,
    reason: Reason,
    memory_free_mib: int,
    free_tenths: int,
    reserved_for: str | None,
    free_for: str | None,
) -> answers.PoolJson:
    """Return the pool as the API answers it.

    reason: why it cannot be used; empty if it can
    memory_free_mib: how much one more client can get
    free_tenths: how much of the threads is not leased, in tenths of a percent
    reserved_for: for whom the GPU is reserved, if it is
    free_for: the only user who can lease from it; empty for no user, None for all
    """
    is_counted = bool(pool.thread_percentage)
    return {
        "gpu_uuid": pool.gpu_uuid,
        "addr": gpu.address,
        "model": gpu.name,
        "numa_node": gpu.numa_node,
        "memory_unit_mib": pool.unit_mib,
        "memory_reserve_mib": pool.reserve_mib,
        "memory_mib": pool.memory_mib,
        "memory_free_mib": memory_free_mib,
        "gpu_memory_mib": pool.memory_total_mib,
        "thread_overcommit": pool.thread_overcommit,
        "thread_percentage": pool.thread_percentage or None,
        "thread_percentage_total": _plain(thread_tenths(pool) / 10) if is_counted else None,
        "thread_percentage_free": _plain(free_tenths / 10) if is_counted else None,
        "state": UNAVAILABLE if reason else AVAILABLE,
        "reason": reason,
        "reason_code": reason.code,
        "budget_enforced": enforces_budgets(gpu),
        "reserved_for": reserved_for,
        "free_for": free_for,
    }


def domain_json(domain: DomainStatus, users: Sequence[ServedUser] = ()) -> answers.DomainJson:
    """Return the domain as the API answers it; `users` are those whom it serves now."""
    plan = domain.plan
    return {
        "name": plan.name,
        "state": domain.state,
        "reason": domain.reason,
        "reason_code": domain.reason.code,
        "pending": domain.pending,
        "waits_for": list(domain.waits_for),
        "pid": domain.pid,
        "restarts": domain.restarts,
        "pipe_directory": plan.pipe_directory,
        "log_directory": plan.log_directory,
        "gpus": list(plan.gpu_uuids),
        "memory_limits_mib": list(plan.memory_limits_mib),
        "thread_percentage": _plain(plan.thread_percentage),
        "multiuser": plan.multiuser,
        "serves": _served_user_json(users[0]) if users else None,
    }


def _served_user_json(user: ServedUser) -> answers.ServedUserJson:
    return {
        "user": user_name(user.uid),
        "uid": user.uid,
        "because_of": user.because_of,
        "since": rfc3339(user.since_s),
    }
