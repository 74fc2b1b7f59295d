"""Leases: take, renew, release, bind and list. Each is watched until it ends; the next daemon knows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from yunion_mps.containers.lookup import Containers
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_LEASE, BROKEN
from yunion_mps.core.errors import HostError, NotFoundError, YunionError
from yunion_mps.core.identity import random_uuid
from yunion_mps.core.models import (
    ALL,
    LEASE_VARIABLE,
    Device,
    DomainPlan,
    Event,
    Holder,
    Lease,
    Owner,
    Plan,
)
from yunion_mps.core.reasons import LEASE_UNREADABLE, NO_REASON, Reason, hint_of
from yunion_mps.leases.allocator import Allocator
from yunion_mps.leases.holders import (
    HolderWatch,
    describe_holder,
    hint_for_another,
    lease_json,
    queued_json,
    renew,
    with_container,
    with_time_left,
)
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.memory_peaks import MemoryPeaks
from yunion_mps.leases.queue import Grant, Queue
from yunion_mps.leases.queue_positions import QueuePositions
from yunion_mps.leases.refusals import refuse_infeasible
from yunion_mps.leases.request import (
    LeaseRequest,
    QueuedRequest,
    Quota,
    find_lease,
    owner_name,
    refuse_over_quota,
    refuse_too_long,
)
from yunion_mps.leases.storage import LeaseStorage
from yunion_mps.service.instances import InstanceCheck
from yunion_mps.service.permissions import find_own_lease, is_privileged
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.queries import Queries
from yunion_mps.service.server_users import ServerUsers
from yunion_mps.supervisor import Supervisor
from yunion_mps.views.devices import refuse_unserved

if TYPE_CHECKING:
    from yunion_mps import answers

log = logging.getLogger(__name__)

#: Registers a function to call when the connection of the request ends.
OnDisconnect = Callable[[Callable[[], None]], None]
#: How often storing and granting are tried again while the state file cannot be written, in s.
RETRY_S = 1.0
#: How many leases of a request may be revoked before it fails.
_MAX_REVOKED = 3
#: How often a request looks whether an earlier one was repeated after a restart.
_REPEAT_CHECK_S = 0.05


class LeaseService:
    """Grants, renews and ends leases, and owns the ledger, the queue and what is stored of them.

    HTTP calls its use cases; the daemon's loop calls `restore`, `serve`, `follow_devices` and `close`.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        queries: Queries,
        *,
        ledger: Ledger,
        containers: Containers,
        cdi: CdiPublisher,
        users: ServerUsers,
        instances: InstanceCheck,
    ) -> None:
        """Raises HostError if the state file cannot be used.

        ledger: that of the supervisor, which the queries show
        """
        self._supervisor = supervisor
        self._queries = queries
        self._publisher = cdi
        self._users = users
        self.instances = instances
        self.containers = containers
        self._store = supervisor.store()
        self._storage = LeaseStorage(self._store)
        self._positions = QueuePositions(supervisor.store())
        self.holders = HolderWatch(self.end)
        self.ledger = ledger
        self.peaks = MemoryPeaks(self.ledger, supervisor.store())
        self._allocator = Allocator(self.ledger)
        self.queue = Queue(self._allocator)
        #: The grants to queued requests, by position.
        self._grants: dict[int, asyncio.Future[Grant]] = {}
        self._asking: asyncio.Task[None] | None = None
        #: Tries again what the state file has not stored.
        self._retry: asyncio.TimerHandle | None = None
        #: The devices of the plan whose addresses the leases have.
        self._followed: tuple[Device, ...] | None = None
        self._divided: tuple[Plan, tuple[DomainPlan, ...]] | None = None
        self._is_draining = False
        self._is_closed = False

    # -- from the daemon's start to its end

    def restore(self) -> None:
        """Restore the previous daemon's leases, and end those whose holder has ended meanwhile.

        What the supervisor has read of them for its start is replaced. Raises HostError if they cannot be
        read; no lease may be granted then.
        """
        saved = self._storage.read()
        self.ledger.clear()
        since_s = {lease.addresses: lease.since_s for lease in saved}
        lost = self._supervisor.event_log.not_recorded("lease", since_s)
        for stored in saved:
            lease = with_time_left(stored, time.monotonic())
            try:
                self.ledger.add(lease)
            except AssertionError as error:
                log.error("lease %s is ignored: %s", lease.id, error)
                self._storage.named.pop(lease.id, None)
                continue
            if lease != stored:
                self._update(lease)
            if lease.addresses in lost:
                self._record(lease, "granted to", "requested just before the daemon stopped")
            if not self.holders.watch(lease):
                self.end(lease.id, "its process ended while the daemon was not running")
        self.ledger.set_unreadable(self._storage.named)
        self._report_unreadable()
        self._positions.restore(time.monotonic())
        self.peaks.restore()
        self._publisher.restore(self.ledger.leases.values(), kept_leases=self._storage.unreadable)

    def _report_unreadable(self) -> None:
        """Log, record and show which stored leases cannot be read, and what that blocks."""
        for lease_id, problem in sorted(self._storage.unreadable.items()):
            lease = self.ledger.leases.get(lease_id)
            subject = lease.addresses if lease else "all devices"
            consequence = "its devices stay leased"
            if lease is None:
                consequence = "no more devices are leased until root releases it: it may have any device"
            text = f"lease {lease_id} in the state file cannot be read: {problem}"
            reason = Reason(f"{text}; {consequence}", LEASE_UNREADABLE)
            hint = hint_of(LEASE_UNREADABLE, lease=lease_id)
            self._supervisor.set_condition(Condition(ABOUT_LEASE, lease_id, BROKEN, reason, hint))
            log.error("%s; %s", reason, hint)
            event = Event(
                severity="error",
                kind="lease",
                subject=subject,
                what=text,
                cause="a newer version wrote it, or it is damaged",
                consequence=consequence,
                code=LEASE_UNREADABLE,
            )
            self._supervisor.event_log.record(event)

    def cancel_queued(self) -> None:
        """Cancel all queued requests without answering; their positions are kept for the next daemon."""
        self._is_draining = True
        self.queue.requests.clear()
        for grant in self._grants.values():
            grant.cancel()

    def close(self) -> None:
        """Stop granting and ending leases, which the next daemon restores."""
        self._is_closed = True
        if self._retry:
            self._retry.cancel()
        with contextlib.suppress(HostError):  # the next daemon continues with what was stored last
            self._storage.flush()
        for lease_id in list(self.ledger.leases):
            self.holders.forget(lease_id)

    def follow_devices(self) -> None:
        """Let leases continue on MIG instances that were created again, and on cards that were moved."""
        devices = self._supervisor.snapshot().plan.devices
        if devices is self._followed:
            return
        self._followed = devices
        for lease in self.ledger.moved(devices):
            is_same = _gpus_of(self.ledger.leases[lease.id]) == _gpus_of(lease)
            cause = "the GPU is in another slot now" if is_same else "the MIG instance was created again"
            self._update(lease)
            self._publisher.add(lease, warn_only=True)
            self._record(lease, "leased again to", cause)

    def serve(self) -> None:
        """Grant queued requests that fit now, and refuse those that have become infeasible."""
        if self._is_closed:
            return
        if not self.queue.requests:
            self._queries.set_promised({})
            return
        if self._store.check_lock():
            self._retry_later()
            return
        self._refuse_infeasible()
        while fitting := self.queue.next(self._queries.candidates()):
            queued, devices = fitting
            self.queue.requests.remove(queued)
            try:
                lease = self._grant(queued, devices)
            except YunionError as error:
                self._grants[queued.position].set_exception(error)
                continue
            equal = self.queue.remove_answered(lease)
            is_shared = bool(equal)
            self._grants[queued.position].set_result(Grant(lease, is_new=True, is_shared=is_shared))
            for request in equal:
                self._grants[request.position].set_result(Grant(lease, is_new=False, is_shared=is_shared))
        self._queries.set_promised(self.queue.promised)

    # -- use cases

    @property
    def memory_unit_mib(self) -> int:
        return self._supervisor.config.gpu_memory_unit_mib

    def lease(self, name: str, caller: Owner) -> answers.LeaseRecordJson:
        """Return the lease of this id or name; raises NotFoundError."""
        return self._json(find_lease(name, self.ledger.leases, caller))

    def leases(self, *, brief: bool = False) -> list[answers.LeaseRecordJson]:
        """Return all leases; a `brief` one lacks what only the kernel knows about its holder."""
        return [self._json(lease, brief=brief) for lease in self.ledger.leases.values()]

    def waiting(self) -> list[answers.QueuedRequestJson]:
        """Return the queued requests in their order, each with the reason why it waits."""
        why = self.queue.reasons(self._queries.candidates())
        rows: list[answers.QueuedRequestJson] = []
        for request in self.queue.requests:
            rows.append(queued_json(request, why[request.position], self.containers))
        return rows

    async def take(
        self, queued: QueuedRequest, on_disconnect: OnDisconnect, wait_s: float
    ) -> tuple[answers.LeaseRecordJson, bool]:
        """Return the lease and whether it is new; raises YunionError if none is granted within `wait_s`.

        A request repeated with its `idempotency_key`, because its answer was lost or the daemon restarted,
        gets its earlier lease or queue position. So does a named holder that requests the same again, which
        also renews its lease. With `cdi` the lease is published as a CDI device before this returns.
        """
        await self._store.until_unlocked()
        self._supervisor.refuse_if_unsafe()
        queued = queued._replace(sent=queued.as_text)
        await self.follow_destroyed(self.ledger.find_repeated(queued))
        is_new = False
        lease = self.ledger.find_repeated(queued)
        if lease is None:
            await self._ask_users(queued.holder.user_uid)
            queued = self._positions.place(queued, time.time(), time.monotonic())
            while self._positions.has_to_wait(queued, time.monotonic()):  # noqa: ASYNC110 - for 10 s at most
                await asyncio.sleep(_REPEAT_CHECK_S)
            queued = self._admit(queued)  # now, because others may have been granted meanwhile
            lease, is_new, _ = await self._wait_for_grant(queued, wait_s)
        elif lease.holder.binding == "name" or lease.holder.is_awaited:
            if not lease.holder.is_awaited:
                lease = self._renew(lease)
            refuse_unserved(lease, self._supervisor.snapshot())
        if lease.holder.binding == "connection":
            on_disconnect(partial(self._end_connected, lease.id))
        return self._json(lease), is_new

    async def preview(self, queued: QueuedRequest) -> answers.LeaseRecordJson:
        """Return the lease that would be granted now; raises YunionError if none would be."""
        await self._ask_users(queued.holder.user_uid)
        queued = queued._replace(sent=queued.as_text)
        if lease := self.ledger.find_repeated(queued):
            return self._json(lease)
        queued = self._admit(queued)
        candidates = self._queries.candidates()
        devices = self.queue.choose(queued, candidates)
        environment = candidates.environment(queued.request, devices)
        lease = Lease("", devices, queued.holder, time.time(), environment)
        return lease_json(lease, None, self.containers)

    def release(self, name: str, caller: Owner) -> answers.LeaseRecordJson:
        """End a lease for the caller; raises NotFoundError and NotAllowedError."""
        lease = find_own_lease(name, {**self._unknown_leases(), **self.ledger.leases}, caller)
        released = lease_json(lease, None, self.containers)
        if lease.id in self.ledger.unknown:
            self._delete_unknown(lease)
            return released
        releaser = owner_name(caller)
        cause = "" if releaser == owner_name(lease.holder.owner) else f"{releaser} released it"
        self.end(lease.id, cause)
        return released

    def renew(self, name: str, caller: Owner) -> answers.LeaseRecordJson:
        """Restart the time to live of a lease taken by name; raises what `release` raises.

        The time to live is reduced to `max_lease_ttl_s` if that was lowered since.
        """
        lease = find_own_lease(name, self.ledger.leases, caller)
        if lease.holder.binding != "name":
            message = "this lease cannot be renewed: it ends with its process or connection"
            raise HostError(message, "to renew a lease, take it by name: yunion-mps lease take NAME --ttl 1h")
        return self._json(self._renew(lease))

    async def bind(self, name: str, caller: Owner, holder: Holder) -> answers.LeaseRecordJson:
        """Make a container, whose first process is `holder`, the lease's holder in place of the old one.

        Its owner does not change; one taken by name stays one, because containers may share it. If root binds
        another user's lease, it attests that the processes in the container belong to the lease. Raises what
        `release` raises, and HostError if it has another container, or a device is not served as granted.
        """
        find_own = partial(find_own_lease, name, self.ledger.leases, caller, of_any_unit=not caller.unit)
        await self._store.until_unlocked()
        await self.follow_destroyed(find_own())
        lease = find_own()
        before = lease.holder
        holder = holder._replace(
            uid=before.uid,
            unit=before.unit,
            name=before.name,
            job_uid=before.job_uid,
            is_attested=is_privileged(caller.uid) and not is_privileged(before.uid),
        )
        refuse_unserved(lease, self._supervisor.snapshot())
        if lease.holder.binding == "name":
            self._record(lease._replace(holder=holder), "used by", "the container started with its lease")
            with_its_container = with_container(lease, holder)
            if with_its_container != lease:
                self._update(with_its_container)
            return self._json(with_its_container)
        if lease.holder._replace(is_attested=holder.is_attested) == holder:
            return self._json(lease)
        if lease.holder.binding == "container" and not lease.holder.is_awaited:
            text = f"the lease of {lease.addresses} already belongs to a container (PID {lease.holder.pid})"
            raise HostError(text, hint_for_another(lease.holder))
        bound = lease._replace(holder=holder)
        if not self.holders.watch(bound):
            raise NotFoundError(f"PID {holder.pid} has ended", "")
        try:
            self._storage.write(bound)
        except HostError:
            if not self.holders.watch(lease):
                self.end(lease.id, "its process ended")
            raise
        self.ledger.replace(bound)
        self._record(bound, "bound to", "its container started")
        return self._json(bound)

    async def follow_destroyed(self, lease: Lease | None, *, is_new: bool = False) -> Reason:
        """Return why the lease cannot have its devices, according to the driver; empty if it can.

        Its MIG instances may have been created again: then it continues on these.
        """
        why = await self.instances.why_unusable(lease, is_new=is_new) if lease else NO_REASON
        if why:
            self.follow_devices()
        return why

    @property
    def waits_for_jobs(self) -> bool:
        """Whether a request is queued while a control daemon serves the jobs of a user."""
        return bool(self.queue.requests and self._queries.users_with_jobs)

    # -- internals

    def _unknown_leases(self) -> dict[str, Lease]:
        """Return the leases whose devices are not known, by id; they belong to root."""
        holder = Holder("name", 0)
        return {lease_id: Lease(lease_id, (), holder, 0.0) for lease_id in self.ledger.unknown}

    def _delete_unknown(self, lease: Lease) -> None:
        """Delete a lease whose devices are not known; raises HostError if its row cannot be deleted."""
        self._storage.delete(lease.id)
        self._supervisor.end_condition(ABOUT_LEASE, lease.id)
        self.ledger.forget_unknown(lease.id)
        self._record(lease, "released by", "its devices were not known")
        self.serve()

    async def _ask_users(self, uid: int | None) -> None:
        """Find out whose jobs run now: another user's would keep this one from devices."""
        if uid is not None:
            await self._users.ask(uid)

    async def _serve_after_asking(self) -> None:
        await self._users.ask()
        self.serve()

    async def _wait_for_grant(self, queued: QueuedRequest, wait_s: float) -> Grant:
        """Queue the request and wait; returns its grant, or raises YunionError.

        If a granted MIG instance is gone, or another program uses it, the lease is revoked, and the request
        is queued again.
        """
        end_s = time.monotonic() + wait_s
        for _ in range(_MAX_REVOKED):
            grant = await self._next_grant(queued, max(0.0, end_s - time.monotonic()))
            if lease := self.ledger.leases.get(grant.lease.id):
                return grant._replace(lease=lease)
        raise self.queue.why_not(queued, self._queries.candidates())

    async def _next_grant(self, queued: QueuedRequest, wait_s: float) -> Grant:
        grant: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._grants[queued.position] = grant
        self.queue.add(queued)
        self.serve()
        try:
            if wait_s and not grant.done():
                self._positions.store(queued)
                # Not wait_for: before Python 3.12 it loses a cancellation that coincides with the grant.
                await asyncio.wait({grant}, timeout=wait_s)
            if not grant.done():
                locked = self._store.check_lock()
                if locked:
                    raise locked
                raise self.queue.why_not(queued, self._queries.candidates())
            lease = grant.result().lease
            why = await self.follow_destroyed(lease, is_new=True)
            if why and self.ledger.leases.get(lease.id) == lease:
                self.end(lease.id, why)
            return grant.result()
        except asyncio.CancelledError:
            is_granted = grant.done() and not grant.cancelled() and not grant.exception()
            if is_granted and not grant.result().is_shared:
                self.end(grant.result().lease.id, "its client disconnected")
            raise
        finally:
            del self._grants[queued.position]
            is_repeated = any(other.key == queued.key for other in self.queue.requests if other is not queued)
            if not is_repeated and not self._is_draining:
                self._positions.delete(queued)
            if queued in self.queue.requests:
                self.queue.requests.remove(queued)
                self.serve()  # its reservation is available to later requests

    def _refuse_infeasible(self) -> None:
        """Refuse queued requests that have become infeasible, as by a reload: they keep devices reserved."""
        snapshot = self._supervisor.snapshot()
        divided = (snapshot.plan, tuple(status.plan for status in snapshot.domains))
        if divided == self._divided:
            return
        self._divided = divided
        refusals: dict[LeaseRequest, YunionError | None] = {}
        for queued in list(self.queue.requests):
            if queued.request not in refusals:
                refusals[queued.request] = None
                try:
                    self._feasible(queued.request)
                except YunionError as error:
                    refusals[queued.request] = error
            if refusal := refusals[queued.request]:
                self.queue.requests.remove(queued)
                self._grants[queued.position].set_exception(refusal)

    def _admit(self, queued: QueuedRequest) -> QueuedRequest:
        """Return the request with whole names.

        Raises YunionError if it may not wait, or never can be granted.
        """
        config = self._supervisor.config
        self.ledger.refuse_if_any_is_unknown()
        refuse_too_long(queued.holder, config.max_lease_ttl_s)
        others = [(lease.holder.owner, len(lease.devices)) for lease in self.ledger.leases.values()]
        for other in self.queue.requests:
            if not queued.key or other.key != queued.key:  # a repeated request counts once
                others.append((other.holder.owner, self._devices_of(other.request)))
        quota = Quota(config.max_leases_per_user, config.max_devices_per_user)
        refuse_over_quota(queued.holder, self._devices_of(queued.request), others, quota)
        self.ledger.refuse_duplicate(queued.holder, queued.idempotency_key)
        return queued._replace(request=self._feasible(queued.request))

    def _feasible(self, request: LeaseRequest) -> LeaseRequest:
        """Return the request with whole names; raises YunionError if it never can be granted."""
        resolved = self._queries.resolved(request)
        refuse_infeasible(self._allocator.select(resolved, self._queries.candidates()))
        return resolved

    def _devices_of(self, request: LeaseRequest) -> int:
        """Return how many devices the request is for."""
        if ALL in request.devices:
            return len(self._supervisor.snapshot().plan.devices)
        return len(request.devices) or request.number

    def _grant(self, queued: QueuedRequest, devices: tuple[Device, ...]) -> Lease:
        """Grant the lease; raises YunionError, with nothing granted, if it cannot be stored or honoured."""
        lease_id = random_uuid()
        holder = queued.holder
        self.ledger.refuse_duplicate(holder, queued.idempotency_key)
        environment = {
            **self._queries.candidates().environment(queued.request, devices),
            LEASE_VARIABLE: lease_id,
        }
        is_device = queued.cdi or holder.binding == "name"
        lease = Lease(
            id=lease_id,
            devices=devices,
            holder=holder,
            since_s=time.time(),
            environment=environment,
            idempotency_key=queued.idempotency_key,
            cdi=is_device,
            request=queued.sent,
            requested_s=queued.since_s,
        )
        lease = renew(lease, time.monotonic())
        if not self.holders.watch(lease):
            raise NotFoundError(f"PID {holder.pid} has ended", "")
        try:
            self._storage.write(lease)
            if is_device:
                self._publisher.add(lease, warn_only=not queued.cdi)
        except HostError:
            self.holders.forget(lease_id)
            with contextlib.suppress(HostError):
                self._storage.delete(lease_id)
            raise
        self.ledger.add(lease)
        self._record(lease, "granted to", "")
        return lease

    def _renew(self, lease: Lease) -> Lease:
        ttl_s = min(lease.holder.ttl_s, self._supervisor.config.max_lease_ttl_s)
        lease = renew(lease._replace(holder=lease.holder._replace(ttl_s=ttl_s)), time.monotonic())
        self.holders.watch(lease)
        self._update(lease)
        return lease

    def _update(self, lease: Lease) -> None:
        """Replace the lease and its stored version; without the latter, it can be renewed after a restart."""
        self.ledger.replace(lease)
        if not self._storage.replace(lease):
            self._retry_later()

    def _retry_later(self) -> None:
        if self._retry is None and not self._is_closed:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._store_again)

    def _store_again(self) -> None:
        """Store what could not be stored, and grant what could not be granted."""
        self._retry = None
        try:
            self._storage.flush()
        except HostError:
            self._retry_later()
            return
        self.serve()

    def end(self, lease_id: str, cause: str) -> None:
        """End the lease; does nothing if it has ended already."""
        if self._is_closed or lease_id not in self.ledger.leases:
            return
        self.holders.forget(lease_id)
        lease = self.ledger.remove(lease_id)
        self._publisher.forget(lease)
        if lease_id in self._storage.unreadable:
            self._supervisor.end_condition(ABOUT_LEASE, lease_id)
        try:
            self._storage.delete(lease_id)
        except HostError as error:  # the next daemon will notice that its holder has ended
            log.warning("cannot record the end of the lease of %s: %s", lease.addresses, error.message)
            self._retry_later()
        self._record(lease, "ended, held by" if cause else "released by", cause)
        self._users.lease_ended(lease)
        self.serve()
        if self.queue.requests and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._serve_after_asking())

    def _end_connected(self, lease_id: str) -> None:
        """End a lease because its connection was closed, unless the daemon has closed all connections."""
        lease = self.ledger.leases.get(lease_id)
        if lease and lease.holder.binding == "connection":
            self.end(lease_id, "its connection was closed")

    def _json(self, lease: Lease, *, brief: bool = False) -> answers.LeaseRecordJson:
        return lease_json(
            lease,
            self.holders.expires_s(lease.id),
            None if brief else self.containers,
            sm_of=self._queries.usage.latest.sm_of,
            peak_of=partial(self.peaks.of, lease.id),
        )

    def _record(self, lease: Lease, verb: str, cause: str) -> None:
        """Record an event, while the holder still runs and its name is known."""
        holder = describe_holder(lease.holder, self.containers)
        self._supervisor.event_log.record(
            Event("info", "lease", lease.addresses or lease.id, f"{verb} {holder}", cause)
        )


def _gpus_of(lease: Lease) -> set[str]:
    """Return the UUIDs of the GPUs and MIG instances that the lease's devices are on."""
    return {device.gpu_uuid for device in lease.devices}
