"""Queries: devices, GPUs and the status, computed once for each snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import __version__
from yunion_mps.core.addresses import is_part, shown_address
from yunion_mps.core.conditions import Condition, shown
from yunion_mps.core.enums import (
    FREE,
    PENDING,
    PROBLEM,
    READY,
    RESERVED,
    TERMINATE,
    TIME_SLICING,
    UNAVAILABLE,
    WARNING,
)
from yunion_mps.core.errors import HostError, NotFoundError
from yunion_mps.core.models import ALL, Device, Gpu, Holder, Pool, ServedUser, Snapshot
from yunion_mps.core.reasons import DISABLED, NO_REASON, Reason, hint_of
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import user_name
from yunion_mps.inventory.nvml import GpuLoad
from yunion_mps.inventory.scan import in_order, unusable_instances
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import Candidates, LeaseRequest, candidates_of, find_gpu, shorten
from yunion_mps.leases.served_users import served_users
from yunion_mps.observe.usage import UsageHistory
from yunion_mps.planning.environment import client_environment
from yunion_mps.service.events import LongPolls
from yunion_mps.supervisor.serving import domain_names, ways_in_effect
from yunion_mps.views.devices import devices_json, domain_json, gpu_json, pool_json, unusable_reasons
from yunion_mps.views.lease_conditions import conditions_with_leases

if TYPE_CHECKING:
    from yunion_mps import answers


#: The least percentage of the SM threads that a request can name, in tenths.
_LEAST_TENTHS = 10


class Filters(NamedTuple):
    """Selects the devices of a listing; None matches all."""

    dev_type: str | None = None
    model: str | None = None
    addr: str | None = None
    device_path: str | None = None
    vendor_device_id: str | None = None
    numa_node: int | None = None
    unused: bool = False

    def matches(self, device: answers.DeviceJson) -> bool:
        """Return whether the device matches.

        The address may be the device's own, its MIG instance's or its GPU's.
        """
        if self.addr is not None and not is_part(device["addr"], shown_address(self.addr)):
            return False
        if self.unused and device["state"] != FREE:
            return False
        values: Mapping[str, object] = device
        fields = ("dev_type", "model", "device_path", "vendor_device_id", "numa_node")
        return all(getattr(self, field) in (None, values[field]) for field in fields)


class Queries:
    """Answers queries from the current snapshot; expensive answers are computed once for each snapshot."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        started_s: float,
        pid: int,
        *,
        ledger: Ledger | None = None,
        name_holder: Callable[[Holder], str] = str,
    ) -> None:
        """Answer for the daemon that started at `started_s` (s since 1970) as process `pid`.

        snapshot: returns the state in effect
        ledger: the leases to show; None for none
        name_holder: describes a holder for people
        """
        self._snapshot = snapshot
        self._started_s = started_s
        self._pid = pid
        self._cached_version = -1
        self._devices: list[answers.DeviceJson] = []
        self._conditions: tuple[Condition, ...] = ()
        #: The number of devices of each GPU (UUID), with those of its MIG instances.
        self._device_counts = Counter[str]()
        self.ledger = Ledger() if ledger is None else ledger
        #: The whole MIG instances (UUIDs) that processes without a lease use, so they are not leased.
        self.used_by_others: Mapping[str, Reason] = {}
        self._candidates = Candidates()
        self._candidates_version = -1
        self._users_version = -1
        #: The users with jobs on the MPS servers, by domain name.
        self.users_with_jobs: Mapping[str, Sequence[ServedUser]] = {}
        self._promised: Mapping[str, Sequence[int]] = {}
        self._name_holder = name_holder
        self.usage = UsageHistory()
        self._use_version = 0
        #: The requests that wait for an answer to change.
        self.changes = LongPolls()
        self.ledger.listen(self.changes.notify)

    def set_used(self, used: Mapping[str, Reason]) -> None:
        """Set which whole MIG instances (UUIDs) processes without a lease use."""
        if used != self.used_by_others:
            self.used_by_others = used
            self._cached_version = -1
            self._candidates_version = -1
            self._use_version += 1
            self.changes.notify()

    def set_users(self, users: Mapping[str, Sequence[ServedUser]]) -> None:
        """Set the users with jobs on the MPS servers, by domain name."""
        if users != self.users_with_jobs:
            self.users_with_jobs = users
            self._cached_version = -1
            self._use_version += 1
            self.changes.notify()

    def set_promised(self, promised: Mapping[str, Sequence[int]]) -> None:
        """Set the users (uids) whom control daemons are to serve next, in this order, by domain name."""
        if promised != self._promised:
            self._promised = dict(promised)
            self._cached_version = -1
            self._use_version += 1
            self.changes.notify()

    @property
    def version(self) -> int:
        """Changes when an answer may change."""
        return self._snapshot().version + self.ledger.version + self._use_version

    def all_devices(self) -> list[answers.DeviceJson]:
        if self._cached_version != self.version:
            self._devices = devices_json(
                self._snapshot(),
                self.ledger,
                self._name_holder,
                self.used_by_others,
                self._free_for(),
            )
            self._device_counts = self._count_devices()
            self._conditions = conditions_with_leases(
                self._snapshot(), self._devices, self._gpus_with_usable(self._devices)
            )
            self._cached_version = self.version
        return self._devices

    def _free_for(self) -> dict[str, str]:
        """Return the only user who can lease devices of each domain now, by its name; empty if no user can.

        Domains whose devices everybody can lease are left out.
        """
        users = self.candidates().users
        free_for = {}
        for name in {*users, *self._promised}:
            uids = {user.uid for user in users.get(name, ())}
            uids.update(self._promised.get(name, ()))
            free_for[name] = user_name(uids.pop()) if len(uids) == 1 else ""
        return free_for

    def _count_devices(self) -> Counter[str]:
        counts = Counter(device["gpu_uuid"] for device in self._devices)
        for gpu in self._snapshot().inventory.gpus:
            if gpu.parent:
                counts[gpu.parent] += counts[gpu.uuid or ""]
        return counts

    def devices(self, filters: Filters, limit: int, offset: int) -> answers.DeviceListJson:
        """Return one page of the devices that match the filters; a `limit` of 0 means all."""
        matching = [device for device in self.all_devices() if filters.matches(device)]
        page = matching[offset : offset + limit] if limit else matching[offset:]
        return {"isolated_devices": page, "total": len(matching), "limit": limit, "offset": offset}

    def device(self, name: str) -> answers.DeviceDetailsJson:
        """Return one device by id, address or a unique prefix of either; raises NotFoundError otherwise."""
        name = shown_address(name)
        devices = self.all_devices()
        matches = [device for device in devices if name in (device["id"], device["addr"])]
        if not matches:
            matches = [device for device in devices if _has_prefix(device, name)]
        if not matches:
            raise NotFoundError(f"there is no device {shorten(name)}", "list the devices: yunion-mps list")
        if len(matches) > 1:
            few = ", ".join(device["addr"] for device in matches[:4])
            more = ", …" if len(matches) > 4 else ""
            raise NotFoundError(
                f"{name} matches {len(matches)} devices ({few}{more})",
                "use a longer prefix of the id or address",
            )
        return self._details(matches[0])

    def gpus(self) -> answers.GpuListJson:
        """Return every GPU and MIG instance as of the last poll; one that cannot be leased has a reason."""
        snapshot = self._snapshot()
        ways: dict[str, str] = {}
        for device in self.all_devices():  # which counts them, too
            if device["lease"] and device["state"] != UNAVAILABLE:
                ways[device["gpu_uuid"]] = device["sharing"]
        ways |= ways_in_effect(snapshot.plan)
        faults = snapshot.faults
        unusable = snapshot.unusable
        serving = self._serving()
        domains = domain_names(snapshot.plan)
        free_for = self._free_for()
        listed = snapshot.inventory.gpus
        if divided := unusable_instances(listed):
            listed = in_order([*listed, *divided])
        gpus = []
        for gpu in listed:
            uuid = gpu.uuid or ""
            row = gpu_json(
                gpu,
                snapshot,
                devices=self._device_counts[uuid],
                memory_free_mib=self._memory_free_mib(gpu, snapshot),
                free_for=free_for.get(domains.get(uuid, "")),
                load=self.usage.latest.load.gpus.get(uuid, GpuLoad()),
                sharing=ways.get(uuid),
                why_faulty=gpu.reason or faults.get(gpu.address, NO_REASON),
                why_unusable=unusable.get(uuid, NO_REASON),
                serving=serving,
            )
            gpus.append(row)
        sliced = {row["parent"] for row in gpus if row["parent"] and row["sharing"] == TIME_SLICING}
        for row in gpus:
            if row["uuid"] in sliced:
                row["budget_enforced"] = False
        return {"gpus": gpus, "total": len(gpus)}

    def _serving(self) -> set[str]:
        """Return the UUIDs of the GPUs with a usable device, their own or one on a MIG instance."""
        return self._gpus_with_usable(self.all_devices())

    def _gpus_with_usable(self, devices: Iterable[answers.DeviceJson]) -> set[str]:
        serving = {device["gpu_uuid"] for device in devices if device["state"] != UNAVAILABLE}
        return serving | {gpu.parent for gpu in self._snapshot().inventory.gpus if gpu.uuid in serving}

    def pools(self) -> answers.PoolListJson:
        """Return the GPUs whose memory is leased in units."""
        snapshot = self._snapshot()
        gpus = {gpu.uuid: gpu for gpu in snapshot.inventory.gpus}
        unusable = unusable_reasons(snapshot)
        free_for = self._free_for()
        pools: list[answers.PoolJson] = []
        for pool in snapshot.plan.pools:
            if pool.gpu_uuid not in gpus:
                continue
            why = unusable[pool.gpu_uuid]
            row = pool_json(
                pool,
                gpus[pool.gpu_uuid],
                reason=why,
                memory_free_mib=0 if why else self._free_mib(pool),
                free_tenths=0 if why else self.ledger.free_tenths(pool),
                reserved_for=snapshot.plan.reserved.get(pool.gpu_uuid),
                free_for=free_for.get(pool.domain),
            )
            pools.append(row)
        return {"pools": pools, "total": len(pools)}

    def _memory_free_mib(self, gpu: Gpu, snapshot: Snapshot) -> int | None:
        """Return how much one more client can get of a GPU's pool, in MiB; None if it has no pool."""
        pool = next((pool for pool in snapshot.plan.pools if pool.gpu_uuid == gpu.uuid), None)
        if pool is None:
            return None
        return 0 if unusable_reasons(snapshot)[pool.gpu_uuid] else self._free_mib(pool)

    def _free_mib(self, pool: Pool) -> int:
        """Return how much memory one more client can get: 0 if less than a percent of the threads is left."""
        lacks_threads = pool.thread_percentage and self.ledger.free_tenths(pool) < _LEAST_TENTHS
        return 0 if lacks_threads else self.ledger.free_mib(pool)

    @property
    def state(self) -> str:
        """The state of the GPUs, control daemons and devices, whatever their jobs do.

        `ready`, `degraded` (something that should serve does not), `failed` (nothing does) or `disabled`.
        """
        snapshot = self._snapshot()
        if not snapshot.enabled:
            return "disabled"
        serving = sum(domain.state == READY for domain in snapshot.domains)
        is_direct_usable = any(gpu.uuid not in snapshot.unusable for gpu in snapshot.plan.direct)
        if not (serving or self._serving() or is_direct_usable):
            return "failed"
        is_broken = any(condition.level == PROBLEM for condition in self.conditions())
        return "degraded" if is_broken or serving < len(snapshot.domains) else "ready"

    @property
    def summary(self) -> str:
        """The status in one line, for systemd and for logs."""
        status = self.service()
        devices = status["devices"]
        domains = status["domains"]
        serving = sum(domain["state"] == READY for domain in domains)
        if status["notice"]:
            return str(status["notice"])
        line = f"{devices['available']} of {devices['total']} devices available"
        if devices["pending"]:
            line += f", {devices['pending']} pending"
        if domains:
            line += f", {serving} of {len(domains)} control daemons serving"
        errors = [domain["reason"] for domain in domains if domain["state"] != READY]
        if errors:
            line += f"; {errors[0]}"
        return line

    def conditions(self) -> tuple[Condition, ...]:
        """Return everything that is wrong or pending, except what depends on processes.

        A condition that follows from another one is included, too.
        """
        self.all_devices()  # which computes the conditions, too
        return self._conditions

    def service(self, used: Collection[str] = ()) -> answers.ServiceFieldsJson:
        """Return the state of the daemon, its GPUs and devices.

        used: the addresses of the devices in use
        """
        snapshot = self._snapshot()
        devices = self.all_devices()
        states = Counter(device["state"] for device in devices)
        unavailable_gpus = [gpu for gpu in self.gpus()["gpus"] if gpu["state"] == UNAVAILABLE]
        users = self.candidates().users
        return {
            "notice": snapshot.notice,
            "notice_code": snapshot.notice.code,
            "version": __version__,
            "pid": self._pid,
            "started": rfc3339(self._started_s),
            "host_id": snapshot.plan.host_id,
            "driver": {
                "version": snapshot.inventory.driver.version or None,
                "cuda_version": snapshot.inventory.driver.cuda_version,
            },
            "devices": {
                "total": len(devices),
                "available": len(devices) - states[UNAVAILABLE] - states[PENDING],
                "unavailable": states[UNAVAILABLE],
                "pending": states[PENDING],
                "reserved": states[RESERVED],
                "used": len(used),
                "free": sum(device["state"] == FREE and device["addr"] not in used for device in devices),
            },
            "gpus": {
                "total": sum(not gpu.parent for gpu in snapshot.inventory.gpus),
                "unavailable": sum(not gpu["parent"] for gpu in unavailable_gpus),
            },
            "domains": [domain_json(domain, users.get(domain.plan.name, ())) for domain in snapshot.domains],
        }

    def not_ready_reasons(self) -> list[str]:
        """Return why no device can be used although MPS is enabled, one line each; empty if one can."""
        snapshot = self._snapshot()
        unusable = unusable_reasons(snapshot)
        if not snapshot.enabled or not all(unusable.values()) or self._serving():
            return []
        notice = snapshot.notice
        wrong = [condition for condition in shown(self.conditions()) if condition.level != WARNING]
        lines: list[str] = [notice] if notice else []
        lines += [condition.text for condition in wrong if condition.reason not in notice]
        return [line.replace("\n", "; ") for line in lines] or ["no GPU is divided into devices"]

    def candidates(self) -> Candidates:
        """Return what can be leased now, and whom the control daemons serve; computed after a change."""
        snapshot = self._snapshot()
        if self._candidates_version != snapshot.version:
            unusable = unusable_reasons(snapshot)
            for uuid, reason in self.used_by_others.items():
                if uuid in unusable and not unusable[uuid]:
                    unusable[uuid] = reason
            self._candidates = candidates_of(snapshot, unusable)
            self._candidates_version = snapshot.version
            self._users_version = -1
        if self._users_version != self.version:
            leases = self.ledger.leases.values()
            users = served_users(leases, self.users_with_jobs, self._candidates.domains)
            self._candidates = self._candidates._replace(users=users)
            self._users_version = self.version
        return self._candidates

    def resolved(self, request: LeaseRequest) -> LeaseRequest:
        """Return the request with addresses instead of names and prefixes.

        Raises NotFoundError if a name is unknown, and HostError if MPS is disabled.
        """
        notice = self._snapshot().notice
        if notice.code == DISABLED:
            raise HostError(notice, hint_of(DISABLED), DISABLED)
        devices = request.devices
        gpu = request.gpu
        if devices and ALL not in devices:
            addresses = [self.device(name)["addr"] for name in devices]
            devices = tuple(dict.fromkeys(addresses))
        if gpu:
            gpus = self._snapshot().inventory.gpus
            gpu = find_gpu(gpu, gpus).address
        return request._replace(devices=devices, gpu=gpu)

    def terminating_gpus(self) -> Mapping[str, str]:
        """Return the GPUs (UUIDs by address) where `over_budget: terminate` applies."""
        snapshot = self._snapshot()
        terminating: dict[str, str] = {}
        for gpu in snapshot.inventory.gpus:
            if gpu.uuid and snapshot.plan.over_budget.get(gpu.uuid) == TERMINATE:
                terminating[gpu.address] = gpu.uuid
        return terminating

    def unusable_gpus(self) -> frozenset[str]:
        """Return the addresses of the GPUs that are unusable themselves, whatever their domains' states."""
        snapshot = self._snapshot()
        serving = self._serving()
        faults = snapshot.faults
        addresses: set[str] = set()
        for gpu in snapshot.inventory.gpus:
            is_faulty = gpu.address in faults and gpu.uuid not in serving
            if gpu.reason or is_faulty:
                addresses.add(gpu.address)
        return frozenset(addresses)

    def _details(self, summary: answers.DeviceJson) -> answers.DeviceDetailsJson:
        snapshot = self._snapshot()
        device = self._device_in_effect(summary)
        plans = {domain.plan.name: domain.plan for domain in snapshot.domains}
        domain = plans.get(device.domain)
        # The budget of a lease that another version has stored may not be known.
        is_served = domain is not None and device.memory_limit_mib is not None
        is_known = is_served or not device.domain
        environment = client_environment([device], domain) if is_known else {}
        return {
            **summary,
            "slot": device.slot,
            "domain": device.domain,
            "client_environment": environment,
        }

    def _device_in_effect(self, summary: answers.DeviceJson) -> Device:
        """Return the device of the plan or, if it has none or a change is pending, the leased one."""
        name = summary["id"]
        planned = {device.id: device for device in self._snapshot().plan.devices}
        if name in planned and summary["state"] != PENDING:
            return planned[name]
        for lease in self.ledger.leases.values():
            for device in lease.devices:
                if device.id == name:
                    return device
        return planned[name]


def _has_prefix(device: answers.DeviceJson, prefix: str) -> bool:
    """Return whether the device's id or address starts with the prefix."""
    return device["id"].startswith(prefix) or device["addr"].startswith(prefix)
