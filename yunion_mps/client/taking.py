"""Taking a lease, also past a restart of the daemon."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from yunion_mps.client.transport import Transport
from yunion_mps.errors import (
    BusyError,
    HostError,
    InfeasibleError,
    NothingFreeError,
    UnreachableError,
    YunionError,
)
from yunion_mps.http.operations import END_LEASE, TAKE_LEASE, Operation
from yunion_mps.http.parameters import Value

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord

T = TypeVar("T")
#: Tells a person, in a line, how it goes.
Say = Callable[[str], None]
#: Members of a lease request; those that are None are left out.
Wanted = Mapping[str, Any]

#: How long a daemon that has gone away is waited for, when one waits anyway.
MAX_S = 60.0
_BETWEEN_S = 0.2
_A_DAY_S = 86_400
#: How long an interrupted caller still waits for each answer, in s.
_UNDO_S = 2.0
#: What a unit with PrivateTmp= has of its own (systemd.exec(5)).
_PRIVATE_PLACES = ("/tmp/", "/var/tmp/")


class Patience:
    """Tries again for `most_s` seconds while the daemon is away or busy for a moment, and says so once."""

    def __init__(self, transport: Transport, most_s: float, say: Say) -> None:
        self._transport = transport
        self._most_s = most_s
        self._say = say
        self._end_s = 0.0

    async def lost(self, error: YunionError) -> None:
        """The daemon could not be reached, or do it: wait a moment; raises `error` after too long a time."""
        now_s = time.monotonic()
        if not self._most_s:
            raise error
        if not self._end_s:
            self._end_s = now_s + self._most_s
            how_long = f" up to {self._most_s:.0f} s" if self._most_s <= _A_DAY_S else ""
            self._say(f"{error.message}; waiting{how_long} for it")
        elif now_s > self._end_s:
            raise error
        await self._transport.sleep(_BETWEEN_S)

    def found(self) -> None:
        if self._end_s:
            self._say("the daemon answers again")
        self._end_s = 0.0

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """The answer once the daemon gives one; raises its error after too long a time."""
        while True:
            try:
                answer = await self._transport.call(operation, timeout_s, **arguments)
            except (UnreachableError, BusyError) as error:
                await self.lost(error)
            else:
                self.found()
                return answer


async def take(transport: Transport, wanted: Wanted, wait_s: int, say: Say) -> LeaseRecord:
    """The lease; raises YunionError, NothingFreeError among them, if there is none within `wait_s`.

    A caller that waits is told what for, and keeps waiting past a restart of the daemon and what it cannot do
    at the moment: by the idempotency key the next daemon knows the request's place in the queue, or the lease
    that it has been given already. A caller that is interrupted or cancelled has no lease.
    """
    wanted = {**wanted, "idempotency_key": os.urandom(16).hex()}
    end_s = time.monotonic() + wait_s
    away, busy = Patience(transport, min(MAX_S, wait_s), say), Patience(transport, wait_s, say)
    is_there = told = False
    while True:
        left_s = max(0, round(end_s - time.monotonic()))
        try:
            if wait_s and not is_there:
                obstacle = await _obstacle(transport, wanted)
                away.found()
                is_there = True
                if obstacle and not told:
                    say(f"waiting: {obstacle}")
                    told = True
            lease = await transport.call(TAKE_LEASE, **{**wanted, "wait_s": left_s or None})
        except (UnreachableError, BusyError) as error:
            if time.monotonic() >= end_s:
                raise
            await (busy if isinstance(error, BusyError) else away).lost(error)
            is_there = False
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            await _undo(transport, wanted)
            raise
        else:
            return lease


async def _undo(transport: Transport, wanted: Wanted) -> None:
    """End the lease whose answer may have been on its way when the caller was interrupted.

    One with a name is left to its time to live, because the name may have had it before.
    """
    if "name" in (wanted.get("holder") or {}):
        return
    with contextlib.suppress(YunionError):
        lease = await transport.call(TAKE_LEASE, _UNDO_S, **wanted)
        await transport.call(END_LEASE, _UNDO_S, lease=lease["id"])


async def would_take(transport: Transport, wanted: Wanted) -> LeaseRecord:
    """The lease that the request would get now, without taking it; raises as `take` does."""
    return await transport.call(TAKE_LEASE, **{**wanted, "dry_run": True})


async def _obstacle(transport: Transport, wanted: Wanted) -> str:
    """Why the request would have to wait, empty if it would not; raises YunionError if that is no use."""
    try:
        await would_take(transport, wanted)
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
