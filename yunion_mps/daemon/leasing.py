"""Leases while the daemon runs: given, watched, ended, and known to the next daemon."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from yunion_mps.errors import (
    HostError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    ShortageError,
    YunionError,
)
from yunion_mps.leases.book import Book
from yunion_mps.leases.ledger import Ledger, Offers, Wish, refuse_impossible
from yunion_mps.leases.names import cut, gpu_named
from yunion_mps.leases.offers import offers_of
from yunion_mps.leases.queue import Queue, Waiter
from yunion_mps.leases.view import lease_json, leases_json
from yunion_mps.models import Device, Event, Holder, Lease
from yunion_mps.paths import Paths
from yunion_mps.planning import client_environment, why_not_honoured
from yunion_mps.process import Process, command_of, started_ticks, user_name
from yunion_mps.service import Service
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: Says in its environment which lease a process has.
LEASE_VARIABLE = "YUNION_MPS_LEASE"
#: For how long after the daemon's start those who had waited before may come back to their place.
_COME_BACK_S = 60.0

#: So much of a lease's id must be given.
_LEAST = 4

Json = dict[str, Any]
Keep = Callable[[Callable[[], None]], None]


class _Asker(NamedTuple):
    """Who waits, and what hears of it."""

    holder: Holder
    keep: Keep
    answer: asyncio.Future[Lease]


class Leasing:
    """Gives devices to those who ask, and takes them back when what has them ends."""

    def __init__(self, paths: Paths, supervisor: Supervisor, service: Service) -> None:
        """Raises HostError where the state file cannot be used."""
        self._supervisor = supervisor
        self._book = Book(supervisor.store(), paths.lease_copies)
        self._service = service
        self.ledger = Ledger()
        self._queue: Queue = Queue(self.ledger)
        self._processes: dict[str, Process] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._began_s = time.monotonic()
        self._known = Offers()
        self._known_of = -1
        self._is_closed = False

    def restore(self) -> None:
        """Know again what the daemon before has given away, and end what has lost its holder meanwhile.

        Raises HostError where that cannot be read: nothing may be given away then.
        """
        for lease in self._book.read():
            try:
                self.ledger.add(lease)
            except AssertionError as error:
                log.error("lease %s is passed over: %s", lease.id, error)
                continue
            if not self._watch(lease):
                self._end(lease.id, "its process ended while no daemon ran")

    def hurry(self) -> None:
        """Let nobody wait any longer: they hear nothing, and take their place in the next daemon."""
        waiting, self._queue.waiters = self._queue.waiters, []
        for waiter in waiting:
            waiter.whose.answer.cancel()

    def close(self) -> None:
        """Give and end no more: whoever has a lease has it for the next daemon, too."""
        self._is_closed = True
        for lease_id in list(self.ledger.leases):
            self._unwatch(lease_id)

    @property
    def memory_unit_mib(self) -> int:
        """What a unit of memory is in requests."""
        return self._supervisor.memory_unit_mib

    def leases(self) -> Json:
        """All leases, and those who wait in the order of their coming."""
        given = [(lease, self._expires_s(lease)) for lease in self.ledger.leases.values()]
        return leases_json(given, [(one.wish, one.since_s, one.whose.holder) for one in self._queue.waiters])

    async def take(
        self, wish: Wish, holder: Holder, keep: Keep, wait_s: float, since_s: float | None = None
    ) -> Json:
        """Give the holder what it wishes, within `wait_s`; raises YunionError where that cannot be.

        Who has waited since `since_s` (in s since 1970) for a daemon before this one comes back to its place.
        """
        self._supervisor.refuse_if_unsafe()
        self._refuse_a_second(holder)
        wish, offers = self._resolved(wish), self._offers()
        refuse_impossible(wish, offers)
        asker = _Asker(holder, keep, asyncio.get_running_loop().create_future())
        waiter = Waiter(wish, self._place(since_s), asker)
        self._queue.add(waiter)
        self.serve()
        try:
            if wait_s and not asker.answer.done():
                # Not wait_for: until Python 3.12 it forgets a cancellation that comes with the answer.
                await asyncio.wait({asker.answer}, timeout=wait_s)
            if not asker.answer.done():
                raise self._why_not(waiter)
            lease = asker.answer.result()
            return lease_json(lease, self._expires_s(lease))
        except asyncio.CancelledError:
            if not asker.answer.cancelled() and asker.answer.done() and not asker.answer.exception():
                self._end(asker.answer.result().id, "whoever asked for it went away")
            raise
        finally:
            if waiter in self._queue.waiters:
                self._queue.waiters.remove(waiter)
                self.serve()  # what was kept for it is for those behind

    def would_take(self, wish: Wish, holder: Holder) -> Json:
        """What the holder would be given now; raises YunionError where that is nothing."""
        wish, offers = self._resolved(wish), self._offers()
        refuse_impossible(wish, offers)
        devices = self.ledger.choose(wish, offers, self._queue.spoken_for(offers))
        lease = Lease("", devices, holder, time.time(), self._environment(devices, ""))
        environment = {name: value for name, value in lease.environment.items() if name != LEASE_VARIABLE}
        return lease_json(lease._replace(environment=environment), None)

    def release(self, lease_id: str, uid: int) -> Json:
        """End a lease for the user; raises NotFoundError and NotAllowedError."""
        lease = self._own(lease_id, uid)
        ended = lease_json(lease, None)
        self._end(lease.id, f"{user_name(uid)} gave it back")
        return ended

    def renew(self, lease_id: str, uid: int) -> Json:
        """Let a lease of a name go on for its whole time from now; raises as `release` does."""
        lease = self._own(lease_id, uid)
        if lease.holder.binding != "name":
            raise HostError("this lease has no time to live", "it ends with its process or connection")
        self._watch(lease)
        return lease_json(lease, self._expires_s(lease))

    def serve(self) -> None:
        """Give to those who wait what they can have now."""
        while self._queue.waiters and not self._is_closed and (found := self._queue.next(self._offers())):
            waiter, devices = found
            self._queue.waiters.remove(waiter)
            asker = waiter.whose
            try:
                asker.answer.set_result(self._give(devices, asker.holder, asker.keep))
            except YunionError as error:
                asker.answer.set_exception(error)

    def _expires_s(self, lease: Lease) -> float | None:
        """When a lease of a name ends where it is not renewed, in s since 1970."""
        timer = self._timers.get(lease.id)
        return time.time() + timer.when() - asyncio.get_running_loop().time() if timer else None

    def _offers(self) -> Offers:
        """The devices and pools as they are now."""
        snapshot = self._supervisor.snapshot()
        if self._known_of != snapshot.version:
            self._known, self._known_of = offers_of(snapshot, self._service.reasons()), snapshot.version
        return self._known

    def _place(self, since_s: float | None) -> float:
        """Since when whoever comes now waits; never before others, though the clock was set back."""
        waiters = self._queue.waiters
        now_s = max(time.time(), waiters[-1].since_s if waiters else 0.0)
        if since_s is None or time.monotonic() > self._began_s + _COME_BACK_S:
            return now_s
        return min(since_s, now_s)

    def _why_not(self, waiter: Waiter) -> YunionError:
        offers = self._offers()
        try:
            self.ledger.choose(waiter.wish, offers, self._queue.spoken_for(offers, besides=waiter))
        except NothingFreeError as error:
            return error
        return NothingFreeError(f"{waiter.wish} cannot be had now", "try again")

    def _give(self, devices: tuple[Device, ...], holder: Holder, keep: Keep) -> Lease:
        """Enter the lease; raises YunionError, with nothing given, where it cannot be kept or honoured."""
        self._refuse_a_second(holder)
        lease_id = _new_id()
        lease = Lease(lease_id, devices, holder, time.time(), self._environment(devices, lease_id))
        if not self._watch(lease):
            raise NotFoundError(f"PID {holder.pid} has ended", "")
        try:
            self._book.write(lease)
        except HostError:
            self._unwatch(lease_id)
            raise
        self.ledger.add(lease)
        if holder.binding == "connection":
            keep(lambda: self._end_connected(lease_id))
        self._tell(lease, f"given to {_named(holder)}", "it was asked for")
        return lease

    def _end_connected(self, lease_id: str) -> None:
        """Its connection has ended, which is nothing where it is we who end them all."""
        if not self._is_closed:
            self._end(lease_id, "its connection ended")

    def _environment(self, devices: tuple[Device, ...], lease_id: str) -> dict[str, str]:
        names = {device.domain for device in devices}
        if len(names) > 1:
            hint = "take devices of one GPU; cuda_mps_scope: host has one control daemon for all GPUs"
            raise HostError("these devices are of several control daemons, and a process has only one", hint)
        domains = self._supervisor.snapshot().domains
        domain = next(status.plan for status in domains if status.plan.name in names)
        why = why_not_honoured(devices, domain)
        if why:
            more = f"cuda_mps_combine: {len(devices)}"
            hint = f"take them on different GPUs (--across), or set {more} in host.conf"
            raise HostError(f"{len(devices)} devices cannot be one budget: {why}", hint)
        return {**client_environment(devices, domain), LEASE_VARIABLE: lease_id}

    def _resolved(self, wish: Wish) -> Wish:
        """The wish with whole names for unique beginnings; raises NotFoundError where there are none."""
        device, gpu = wish.device, wish.gpu
        if device:
            device = self._service.device(device.removeprefix("0000:"))["addr"]
        if gpu:
            gpus = self._supervisor.snapshot().inventory.gpus
            gpu = gpu_named(gpu.removeprefix("0000:"), gpus).address
        return wish._replace(device=device, gpu=gpu)

    def _refuse_a_second(self, holder: Holder) -> None:
        """Who asks again because an answer was lost must not get devices twice; raises HostError."""
        for lease in self.ledger.leases.values():
            if holder.name and (lease.holder.name, lease.holder.uid) == (holder.name, holder.uid):
                what = f"{holder.name} has a lease already: {lease.id}"
                raise HostError(what, "go on with that one (yunion-mps lease renew), or release it")

    def _own(self, name: str, uid: int) -> Lease:
        """The lease of this id, a unique beginning of it, or the name of its holder."""
        leases = self.ledger.leases
        found = [leases[name]] if name in leases else []
        found = found or [one for one in leases.values() if one.holder.name == name]
        found = found or [one for one in leases.values() if len(name) >= _LEAST and one.id.startswith(name)]
        if not found:
            raise NotFoundError(f"there is no lease {cut(name)}", "see: yunion-mps who")
        if len(found) > 1:
            raise NotFoundError(f"{cut(name)} names {len(found)} leases", "give more of the id")
        lease = found[0]
        if uid not in (0, os.geteuid(), lease.holder.uid):
            what = f"the lease of {_devices(lease)} is {user_name(lease.holder.uid)}'s"
            raise NotAllowedError(what, "only root and its owner may end or renew it")
        return lease

    def _watch(self, lease: Lease) -> bool:
        """Notice what ends it; returns whether it has not ended already."""
        loop, holder = asyncio.get_running_loop(), lease.holder
        if holder.binding == "name":
            self._unwatch(lease.id)
            late = "it was not renewed in time"
            self._timers[lease.id] = loop.call_later(holder.ttl_s, self._end, lease.id, late)
            return True
        process = Process.adopt(holder.pid or 0)
        if process is None:
            return False
        try:
            is_other = _is_other(process, holder)
        except ShortageError:
            process.close()
            raise
        if is_other:
            process.close()
            return False
        self._processes[lease.id] = process
        loop.add_reader(process.fileno(), self._end, lease.id, "its process ended")
        return True

    def _unwatch(self, lease_id: str) -> None:
        timer = self._timers.pop(lease_id, None)
        if timer:
            timer.cancel()
        process = self._processes.pop(lease_id, None)
        if process:
            asyncio.get_running_loop().remove_reader(process.fileno())
            process.close()

    def _end(self, lease_id: str, cause: str) -> None:
        """It is over; does nothing where it is already."""
        if lease_id not in self.ledger.leases:
            return
        self._unwatch(lease_id)
        lease = self.ledger.remove(lease_id)
        try:
            self._book.strike(lease_id)
        except HostError as error:  # the next daemon sees by itself that its holder is gone
            log.warning("the end of the lease of %s is not noted: %s", _devices(lease), error.message)
        self._tell(lease, f"given back by {_named(lease.holder)}", cause)
        self.serve()

    def _tell(self, lease: Lease, what: str, cause: str) -> None:
        self._supervisor.journal.record(Event("info", "lease", _devices(lease), what, cause))


def _is_other(process: Process, holder: Holder) -> bool:
    """Whether the process has ended, or only its number is the holder's; raises ShortageError."""
    started = started_ticks(process.pid)
    if started is None and process.status() is None:  # it runs, and cannot be looked at
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            raise ShortageError(f"PID {process.pid} cannot be looked at: {error.strerror}") from None
        return False  # only its first thread has ended
    return started != holder.started


def _devices(lease: Lease) -> str:
    return ", ".join(device.addr for device in lease.devices)


def _named(holder: Holder) -> str:
    user = user_name(holder.uid)
    if holder.binding == "name":
        return f"{holder.name} of {user}"
    command = command_of(holder.pid or 0) or "a process"
    return f"{command} (PID {holder.pid}, {user})"


def _new_id() -> str:
    """A random UUID; `uuid` would take longer to import than everything here."""
    text = os.urandom(16).hex()
    return "-".join((text[:8], text[8:12], f"4{text[13:16]}", f"8{text[17:20]}", text[20:]))
