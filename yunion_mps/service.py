"""What the outside may ask for, made once from the snapshot: the API, the command line and the exporters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from yunion_mps import __version__
from yunion_mps.errors import NotFoundError
from yunion_mps.journal import Journal
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.offers import Offer
from yunion_mps.models import DEV_TYPE, Device, DomainStatus, Gpu, Lease, PcieLink, Plan, Snapshot
from yunion_mps.mps.states import READY
from yunion_mps.planning import client_environment, enforces_budgets
from yunion_mps.supervisor.warnings import warnings
from yunion_mps.usage.hour import Usage

AVAILABLE = "available"
UNAVAILABLE = "unavailable"
NOT_USED = "not used"

#: What the host can be at; see `_state`.
STATES = ("ready", "degraded", "failed", "disabled")

#: A page of a listing where nothing else is asked for, as with Cloudpods.
DEFAULT_LIMIT = 20

#: The kinds of events.
EVENT_KINDS = ("domain", "limit", "gpu", "compute_mode", "configuration", "client", "lease", "daemon")

Json = dict[str, Any]

_NO_DOMAIN = "no control daemon serves it"


class Filters(NamedTuple):
    """Which devices a listing is to show; None takes all."""

    dev_type: str | None = None
    model: str | None = None
    addr: str | None = None
    device_path: str | None = None
    vendor_device_id: str | None = None
    numa_node: int | None = None
    unused: bool = False

    def take(self, device: Mapping[str, Any]) -> bool:
        """Whether the device is wanted; an address may be the device's own or its GPU's."""
        if self.addr is not None and self.addr not in (device["addr"], device["addr"].rpartition("-")[0]):
            return False
        if self.unused and not device["free"]:
            return False
        fields = ("dev_type", "model", "device_path", "vendor_device_id", "numa_node")
        return all(getattr(self, field) in (None, device[field]) for field in fields)


class Wanted(NamedTuple):
    """Which events: after an id (the oldest first), or the newest from a time (s since 1970) on."""

    after: int | None = None
    since_s: float = 0.0
    limit: int = 100
    kind: str = ""


class Service:
    """Answers from the snapshot that `snapshot` returns; what is costly is made once for each snapshot."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], started_s: float, pid: int, journal: Journal | None = None
    ) -> None:
        self._take = snapshot
        self._journal = journal
        self._started_s = started_s
        self._pid = pid
        self._made_for = -1
        self._devices: list[Json] = []
        #: Who has which device; there is none before the event loop is there.
        self.ledger: Ledger | None = None
        #: What was used in the last hour.
        self.usage = Usage()

    @property
    def version(self) -> int:
        """Changes when an answer may change."""
        return self._take().version + (self.ledger.version if self.ledger else 0)

    def devices(self, filters: Filters, limit: int, offset: int) -> Json:
        """One page of the devices that the filters take; a `limit` of 0 means all."""
        wanted = [device for device in self._all() if filters.take(device)]
        page = wanted[offset : offset + limit] if limit else wanted[offset:]
        return {"isolated_devices": page, "total": len(wanted), "limit": limit, "offset": offset}

    def device(self, name: str) -> Json:
        """One device by id, address or a unique beginning of either; raises NotFoundError otherwise."""
        devices = self._all()
        keys = ("id", "addr")
        found = [device for device in devices if name in (device["id"], device["addr"])]
        found = found or [device for device in devices if any(device[key].startswith(name) for key in keys)]
        if not found:
            shown = name if name.isprintable() and len(name) <= 100 else repr(name[:100])
            raise NotFoundError(f"there is no device {shown}", "list the devices with: yunion-mps list")
        if len(found) > 1:
            few = ", ".join(device["addr"] for device in found[:4])
            more = ", …" if len(found) > 4 else ""
            raise NotFoundError(
                f"{name} names {len(found)} devices ({few}{more})", "give more of the id or address"
            )
        return {**found[0], **self._details(found[0])}

    def gpus(self) -> Json:
        """Every GPU of the host, the broken ones with their reason."""
        snapshot = self._take()
        names = _domain_names(snapshot.plan)
        domains = {domain.plan.name: domain for domain in snapshot.domains}
        counts = Counter(device.gpu_uuid for device in snapshot.plan.devices)
        gpus = [
            {
                **_gpu_json(
                    gpu,
                    domains.get(names.get(gpu.uuid or "", "")),
                    snapshot,
                    counts[gpu.uuid or ""],
                    used=gpu.uuid in names,
                ),
                "memory_free": self._memory_free(gpu, snapshot),
            }
            for gpu in snapshot.inventory.gpus
        ]
        return {"gpus": gpus, "total": len(gpus)}

    def _memory_free(self, gpu: Gpu, snapshot: Snapshot) -> int | None:
        """How many MiB one more client can get where memory is handed out in units, None elsewhere."""
        pool = next((pool for pool in snapshot.plan.pools if pool.gpu_uuid == gpu.uuid), None)
        if pool is None:
            return None
        if reasons(snapshot)[pool.gpu_uuid]:
            return 0
        return self.ledger.free_mib(pool) if self.ledger else pool.memory_mib

    def status(self) -> Json:
        """The daemon, the driver and the domains at a glance."""
        snapshot = self._take()
        devices = self._all()
        available = sum(device["state"] == AVAILABLE for device in devices)
        return {
            "state": _state(snapshot),
            "notice": snapshot.notice,
            "warnings": list(warnings(snapshot)),
            "version": __version__,
            "pid": self._pid,
            "started": self._started_s,
            "host_id": snapshot.plan.host_id,
            "driver": {
                "version": snapshot.inventory.driver.version or None,
                "cuda_version": snapshot.inventory.driver.cuda_version,
            },
            "devices": {
                "total": len(devices),
                AVAILABLE: available,
                UNAVAILABLE: len(devices) - available,
            },
            "gpus": {
                "total": len(snapshot.inventory.gpus),
                UNAVAILABLE: sum(bool(_gpu_reason(gpu, snapshot)) for gpu in snapshot.inventory.gpus),
            },
            "domains": [_domain_json(domain) for domain in snapshot.domains],
        }

    def events(self, wanted: Wanted) -> Json:
        """The events that are wanted, oldest first, and the newest one's id; raises HostError."""
        if self._journal is None:
            return {"events": [], "last": 0}
        if wanted.after is None:
            found = self._journal.newest(wanted.since_s, wanted.limit, wanted.kind)
        else:
            found = self._journal.after(wanted.after, wanted.limit, wanted.kind)
        last = found[-1].id if found else self._journal.last_id()
        events = [{"id": one.id, "time": one.time_s, **one.event._asdict()} for one in found]
        return {"events": events, "last": last}

    def when_there_are_more(self, call: Callable[[], None]) -> None:
        """Have `call` called once, with the next event."""
        if self._journal:
            self._journal.waiting.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        """Not to call it after all."""
        if self._journal and call in self._journal.waiting:
            self._journal.waiting.remove(call)

    def reasons(self) -> Mapping[str, str]:
        """Why the devices of a GPU (by UUID) cannot be used now, empty where they can."""
        return reasons(self._take())

    def _leases(self) -> Collection[Lease]:
        return self.ledger.leases.values() if self.ledger else ()

    def _all(self) -> list[Json]:
        if self._made_for != self.version:
            self._devices = devices_json(self._take(), self.ledger)
            self._made_for = self.version
        return self._devices

    def _details(self, shown: Json) -> Json:
        snapshot = self._take()
        made = [device for lease in self._leases() for device in lease.devices]
        device = next(device for device in (*snapshot.plan.devices, *made) if device.id == shown["id"])
        domain = next((d.plan for d in snapshot.domains if d.plan.name == device.domain), None)
        return {
            "slot": device.slot,
            "domain": device.domain,
            "client_environment": client_environment([device], domain) if domain else {},
        }


