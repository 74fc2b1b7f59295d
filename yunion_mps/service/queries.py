"""What the outside may ask for, made once from the snapshot: the API, the command line and the exporters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from yunion_mps import __version__
from yunion_mps.errors import NotFoundError
from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import Gpu, Lease, Snapshot
from yunion_mps.planning import client_environment
from yunion_mps.service.shapes import Json, devices_json, domain_json, gpu_json
from yunion_mps.service.state import (
    AVAILABLE,
    PENDING,
    UNAVAILABLE,
    domain_names,
    gpu_reason,
    reasons,
    state_of,
)
from yunion_mps.service.usage import UsageHistory
from yunion_mps.supervisor.event_log import EventLog
from yunion_mps.supervisor.status import warnings

#: A page of a listing where nothing else is asked for, as with Cloudpods.
DEFAULT_LIMIT = 20

#: The kinds of events.
EVENT_KINDS = ("domain", "limit", "gpu", "compute_mode", "configuration", "client", "lease", "daemon")

#: How bad they are.
SEVERITIES = ("info", "warning", "error")


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
        self, snapshot: Callable[[], Snapshot], started_s: float, pid: int, event_log: EventLog | None = None
    ) -> None:
        self._take = snapshot
        self._event_log = event_log
        self._started_s = started_s
        self._pid = pid
        self._made_for = -1
        self._devices: list[Json] = []
        #: Who has which device; there is none before the event loop is there.
        self.ledger: Ledger | None = None
        #: What was used in the last hour.
        self.usage = UsageHistory()

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
        names = domain_names(snapshot.plan)
        domains = {domain.plan.name: domain for domain in snapshot.domains}
        counts = Counter(device.gpu_uuid for device in snapshot.plan.devices)
        gpus = [
            {
                **gpu_json(
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
        states = Counter(device["state"] for device in devices)
        return {
            "state": state_of(snapshot),
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
                **{state: states[state] for state in (AVAILABLE, UNAVAILABLE, PENDING)},
            },
            "gpus": {
                "total": len(snapshot.inventory.gpus),
                UNAVAILABLE: sum(bool(gpu_reason(gpu, snapshot)) for gpu in snapshot.inventory.gpus),
            },
            "domains": [domain_json(domain) for domain in snapshot.domains],
        }

    def events(self, wanted: Wanted) -> Json:
        """The events that are wanted, oldest first, and the newest one's id; raises HostError."""
        if self._event_log is None:
            return {"events": [], "last": 0}
        if wanted.after is None:
            found = self._event_log.newest(wanted.since_s, wanted.limit, wanted.kind)
        else:
            found = self._event_log.after(wanted.after, wanted.limit, wanted.kind)
        last = found[-1].id if found else self._event_log.last_id()
        events = [{"id": one.id, "time": one.time_s, **one.event._asdict()} for one in found]
        return {"events": events, "last": last}

    def when_there_are_more(self, call: Callable[[], None]) -> None:
        """Have `call` called once, with the next event."""
        if self._event_log:
            self._event_log.waiting.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        """Not to call it after all."""
        if self._event_log and call in self._event_log.waiting:
            self._event_log.waiting.remove(call)

    def reasons(self) -> Mapping[str, str]:
        """Why the devices of a GPU (by UUID) cannot be used now, empty where they can."""
        return reasons(self._take())

    def ill_gpus(self) -> frozenset[str]:
        """The addresses of the GPUs that cannot be used themselves, whatever their control daemons are at."""
        snapshot = self._take()
        return frozenset(gpu.address for gpu in snapshot.inventory.gpus if gpu_reason(gpu, snapshot))

    def _leases(self) -> Collection[Lease]:
        return self.ledger.leases.values() if self.ledger else ()

    def _all(self) -> list[Json]:
        if self._made_for != self.version:
            self._devices = devices_json(self._take(), self.ledger)
            self._made_for = self.version
        return self._devices

    def _details(self, shown: Json) -> Json:
        snapshot = self._take()
        given = [device for lease in self._leases() for device in lease.devices]
        both = (*snapshot.plan.devices, *given)
        if shown["state"] == PENDING:
            both = (*given, *snapshot.plan.devices)
        device = next(device for device in both if device.id == shown["id"])
        domain = next((d.plan for d in snapshot.domains if d.plan.name == device.domain), None)
        return {
            "slot": device.slot,
            "domain": device.domain,
            "client_environment": client_environment([device], domain) if domain else {},
        }
