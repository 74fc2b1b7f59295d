"""The daemon's answers that a screen is made from: all of them once, or again and again."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Union

from yunion_mps.cli.ask import ask
from yunion_mps.errors import NotFoundError, YunionError
from yunion_mps.host import threads
from yunion_mps.overview.uses import NOBODY, Clients, clients_told

Json = dict[str, Any]

#: A host where asking for the clients takes longer has another trouble, which is to be seen at once.
CLIENTS_S = 6.0
#: On a live view that question may take as long as it does: waking many GPUs takes tens of seconds.
_PATIENT_S = 150.0
_NEWEST_EVENTS = 20
#: What no event tells, such as a compute mode, is looked at again after so long.
_STALE_S = 30.0
#: A question is asked again after so many times its own duration, so that asking costs next to nothing.
_REST = 20.0
_LONGEST_REST_S = 60.0
#: A daemon that did not answer is asked again so soon, however rarely one wants to look.
_SOON_S = 2.0


class Answers(NamedTuple):
    """What the daemon said, `taken_s` when it did (s since 1970)."""

    taken_s: float
    status: Json
    gpus: list[Json]
    devices: list[Json]
    leases: list[Json]
    waiting: list[Json]
    events: list[Json]
    last_event: int
    looked_s: float  # when the GPUs and devices were asked for, by the monotonic clock


_Question = Callable[[], Union[Answers, Clients]]


def leases() -> tuple[list[Json], list[Json]]:
    """The leases, and who waits for one; none where the daemon is of a release before leases."""
    try:
        answer = ask("/v1/leases")
    except NotFoundError:
        return [], []
    return answer["leases"], answer["waiting"]


def answers(before: Answers | None = None) -> Answers:
    """What the daemon says now; raises YunionError. The devices are those of `before` if nothing happened."""
    status = ask("/v1/status")
    told = ask(f"/v1/events?limit={_NEWEST_EVENTS}")
    held, waiting = leases()
    now_s = time.monotonic()
    if before and _nothing_happened(before, status, told["last"], now_s):
        gpus, devices, looked_s = before.gpus, before.devices, before.looked_s
    else:
        gpus = ask("/v1/gpus")["gpus"]
        devices, looked_s = ask("/v1/devices?limit=0")["isolated_devices"], now_s
    return Answers(time.time(), status, gpus, devices, held, waiting, told["events"], told["last"], looked_s)


def clients(timeout_s: float = CLIENTS_S) -> Clients:
    """Who uses GPUs now, as the driver sees it: no look at a screen may cost a job; raises YunionError."""
    answer = ask("/v1/clients?seen=true", timeout_s)
    return clients_told(answer)


def clients_or_why(timeout_s: float = CLIENTS_S) -> Clients:
    """The same; where nobody tells, why not is a trouble."""
    try:
        return clients(timeout_s)
    except YunionError as error:
        return NOBODY._replace(troubles=[f"who uses the GPUs: {error.message}"])


def _nothing_happened(before: Answers, status: Json, last_event: int, now_s: float) -> bool:
    same = (before.last_event, before.status["devices"], before.status["gpus"], before.status["started"])
    now = (last_event, status["devices"], status["gpus"], status["started"])
    return same == now and now_s - before.looked_s < _STALE_S


class News(NamedTuple):
    """What came of a question: an answer, or why there is none."""

    answer: Answers | Clients | None
    about_clients: bool
    error: BaseException | None = None


class Watch:
    """Asks in the background, and puts into `news` what comes of it; `wake` is called then.

    The clients are asked for apart from the rest: that question may take long, and the rest goes on.
    """

    def __init__(self, first: Answers, interval_s: float, wake: Callable[[], None]) -> None:
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._interval_s = interval_s
        self._wake = wake
        self._last = first
        self._start(self._ask_all, interval_s, about_clients=False)
        self._start(lambda: clients(_PATIENT_S), 0.0, about_clients=True)

    def _start(self, question: _Question, wait_s: float, *, about_clients: bool) -> None:
        threads.start(lambda: self._again_and_again(question, wait_s, about_clients), threads.ignore_outcome)

    def _ask_all(self) -> Answers:
        self._last = answers(self._last)
        return self._last

    def _again_and_again(self, question: _Question, wait_s: float, about_clients: bool) -> None:
        while True:
            time.sleep(wait_s)
            begin_s = time.monotonic()
            wait_s = self._interval_s
            try:
                found = News(question(), about_clients)
                wait_s = max(wait_s, min(_REST * (time.monotonic() - begin_s), _LONGEST_REST_S))
            except BaseException as error:  # noqa: BLE001 - a fault is raised where the terminal is put right
                wait_s = min(wait_s, _SOON_S)
                found = News(None, about_clients, error)
            self.news.put(found)
            self._wake()
            if found.error and not isinstance(found.error, YunionError):
                return