def devices_json(snapshot: Snapshot, ledger: Ledger | None = None) -> list[Json]:
    """Every device of the snapshot, with Cloudpods' own field names and ours, and those made for a lease."""
    ledger = ledger or Ledger()
    planned = {device.id for device in snapshot.plan.devices}
    leased = [device for lease in ledger.leases.values() for device in lease.devices]
    made = [device for device in leased if device.id not in planned]
    gpus = {gpu.uuid: gpu for gpu in snapshot.inventory.gpus}
    why = reasons(snapshot)
    offers = [Offer(device, why.get(device.gpu_uuid, _NO_DOMAIN)) for device in snapshot.plan.devices]
    free = ledger.free_devices(offers)
    shown = []
    for device in (*snapshot.plan.devices, *made):
        gpu, reason = gpus.get(device.gpu_uuid), why.get(device.gpu_uuid, _NO_DOMAIN)
        fields = _device_json(device, gpu, snapshot.plan.host_id, reason)
        shown.append({**fields, "lease": ledger.owners.get(device.id), "free": device.id in free})
    return shown


def reasons(snapshot: Snapshot) -> dict[str, str]:
    """Why the devices of a GPU (by UUID) cannot be used now, empty where they can."""
    gpus = {gpu.uuid: gpu for gpu in snapshot.inventory.gpus}
    domains = {domain.plan.name: domain for domain in snapshot.domains}
    names = _domain_names(snapshot.plan)
    return {uuid: _reason(gpus.get(uuid), domains.get(name)) for uuid, name in names.items()}


