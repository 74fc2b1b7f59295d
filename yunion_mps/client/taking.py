"""Taking a lease: the question, the waiting, and coming back to one's place when the daemon was restarted."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from yunion_mps.client.patience import MOST_S, Patience, Say
from yunion_mps.client.values import LeaseRecord
from yunion_mps.errors import HostError, UnreachableError, YunionError

#: The longest that the daemon lets anybody wait, in s.
FOREVER_S = 30 * 86_400
#: What an answer may take beside the time that one waits for devices.
_ANSWER_S = 30.0

#: Parameters of the question; those that are None are left out.
Wanted = Mapping[str, Any]


class Tells(Protocol):
    """Tells the daemon what to do."""

    def post(self, target: str, timeout_s: float | None = None) -> Any:
        """The JSON answer; raises YunionError of the kind that the failure is."""


def would_take(daemon: Tells, wanted: Wanted) -> LeaseRecord:
    """The lease that one would get now, which is given to nobody; raises as `take` does."""
    lease: LeaseRecord = daemon.post(_target({**wanted, "dry": "true"}))
    return lease


def take(daemon: Tells, wanted: Wanted, wait_s: int, say: Say) -> LeaseRecord:
    """The lease; raises YunionError, NothingFreeError among them, where there is none within `wait_s`.

    Who waits says what for, goes on past a restart of the daemon, and keeps its place in the queue.
    """
    since_s = time.time()
    end_s = time.monotonic() + wait_s
    patience = Patience(min(MOST_S, wait_s), say)
    is_there = told = False
    while True:
        left_s = max(0, round(end_s - time.monotonic()))
        words = {**wanted, "wait": left_s or None, "since": f"{since_s:.6f}" if wait_s else None}
        try:
            if wait_s and not is_there:
                obstacle = _in_the_way(daemon, wanted)
                patience.found()
                is_there = True
                if obstacle and not told:
                    say(f"waiting: {obstacle}")
                    told = True
            lease: LeaseRecord = daemon.post(_target(words), left_s + _ANSWER_S)
        except UnreachableError as error:
            if not wait_s:
                raise
            patience.lost(error)
            is_there = False
        else:
            return lease


def refuse_unreachable(environment: Mapping[str, str]) -> None:
    """Raise HostError where this user cannot reach the control daemon: CUDA would go on without limits."""
    control = os.path.join(environment["CUDA_MPS_PIPE_DIRECTORY"], "control")
    if not os.access(control, os.W_OK, effective_ids=True):
        what = f"{control} cannot be reached as this user, and CUDA would then run without limits"
        raise HostError(what, "see: yunion-mps doctor")


def _in_the_way(daemon: Tells, wanted: Wanted) -> str:
    """Why one would have to wait, empty where one would not; raises UnreachableError."""
    try:
        would_take(daemon, wanted)
    except UnreachableError:
        raise
    except YunionError as error:
        return error.message
    return ""


def _target(words: Wanted) -> str:
    given = {name: value for name, value in words.items() if value is not None}
    if not given:
        return "/v1/leases"
    from urllib.parse import urlencode  # 2 ms, which a plain `run` need not pay

    return f"/v1/leases?{urlencode(given)}"
