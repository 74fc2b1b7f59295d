"""Taking a lease: the question, the waiting, and coming back to one's place when the daemon was restarted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from yunion_mps.client.patience import MOST_S, Patience, Say
from yunion_mps.errors import BusyError, HostError, NeverFreeError, NothingFreeError, UnreachableError

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord

#: What an answer may take beside the time that one waits for devices.
_ANSWER_S = 30.0

#: Parameters of the question; those that are None are left out.
Wanted = Mapping[str, Any]


class Tells(Protocol):
    """Tells the daemon what to do."""

    def post(self, target: str, timeout_s: float | None = None) -> Any:
        """The JSON answer; raises YunionError of the kind that the failure is."""


#: What a unit with PrivateTmp= has of its own (systemd.exec(5)).
_PRIVATE_PLACES = ("/tmp/", "/var/tmp/")


def would_take(daemon: Tells, wanted: Wanted) -> LeaseRecord:
    """The lease that one would get now, which is given to nobody; raises as `take` does."""
    lease: LeaseRecord = daemon.post(_target({**wanted, "dry": "true"}))
    return lease


def take(daemon: Tells, wanted: Wanted, wait_s: int, say: Say) -> LeaseRecord:
    """The lease; raises YunionError, NothingFreeError among them, where there is none within `wait_s`.

    Who waits says what for, and goes on past a restart of the daemon and what it cannot do at the moment: by
    the name of the request the next daemon knows its place in the queue, or the lease that it has already.
    """
    wanted = {**wanted, "request": os.urandom(16).hex()}
    end_s = time.monotonic() + wait_s
    away, busy = Patience(min(MOST_S, wait_s), say), Patience(wait_s, say)
    is_there = told = False
    while True:
        left_s = max(0, round(end_s - time.monotonic()))
        try:
            if wait_s and not is_there:
                obstacle = _in_the_way(daemon, wanted)
                away.found()
                is_there = True
                if obstacle and not told:
                    say(f"waiting: {obstacle}")
                    told = True
            lease: LeaseRecord = daemon.post(_target({**wanted, "wait": left_s or None}), left_s + _ANSWER_S)
        except (UnreachableError, BusyError) as error:
            if time.monotonic() >= end_s:
                raise
            (busy if isinstance(error, BusyError) else away).lost(error)
            is_there = False
        else:
            return lease


def refuse_unreachable(environment: Mapping[str, str]) -> None:
    """Raise HostError where this user cannot reach the control daemon: CUDA would go on without limits."""
    place = environment["CUDA_MPS_PIPE_DIRECTORY"]
    control = os.path.join(place, "control")
    if not os.access(control, os.W_OK, effective_ids=True):
        what = f"{control} cannot be reached as this user, and CUDA would then run without limits"
        hint = "see: yunion-mps doctor"
        if place.startswith(_PRIVATE_PLACES) and not os.path.exists(place):  # for the daemon it is there
            hint = f"in a unit with PrivateTmp=yes, set BindPaths={place}; otherwise {hint}"
        raise HostError(what, hint)


def _in_the_way(daemon: Tells, wanted: Wanted) -> str:
    """Why one would have to wait, empty where one would not; raises YunionError where that is no use."""
    try:
        would_take(daemon, wanted)
    except NeverFreeError:
        raise
    except NothingFreeError as error:
        return error.message
    return ""


def _target(words: Wanted) -> str:
    given = {name: value for name, value in words.items() if value is not None}
    if not given:
        return "/v1/leases"
    from urllib.parse import urlencode  # 2 ms, which a plain `run` need not pay

    return f"/v1/leases?{urlencode(given)}"