def _reason(gpu: Gpu | None, domain: DomainStatus | None) -> str:
    """Why the devices of a GPU cannot be used now, empty where they can."""
    if gpu is None:
        return "its GPU is not there any more"
    if gpu.reason:
        return gpu.reason
    if domain is None:
        return _NO_DOMAIN
    if gpu.uuid not in domain.plan.gpu_uuids:
        return "the running control daemon does not serve it; it will be served once that has ended"
    if domain.state != READY:
        return f"its domain is {domain.state}: {domain.reason}"
    return ""


def _device_json(device: Device, gpu: Gpu | None, host_id: str, reason: str) -> Json:
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
        "state": UNAVAILABLE if reason else AVAILABLE,
        "reason": reason,
        "budget_enforced": device.budget_enforced,
    }


def _plain(percentage: float) -> float | int:
    """A percentage as JSON has it: 25, 33.3."""
    return int(percentage) if percentage == int(percentage) else percentage


def _link_json(link: PcieLink | None) -> Json | None:
    """The link as Cloudpods has it, its keys in alphabetical order."""
    return dict(sorted(link._asdict().items())) if link else None


def _gpu_reason(gpu: Gpu, snapshot: Snapshot) -> str:
    return gpu.reason or snapshot.plan.unavailable.get(gpu.pci_address, "")


def _domain_names(plan: Plan) -> dict[str, str]:
    """The domain of each GPU (UUID) that has devices, or a pool to make them of."""
    names = {device.gpu_uuid: device.domain for device in plan.devices}
    return {**names, **{pool.gpu_uuid: pool.domain for pool in plan.pools}}


def _gpu_json(gpu: Gpu, domain: DomainStatus | None, snapshot: Snapshot, devices: int, *, used: bool) -> Json:
    capability = gpu.compute_capability
    reason = _gpu_reason(gpu, snapshot) or (_reason(gpu, domain) if used else "")
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


def _domain_json(domain: DomainStatus) -> Json:
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


def _state(snapshot: Snapshot) -> str:
    """`ready`, `degraded` (something that should serve does not), `failed` (nothing does) or `disabled`."""
    if not snapshot.enabled:
        return "disabled"
    serving = sum(domain.state == READY for domain in snapshot.domains)
    if not serving:
        return "failed"
    broken = any(_gpu_reason(gpu, snapshot) for gpu in snapshot.inventory.gpus)
    there = {gpu.uuid for gpu in snapshot.inventory.gpus}
    broken = broken or any(uuid not in there for uuid in _domain_names(snapshot.plan))
    return "degraded" if broken or serving < len(snapshot.domains) else "ready"


def one_line(status: Json) -> str:
    """The status in one line, for systemd and for logs."""
    devices, domains = status["devices"], status["domains"]
    serving = sum(domain["state"] == READY for domain in domains)
    if status["notice"]:
        return str(status["notice"])
    line = f"{devices[AVAILABLE]} of {devices['total']} devices available, "
    line += f"{serving} of {len(domains)} control daemons serving"
    troubles: Sequence[str] = [d["reason"] for d in domains if d["state"] != READY]
    return line + (f"; {troubles[0]}" if troubles else "")
