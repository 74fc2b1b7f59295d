"""Leases while the daemon runs: given, watched, ended, and known to the next daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.containers.publisher import CdiPublisher
from yunion_mps.daemon.ends import Ends
from yunion_mps.daemon.lease_events import LeaseEvents, devices_of
from yunion_mps.daemon.wishes import LeaseRequests
from yunion_mps.errors import HostError, NotAllowedError, NotFoundError, NothingFreeError, YunionError
from yunion_mps.identity import random_uuid
from yunion_mps.leases.book import Book
from yunion_mps.leases.expiry import renewed, restored
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.names import lease_named, owner_name
from yunion_mps.leases.offers import Offers, offers_of
from yunion_mps.leases.once import given_before, refuse_a_second
from yunion_mps.leases.places import Places
from yunion_mps.leases.queue import Queue, Waiter
from yunion_mps.leases.quota import refuse_over_quota
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.leases.view import lease_json, leases_json
from yunion_mps.models import LEASE_VARIABLE, Device, DomainPlan, Holder, Lease, Owner, Plan
from yunion_mps.paths import Paths
from yunion_mps.service.queries import Service
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

Json = dict[str, Any]
Keep = Callable[[Callable[[], None]], None]


def _key(holder: Holder, idempotency_key: str) -> str:
    return f"{holder.uid}-{idempotency_key}" if idempotency_key else ""


class _Asker(NamedTuple):
    """Who waits, and what hears of it."""

    holder: Holder
    idempotency_key: str
    cdi: bool
    keep: Keep
    answer: asyncio.Future[Lease]

    @property
    def key(self) -> str:
        """What its place is kept by, empty where it is not."""
        return _key(self.holder, self.idempotency_key)


class Leasing:
    """Gives devices to those who ask, and takes them back when what has them ends."""

    def __init__(self, paths: Paths, supervisor: Supervisor, service: Service, devices: CdiPublisher) -> None:
        """Raises HostError where the state file cannot be used."""
        self._devices = devices
        self._supervisor = supervisor
        self._book = Book(supervisor.store(), paths.lease_copies)
        self._places = Places(paths.waiting_places)
        self._service = service
        self._requests = LeaseRequests(supervisor, service)
        self._containers = Containers(paths)
        self._events = LeaseEvents(supervisor.event_log, self._containers)
        self.ledger = Ledger()
        self.queue: Queue = Queue(self.ledger)
        self._ends = Ends(self._end)
        self._known = Offers()
        self._known_of = -1
        self._divided: tuple[Plan, tuple[DomainPlan, ...]] | None = None
        self._is_closed = False

    def restore(self) -> None:
        """Know again what the daemon before has given away, and end what has lost its holder meanwhile.

        Raises HostError where that cannot be read: nothing may be given away then.
        """
        for kept in self._book.read():
            lease = restored(kept, time.monotonic())
            try:
                self.ledger.add(lease)
            except AssertionError as error:
                log.error("lease %s is passed over: %s", lease.id, error)
                continue
            if lease != kept:
                self._write_expiry(lease)
            if not self._ends.watch(lease):
                self._end(lease.id, "its process ended while no daemon ran")
        self._places.recall(time.monotonic())
        self._devices.restore(self.ledger.leases.values())

    def hurry(self) -> None:
        """Let nobody wait any longer: they hear nothing, and take their place in the next daemon."""
        waiting, self.queue.waiters = self.queue.waiters, []
        self._places.let_go(
            {one.whose.key: one.since_s for one in waiting if one.whose.key}, time.monotonic()
        )
        for waiter in waiting:
            waiter.whose.answer.cancel()

    def close(self) -> None:
        """Give and end no more: whoever has a lease has it for the next daemon, too."""
        self._is_closed = True
        for lease_id in list(self.ledger.leases):
            self._ends.forget(lease_id)

    @property
    def memory_unit_mib(self) -> int:
        """What a unit of memory is in requests."""
        return self._supervisor.config.gpu_memory_unit_mib

    def leases(self) -> Json:
        """All leases, and those who wait in the order of their coming."""
        given = [(lease, self._ends.expires_s(lease.id)) for lease in self.ledger.leases.values()]
        waiting = [(one.request, one.since_s, one.whose.holder) for one in self.queue.waiters]
        return leases_json(given, waiting, self._containers)

    async def take(
        self,
        request: LeaseRequest,
        holder: Holder,
        keep: Keep,
        wait_s: float,
        idempotency_key: str = "",
        *,
        cdi: bool = False,
    ) -> Json:
        """Give the holder what it requests, within `wait_s`; raises YunionError where that cannot be.

        A request repeated with its `idempotency_key`, because its answer was lost or the daemon restarted,
        gets the lease that it was given, or its queue position. With `cdi` container engines find the lease
        as a device, by its id, before this returns.
        """
        self._supervisor.refuse_if_unsafe()
        asker = _Asker(holder, idempotency_key, cdi, keep, asyncio.get_running_loop().create_future())
        leases = self.ledger.leases.values()
        given = given_before(leases, holder, idempotency_key)
        if given:
            self._bind(given, keep)
            return self._json(given)
        self._refuse_over_quota(holder, idempotency_key)
        refuse_a_second(leases, holder, idempotency_key)
        request = self._requests.possible(request, self._offers())
        waiter = Waiter(request, self._since_s(asker), asker)
        self.queue.add(waiter)
        self.serve()
        try:
            if wait_s and not asker.answer.done():
                self._places.keep(asker.key, waiter.since_s)
                # Not wait_for: until Python 3.12 it forgets a cancellation that comes with the answer.
                await asyncio.wait({asker.answer}, timeout=wait_s)
            if not asker.answer.done():
                raise self._why_not(waiter, has_waited=wait_s > 0)
            return self._json(asker.answer.result())
        except asyncio.CancelledError:
            if not asker.answer.cancelled() and asker.answer.done() and not asker.answer.exception():
                self._end(asker.answer.result().id, "whoever asked for it went away")
            raise
        finally:
            if not any(one.whose.key == asker.key for one in self.queue.waiters if one is not waiter):
                self._places.leave(asker.key)  # else whoever has asked again waits in it
            if waiter in self.queue.waiters:
                self.queue.waiters.remove(waiter)
                self.serve()  # what was kept for it is for those behind

    def would_take(self, request: LeaseRequest, holder: Holder, idempotency_key: str = "") -> Json:
        """What the holder would be given now; raises YunionError where that is nothing."""
        if not given_before(self.ledger.leases.values(), holder, idempotency_key):
            self._refuse_over_quota(holder, idempotency_key)
        request, offers = self._requests.possible(request, self._offers()), self._offers()
        devices = self.ledger.choose(request, offers, self.queue.spoken_for(offers))
        lease = Lease("", devices, holder, time.time(), self._requests.environment(request, devices, ""))
        environment = {name: value for name, value in lease.environment.items() if name != LEASE_VARIABLE}
        return lease_json(lease._replace(environment=environment), None, self._containers)

    def release(self, lease_id: str, caller: Owner) -> Json:
        """End a lease for the caller; raises NotFoundError and NotAllowedError."""
        lease = self._own(lease_id, caller)
        ended = lease_json(lease, None, self._containers)
        self._end(lease.id, f"{owner_name(caller)} gave it back")
        return ended

    def renew(self, lease_id: str, caller: Owner) -> Json:
        """Let a lease of a name go on for its whole time from now; raises as `release` does."""
        lease = self._own(lease_id, caller)
        if lease.holder.binding != "name":
            raise HostError("this lease has no time to live", "it ends with its process or connection")
        lease = renewed(lease, time.monotonic())
        self._ends.watch(lease)
        self.ledger.replace(lease)
        self._write_expiry(lease)
        return self._json(lease)

    def bind(self, lease_id: str, caller: Owner, holder: Holder) -> Json:
        """Let a lease end with the container whose first process this is, and not with what had it before.

        Whose it is does not change. A lease of a name stays one: containers may share it. Asked again for
        the same container, it is as it was. Raises as `release` does, and HostError, with nothing changed,
        where another container has it, or a device of it is not served now, or by another control daemon.
        """
        lease = lease_named(lease_id, self.ledger.leases, caller)
        if not caller.unit:  # an engine may have left its job's unit by now; no job can by itself
            caller = caller._replace(unit=lease.holder.unit)
        self._refuse_unless_owner(lease, caller)
        holder = holder._replace(uid=lease.holder.uid, unit=lease.holder.unit)
        reasons = self._service.reasons()
        for device in lease.devices:
            why = reasons.get(device.gpu_uuid, "its GPU is not there any more")
            if why:
                raise HostError(f"device {device.addr} cannot be used now: {why}", "see: yunion-mps status")
        self._requests.refuse_moved(lease)
        if lease.holder.binding == "name" or lease.holder == holder:
            return self._json(lease)
        if lease.holder.binding == "container":
            what = f"the lease of {devices_of(lease)} is a container's already (PID {lease.holder.pid})"
            raise HostError(what, "take another one: yunion-mps run --podman")
        bound = lease._replace(holder=holder)
        if not self._ends.watch(bound):
            raise NotFoundError(f"PID {holder.pid} has ended", "")
        try:
            self._book.write(bound)
        except HostError:
            if not self._ends.watch(lease):
                self._end(lease.id, "its process ended")
            raise
        self.ledger.replace(bound)
        self._events.bound(bound)
        return self._json(bound)

    def serve(self) -> None:
        """Give to those who wait what they can have now, and send away whom no waiting helps any more."""
        if self.queue.waiters and not self._is_closed:
            self._refuse_impossible()
        while self.queue.waiters and not self._is_closed and (found := self.queue.next(self._offers())):
            waiter, devices = found
            self.queue.waiters.remove(waiter)
            asker = waiter.whose
            try:
                asker.answer.set_result(self._give(waiter.request, devices, asker))
            except YunionError as error:
                asker.answer.set_exception(error)

    def _refuse_impossible(self) -> None:
        """Tell those whose request could not be met any more, as after a reload, if everything were free.

        Else they would wait for good, and what is free be kept for them.
        """
        snapshot = self._supervisor.snapshot()
        divided = (snapshot.plan, tuple(status.plan for status in snapshot.domains))
        if divided == self._divided:
            return
        self._divided = divided
        refusals = {
            one.request: self._requests.refusal(one.request, self._offers()) for one in self.queue.waiters
        }
        for waiter in [one for one in self.queue.waiters if refusals[one.request]]:
            self.queue.waiters.remove(waiter)
            waiter.whose.answer.set_exception(refusals[waiter.request])

    def _write_expiry(self, lease: Lease) -> None:
        """Keep when the lease ends; if that fails, its holder has a moment to renew it after a restart."""
        with contextlib.suppress(HostError):
            self._book.write(lease)

    def _json(self, lease: Lease) -> Json:
        return lease_json(lease, self._ends.expires_s(lease.id), self._containers)

    def _offers(self) -> Offers:
        """The devices and pools as they are now."""
        snapshot = self._supervisor.snapshot()
        if self._known_of != snapshot.version:
            self._known, self._known_of = offers_of(snapshot, self._service.reasons()), snapshot.version
        return self._known

    def _since_s(self, asker: _Asker) -> float:
        """Since when whoever comes now waits; never before others, though the clock was set back."""
        waiters = self.queue.waiters
        at_s = max(time.time(), waiters[-1].since_s if waiters else 0.0)
        return self._places.come(asker.key, at_s, time.monotonic())

    def _why_not(self, waiter: Waiter, *, has_waited: bool) -> YunionError:
        offers = self._offers()
        try:
            kept = self.queue.spoken_for(offers, besides=waiter)
            self.ledger.choose(waiter.request, offers, kept, has_waited=has_waited)
        except NothingFreeError as error:
            return error
        return NothingFreeError(f"{waiter.request} cannot be had now", "try again")

    def _give(self, request: LeaseRequest, devices: tuple[Device, ...], asker: _Asker) -> Lease:
        """Enter the lease; raises YunionError, with nothing given, where it cannot be kept or honoured."""
        holder, lease_id = asker.holder, random_uuid()
        refuse_a_second(self.ledger.leases.values(), holder, asker.idempotency_key)
        environment = self._requests.environment(request, devices, lease_id)
        is_device = asker.cdi or holder.binding == "name"
        lease = Lease(lease_id, devices, holder, time.time(), environment, asker.idempotency_key, is_device)
        lease = renewed(lease, time.monotonic())
        if not self._ends.watch(lease):
            raise NotFoundError(f"PID {holder.pid} has ended", "")
        try:
            self._book.write(lease)
            if is_device:
                self._devices.add(lease, or_warn=not asker.cdi)
        except HostError:
            self._ends.forget(lease_id)
            with contextlib.suppress(HostError):
                self._book.strike(lease_id)
            raise
        self.ledger.add(lease)
        self._bind(lease, asker.keep)
        self._events.given(lease)
        return lease

    def _bind(self, lease: Lease, keep: Keep) -> None:
        if lease.holder.binding == "connection":
            keep(lambda: self._end_connected(lease.id))

    def _end_connected(self, lease_id: str) -> None:
        """Its connection has ended, which is nothing where it is we who end them all."""
        lease = self.ledger.leases.get(lease_id)
        if lease and lease.holder.binding == "connection" and not self._is_closed:
            self._end(lease_id, "its connection ended")

    def _own(self, name: str, caller: Owner) -> Lease:
        """The lease of this name or id that the caller may change; raises NotFoundError, NotAllowedError."""
        lease = lease_named(name, self.ledger.leases, caller)
        self._refuse_unless_owner(lease, caller)
        return lease

    def _refuse_unless_owner(self, lease: Lease, caller: Owner) -> None:
        owner = lease.holder.owner
        if caller.uid not in (0, os.geteuid()) and caller != owner:
            what = f"the lease of {devices_of(lease)} is {owner_name(owner)}'s"
            raise NotAllowedError(what, "only root and its owner may end or renew it")

    def _refuse_over_quota(self, holder: Holder, idempotency_key: str) -> None:
        owners = [lease.holder.owner for lease in self.ledger.leases.values()]
        key, askers = _key(holder, idempotency_key), [waiter.whose for waiter in self.queue.waiters]
        owners += [one.holder.owner for one in askers if not key or one.key != key]  # it may ask again
        config = self._supervisor.config
        refuse_over_quota(holder, owners, config.max_leases_per_user, config.max_lease_ttl_s)

    def _end(self, lease_id: str, cause: str) -> None:
        """It is over; does nothing where it is already."""
        if lease_id not in self.ledger.leases:
            return
        self._ends.forget(lease_id)
        lease = self.ledger.remove(lease_id)
        self._devices.forget(lease)
        try:
            self._book.strike(lease_id)
        except HostError as error:  # the next daemon sees by itself that its holder is gone
            log.warning("the end of the lease of %s is not noted: %s", devices_of(lease), error.message)
        self._events.ended(lease, cause)
        self.serve()
