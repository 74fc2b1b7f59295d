"""Taking a lease, also past a restart of the daemon, and having it until it is given back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from yunion_mps.errors import (
    BusyError,
    HostError,
    InfeasibleError,
    NotFoundError,
    NothingFreeError,
    ShortageError,
    UnreachableError,
    YunionError,
)
from yunion_mps.http.operations import END_LEASE, RENEW_LEASE, TAKE_LEASE

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord
    from yunion_mps.http.client import DaemonClient

T = TypeVar("T")
#: Tells a person, in a line, how it goes.
Say = Callable[[str], None]
#: Parameters of a lease request; those that are None are left out.
Wanted = Mapping[str, Any]

#: How long a daemon that has gone away is waited for, when one waits anyway.
MAX_S = 60.0
_BETWEEN_S = 0.2
_A_DAY_S = 86_400
#: A lease of a name is renewed so many times within its time to live.
_RENEWALS = 3
#: How long until another try if a renewal has failed, in s.
_RETRY_S = 1.0
#: What a unit with PrivateTmp= has of its own (systemd.exec(5)).
_PRIVATE_PLACES = ("/tmp/", "/var/tmp/")


class Patience:
    """Tries again for `most_s` seconds while the daemon is away or busy for a moment, and says so once."""

    def __init__(self, most_s: float, say: Say) -> None:
        self._most_s = most_s
        self._say = say
        self._end_s = 0.0

    def lost(self, error: YunionError) -> None:
        """The daemon could not be reached, or do it: wait a moment; raises `error` after too long a time."""
        now_s = time.monotonic()
        if not self._end_s:
            self._end_s = now_s + self._most_s
            how_long = f" up to {self._most_s:.0f} s" if self._most_s <= _A_DAY_S else ""
            self._say(f"{error.message}; waiting{how_long} for it")
        elif now_s > self._end_s:
            raise error
        time.sleep(_BETWEEN_S)

    def found(self) -> None:
        if self._end_s:
            self._say("the daemon answers again")
        self._end_s = 0.0

    def until_answered(self, ask: Callable[[], T]) -> T:
        """What `ask` returns once the daemon answers; raises its error after too long a time."""
        while True:
            try:
                answer = ask()
            except (UnreachableError, BusyError) as error:
                self.lost(error)
            else:
                self.found()
                return answer


def take(daemon: DaemonClient, wanted: Wanted, wait_s: int, say: Say) -> LeaseRecord:
    """The lease; raises YunionError, NothingFreeError among them, if there is none within `wait_s`.

    A caller that waits is told what for, and keeps waiting past a restart of the daemon and what it cannot do
    at the moment: by the idempotency key the next daemon knows the request's place in the queue, or the lease
    that it has been given already.
    """
    wanted = {**wanted, "request": os.urandom(16).hex()}
    end_s = time.monotonic() + wait_s
    away, busy = Patience(min(MAX_S, wait_s), say), Patience(wait_s, say)
    is_there = told = False
    while True:
        left_s = max(0, round(end_s - time.monotonic()))
        try:
            if wait_s and not is_there:
                obstacle = _obstacle(daemon, wanted)
                away.found()
                is_there = True
                if obstacle and not told:
                    say(f"waiting: {obstacle}")
                    told = True
            lease = daemon.call(TAKE_LEASE, **{**wanted, "wait": left_s or None})
        except (UnreachableError, BusyError) as error:
            if time.monotonic() >= end_s:
                raise
            (busy if isinstance(error, BusyError) else away).lost(error)
            is_there = False
        else:
            return lease


def would_take(daemon: DaemonClient, wanted: Wanted) -> LeaseRecord:
    """The lease that the request would get now, without taking it; raises as `take` does."""
    return daemon.call(TAKE_LEASE, **{**wanted, "dry": True})


def _obstacle(daemon: DaemonClient, wanted: Wanted) -> str:
    """Why the request would have to wait, empty if it would not; raises YunionError if that is no use."""
    try:
        would_take(daemon, wanted)
    except InfeasibleError:
        raise
    except NothingFreeError as error:
        return error.message
    return ""


def refuse_unreachable(environment: Mapping[str, str]) -> None:
    """Raise HostError if this user cannot reach the control daemon: CUDA would go on without limits."""
    place = environment["CUDA_MPS_PIPE_DIRECTORY"]
    control = os.path.join(place, "control")
    if not os.access(control, os.W_OK, effective_ids=True):
        what = f"{control} cannot be reached as this user, and CUDA would then run without limits"
        hint = "see: yunion-mps doctor"
        if place.startswith(_PRIVATE_PLACES) and not os.path.exists(place):  # for the daemon it is there
            hint = f"in a unit with PrivateTmp=yes, set BindPaths={place}; otherwise {hint}"
        raise HostError(what, hint)


class Lease:
    """Devices that are this program's until `release`, or the end of its `with` block.

    Its attributes are what it was given with; `memory` is of each device, in MiB. One that is bound to this
    process is given back by the end of the process at the latest. One with a name is renewed by a thread of
    its own for as long as the process lives, and ends `ttl_s` after that.
    """

    def __init__(self, daemon: DaemonClient, record: LeaseRecord, ttl_s: int | None, say: Say) -> None:
        """`ttl_s` is the time to live of a lease with a name, None for others."""
        self.id = record["id"]
        self.name = record["name"]
        self.devices = tuple(record["devices"])
        self.gpus = tuple(record["gpus"])
        self.memory = tuple(record["memory"])
        self.thread_percentage = record["thread_percentage"]
        self.budget_enforced = record["budget_enforced"]
        #: The variables of a process that is to use the devices, without any others.
        self.environment: Mapping[str, str] = dict(record["environment"])
        #: Why a lease with a name ended before it was given back, empty if it did not.
        self.lost = ""
        self._daemon = daemon
        self._say = say
        self._pid = os.getpid()
        self._is_over = False
        #: Ends the renewals: set also if the daemon could not be told, so that it ends by its time.
        self._released = threading.Event()
        if ttl_s is not None:
            from yunion_mps.host import threads  # which a lease of a process need not wait for

            try:
                threads.start(lambda: self._keep(ttl_s), threads.ignore_outcome)
            except ShortageError:
                self.release()
                raise

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process that is to use them: `base`, or this process' own, and theirs."""
        return {**(os.environ if base is None else base), **self.environment}

    def release(self) -> None:
        """Give the devices back; does nothing if that was done, and in a fork of the process that took them.

        Raises YunionError if the daemon cannot be told, which may be tried again: else it ends with this
        process, or by its time.
        """
        if self._is_over or os.getpid() != self._pid:
            return
        self._released.set()
        with contextlib.suppress(NotFoundError):  # it ended by itself, or the answer to a first try was lost
            Patience(MAX_S, self._say).until_answered(lambda: self._daemon.call(END_LEASE, lease=self.id))
        self._is_over = True

    def __enter__(self) -> Lease:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease {self.id} of {', '.join(self.devices)}>"

    def _keep(self, ttl_s: int) -> None:
        """Renew it until it is given back; the daemon is asked again if it is away or fails."""
        wait_s = ttl_s / _RENEWALS
        while not self._released.wait(wait_s):
            wait_s = ttl_s / _RENEWALS
            try:
                self._daemon.call(RENEW_LEASE, float(ttl_s), lease=self.id)
            except NotFoundError as error:
                if not self._released.is_set():
                    self.lost = error.message
                    self._say(f"the lease of {', '.join(self.devices)} is lost: {error.message}")
                return
            except YunionError:
                wait_s = min(_RETRY_S, wait_s)
