"""Answers that take longer than a turn of the loop: what asks the driver or a control daemon, or waits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from yunion_mps.errors import (
    BusyError,
    ConfigError,
    NeverFreeError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    YunionError,
)
from yunion_mps.http.leases import Giver, LeasePaths
from yunion_mps.http.query import (
    LARGEST_NUMBER,
    BadRequestError,
    Request,
    Response,
    boolean,
    encode,
    number,
    parse_query,
    problem,
    refuse_unknown,
)
from yunion_mps.service.queries import EVENT_KINDS, Service, Wanted

log = logging.getLogger(__name__)

Json = dict[str, Any]
Query = Mapping[str, str]

MOST_EVENTS = 1000
#: The last moment that can be asked for (in s since 1970), in the year 5138.
LATEST_S = 99_999_999_999
#: How long a request may wait for an event, in s.
LONGEST_EVENT_WAIT_S = 60

_READ = ("GET", "HEAD")
_CHANGE = ("POST",)
#: A PID has seven digits at most (PID_MAX_LIMIT of the kernel's include/linux/threads.h).
_PID_DIGITS = 10
_STATUS = {
    BadRequestError: 400,
    NotAllowedError: 403,
    NotFoundError: 404,
    ConfigError: 422,
    NeverFreeError: 410,  # before the kind that it is of
    NothingFreeError: 423,
    BusyError: 503,
}


class Changes(Protocol):
    """What the daemon may be told to become; each raises YunionError where it is refused or fails."""

    async def plan(self) -> Json:
        """What a reload would change."""

    async def reload(self, *, drain: bool, now: bool) -> Json:
        """Read the configuration again and bring it into force."""

    async def reexec(self) -> Json:
        """Run the program anew in the same process."""


class People(Protocol):
    """Who uses the GPUs, and who is to do so no more; each raises YunionError as above."""

    async def clients(self, *, seen: bool = False) -> Json:
        """The MPS servers and their clients; with `seen` no control daemon is asked."""

    async def terminate(self, pid: int, uid: int, *, force: bool) -> Json:
        """End a client, for the user `uid`."""


class Meter(Protocol):
    """What a monitoring system is told."""

    async def answer(self, accept: str) -> tuple[str, bytes]:
        """All metrics, in the format that an Accept header asks for."""


class Later(NamedTuple):
    """A path that is answered later: how, and by whom; `whole` where it is done though the asker may go."""

    methods: tuple[str, ...]
    answer: Callable[[Request, Query], Coroutine[Any, Any, Json | Response]]
    whole: bool = False


class Deferred:
    """The paths that are answered later."""

    def __init__(
        self, service: Service, changes: Changes, people: People, giver: Giver, meter: Meter
    ) -> None:
        self._service = service
        self._changes = changes
        self._people = people
        self._meter = meter
        self._leases = LeasePaths(giver)
        self._changing: set[asyncio.Task[Json | Response]] = set()
        self._waiting: set[Callable[[], None]] = set()
        self._hurried = False
        self._paths = {
            "/metrics": Later(_READ, self._metrics),
            "/v1/events": Later(_READ, self._events),
            "/v1/usage": Later(_READ, self._usage),
            "/v1/plan": Later(_READ, self._plan),
            "/v1/clients": Later(_READ, self._clients),
            "/v1/reload": Later(_CHANGE, self._reload, whole=True),
            "/v1/reexec": Later(_CHANGE, self._reexec, whole=True),
        }

    def find(self, path: str, method: str) -> Later | None:
        """What answers the path, None where it is answered at once or not at all."""
        by_method = self._leases.find(path)
        if by_method:
            any_of_them = next(iter(by_method.values()))  # for a method that is refused anyway
            return Later(tuple(by_method), by_method.get(method, any_of_them))
        begin, end = "/v1/clients/", "/terminate"
        pid = path[len(begin) : -len(end)] if path.startswith(begin) and path.endswith(end) else ""
        if pid.isascii() and pid.isdigit() and len(pid) <= _PID_DIGITS:
            return Later(_CHANGE, self._terminate, whole=True)
        return self._paths.get(path)

    async def answer(self, later: Later, request: Request) -> Response:
        """The response; never raises."""
        try:
            query = parse_query(urlsplit(request.target).query)
            work = later.answer(request, query)
            found = await (self._to_its_end(work) if later.whole else work)
            return found if isinstance(found, Response) else Response(200, "application/json", encode(found))
        except YunionError as error:
            status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 409)
            return problem(status, error.message, error.hint, code=error.code)
        except Exception:
            log.exception("the answer to %s %s has failed", request.method, request.target)
            return problem(500, "a fault of the daemon", "see: journalctl -u yunion-mps-daemon")

    async def _to_its_end(self, work: Coroutine[Any, Any, Json | Response]) -> Json | Response:
        """Do the whole of a change, though whoever asked for it may go away meanwhile."""
        task = asyncio.create_task(work)
        self._changing.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Json | Response]) -> None:
        self._changing.discard(task)
        if not task.cancelled():
            task.exception()  # it was told to whoever asked, where they are still there

    def hurry(self) -> None:
        """Let nobody wait for events any longer: they are answered with what there is."""
        self._hurried = True
        for wake in self._waiting:
            wake()

    async def _events(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, {"after", "since", "limit", "kind", "wait"})
        kind = query.get("kind", "")
        if "kind" in query and kind not in EVENT_KINDS:
            raise BadRequestError(f"kind is {kind[:100]!r}", f"write one of {', '.join(EVENT_KINDS)}")
        after = number(query, "after", 0, 0, LARGEST_NUMBER) if "after" in query else None
        since_s = number(query, "since", 0, 0, LATEST_S)
        limit = number(query, "limit", 100, 1, MOST_EVENTS)
        wait_s = number(query, "wait", 0, 0, LONGEST_EVENT_WAIT_S)
        if wait_s:
            request.await_event()
        return await self._wait_for_events(Wanted(after, float(since_s), limit, kind), wait_s)

    async def _wait_for_events(self, wanted: Wanted, wait_s: float) -> Json:
        """The events that are wanted; where there are none, the first that come within `wait_s`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        while True:
            found = self._service.events(wanted)
            left_s = end_s - loop.time()
            begun_anew = found["last"] < (wanted.after or 0)  # then what is asked for never comes
            if found["events"] or begun_anew or left_s <= 0 or self._hurried:
                return found
            more = asyncio.Event()
            self._service.when_there_are_more(more.set)
            self._waiting.add(more.set)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(more.wait(), left_s)
            finally:
                self._waiting.discard(more.set)
                self._service.forget(more.set)

    async def _metrics(self, request: Request, query: Query) -> Response:
        refuse_unknown(query, set())
        content_type, text = await self._meter.answer(request.accept)
        return Response(200, content_type, text)

    async def _usage(self, request: Request, query: Query) -> Json:
        """Of the moment, so that it cannot be answered with the bytes of before."""
        del request
        refuse_unknown(query, {"gpu", "devices"})
        devices = boolean({"devices": "true", **query}, "devices")
        now_s = asyncio.get_running_loop().time()
        return self._service.usage.last_hour(now_s, time.time(), query.get("gpu"), devices=devices)

    async def _plan(self, request: Request, query: Query) -> Json:
        del request
        refuse_unknown(query, set())
        return await self._changes.plan()

    async def _clients(self, request: Request, query: Query) -> Json:
        del request
        refuse_unknown(query, {"seen"})
        return await self._people.clients(seen=boolean(query, "seen"))

    async def _reload(self, request: Request, query: Query) -> Json:
        _only_root(request)
        refuse_unknown(query, {"drain", "now"})
        return await self._changes.reload(drain=boolean(query, "drain"), now=boolean(query, "now"))

    async def _reexec(self, request: Request, query: Query) -> Json:
        _only_root(request)
        refuse_unknown(query, set())
        return await self._changes.reexec()

    async def _terminate(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, {"force"})
        pid = int(urlsplit(request.target).path.split("/")[3])
        return await self._people.terminate(pid, request.uid, force=boolean(query, "force"))


def _only_root(request: Request) -> None:
    if request.uid not in (0, os.geteuid()):
        raise NotAllowedError("only root may change the daemon", "use sudo")
