"""Counts what the API was asked and how long the answers took, by route: never by what stands in a target."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter

from yunion_mps.http.connection import Answering
from yunion_mps.http.query import Request, Response
from yunion_mps.http.routes import Answer
from yunion_mps.service.metrics import BOUNDS_S, Counted, Latency

#: The routes without a name in them. What is at none of these is `other`, so that nobody can make more.
_FIXED = (
    "/metrics",
    "/v1/clients",
    "/v1/devices",
    "/v1/events",
    "/v1/gpus",
    "/v1/leases",
    "/v1/openapi.json",
    "/v1/plan",
    "/v1/reexec",
    "/v1/reload",
    "/v1/status",
    "/v1/usage",
)
_NAMED = {
    ("devices", ""): "/v1/devices/{id}",
    ("leases", ""): "/v1/leases/{lease}",
    ("leases", "renew"): "/v1/leases/{lease}/renew",
    ("leases", "bind"): "/v1/leases/{lease}/bind",
    ("clients", "terminate"): "/v1/clients/{pid}/terminate",
}
OTHER = "other"
_METHODS = ("GET", "HEAD", "POST", "DELETE")


def route_of(target: str) -> str:
    """The route that a request's target is of, as the OpenAPI document names it."""
    path = target.partition("?")[0]
    if path in _FIXED:
        return path
    parts = path.split("/")
    if len(parts) in (4, 5) and parts[:2] == ["", "v1"] and parts[3]:
        return _NAMED.get((parts[2], "".join(parts[4:])), OTHER)
    return OTHER


class Counts:
    """The numbers, as they grow."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._within: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def note(self, request: Request, response: Response, took_s: float) -> None:
        """One answer more."""
        route = route_of(request.target)
        method = request.method if request.method in _METHODS else OTHER
        self._answers[route, method, response.status] += 1
        within = self._within.get(route)
        if within is None:
            within = self._within[route] = [0] * (len(BOUNDS_S) + 1)
        within[bisect_left(BOUNDS_S, took_s)] += 1
        self._sums_s[route] = self._sums_s.get(route, 0.0) + took_s

    def counted(self) -> Counted:
        """What was counted up to now."""
        latencies = {
            route: Latency(tuple(within), self._sums_s[route]) for route, within in self._within.items()
        }
        return Counted(dict(self._answers), latencies)


class Counting:
    """Answers as another does, and counts."""

    def __init__(self, router: Answering, counts: Counts) -> None:
        self._router = router
        self._counts = counts

    def answer(self, request: Request) -> Answer:
        """The other's answer; it is counted once it is there."""
        began_s = time.perf_counter()
        answer = self._router.answer(request)
        if isinstance(answer, Response):
            self._counts.note(request, answer, time.perf_counter() - began_s)
            return answer

        def note(done: asyncio.Future[Response]) -> None:
            if not done.cancelled() and not done.exception():  # else there is no answer
                self._counts.note(request, done.result(), time.perf_counter() - began_s)

        later = asyncio.ensure_future(answer)
        later.add_done_callback(note)
        return later

    def hurry(self) -> None:
        """Let no answer wait for what may come."""
        self._router.hurry()
