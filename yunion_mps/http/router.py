"""The router: finds the operation that a request is for, has it answered, and counts the answers."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from yunion_mps.errors import NotAllowedError, YunionError
from yunion_mps.http.handlers import Handlers
from yunion_mps.http.messages import Answer, Request, Response, problem, problem_of, response_of
from yunion_mps.http.operations import OPERATIONS, ROOT, ROUTES, WATCH_PARAMETERS, Operation
from yunion_mps.http.parameters import Value
from yunion_mps.service.metrics import BOUNDS_S, Counted, Latency

log = logging.getLogger(__name__)

#: The route of all that is no path of ours, and the method of all that is none of ours: so that callers
#: cannot make counters.
OTHER = "other"

_READ = ("GET", "HEAD")
_METHODS = (*_READ, "POST", "DELETE")
_CACHED_BYTES = 8 << 20
_TEMPLATES = {path: path.split("/") for path in ROUTES if "{" in path}


class _Match(NamedTuple):
    """A path of ours, its operations by method, and its parameters."""

    route: str
    methods: Mapping[str, Operation[Any]]
    arguments: Mapping[str, Value]


class Router:
    """Answers requests; equal ones between two changes of the snapshot get the very same bytes."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._handler_of = {one.name: getattr(handlers, one.name) for one in OPERATIONS}
        self._cached: dict[str, tuple[str, Response]] = {}
        self._cached_for = -1
        self._cached_bytes = 0
        self._changing: set[asyncio.Task[Response]] = set()
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._within: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def answer(self, request: Request) -> Answer:
        """The response, or an awaitable one; never raises."""
        began_s = time.perf_counter()
        route, answer = self._answer(request)
        if isinstance(answer, Response):
            self._count(route, request, answer, time.perf_counter() - began_s)
            return answer

        def count(done: asyncio.Future[Response]) -> None:
            if not done.cancelled() and not done.exception():  # else there is no answer
                self._count(route, request, done.result(), time.perf_counter() - began_s)

        later = asyncio.ensure_future(answer)
        later.add_done_callback(count)
        return later

    def counted(self) -> Counted:
        """The answers and their latencies up to now."""
        latencies = {
            route: Latency(tuple(within), self._sums_s[route]) for route, within in self._within.items()
        }
        return Counted(dict(self._answers), latencies)

    def _count(self, route: str, request: Request, response: Response, took_s: float) -> None:
        method = request.method if request.method in _METHODS else OTHER
        self._answers[route, method, response.status] += 1
        within = self._within.setdefault(route, [0] * (len(BOUNDS_S) + 1))
        within[bisect_left(BOUNDS_S, took_s)] += 1
        self._sums_s[route] = self._sums_s.get(route, 0.0) + took_s

    def _answer(self, request: Request) -> tuple[str, Answer]:
        """The route and the answer."""
        version = self._handlers.version
        if version != self._cached_for or self._cached_bytes > _CACHED_BYTES:
            self._cached.clear()
            self._cached_for, self._cached_bytes = version, 0
        known = self._cached.get(request.target) if request.method in _READ else None
        if known:
            return known[0], self._unless_known(request, known[1])
        try:
            url = urlsplit(request.target)
        except ValueError:
            return OTHER, problem(
                400, "the request's target cannot be parsed", "write a path such as /v1/devices"
            )
        match = _match(url.path)
        if match is None:
            hint = "see the paths: /v1/openapi.json"
            return OTHER, problem(404, f"there is nothing at {url.path[:200]!r}", hint)
        operation = match.methods.get(request.method)
        if operation is None:
            allowed = ", ".join(match.methods)
            what, hint = f"{request.method} is not supported here", f"use {allowed}"
            return match.route, problem(405, what, hint, (("Allow", allowed),))

        def work() -> Any:
            return self._handle(operation, request, match.arguments, url.query)

        if not operation.cached:
            answer = _later(request, work)
            return match.route, self._completed(answer) if operation.completes else answer
        response = _at_once(request, work)
        if response.status < 500:
            self._cached[request.target] = match.route, response
            self._cached_bytes += len(request.target) + len(response.body)
        return match.route, self._unless_known(request, response)

    def _unless_known(self, request: Request, response: Response) -> Answer:
        """The response, or 304 if the caller has it already; it may wait for another one first."""
        etag = dict(response.headers).get("ETag")
        if etag is None or not _names(request.headers.get("if-none-match", ""), etag):
            return response
        url = urlsplit(request.target)
        wait_s = ROUTES[url.path]["GET"].arguments(url.query, request.headers, b"")["wait_s"]
        if not isinstance(wait_s, int) or not wait_s:
            return _not_modified(etag)
        request.await_event()
        return self._changed(request, etag, wait_s)

    async def _changed(self, request: Request, etag: str, wait_s: float) -> Response:
        """The response once it is another than the caller has; 304 if it is none within the time."""
        again = request._replace(headers={})

        def look() -> Response:
            found = self._answer(again)[1]
            assert isinstance(found, Response)
            return found

        def is_enough(found: Response) -> bool:
            return dict(found.headers).get("ETag") != etag

        found = await self._handlers.changes.until(look, is_enough, wait_s)
        return found if is_enough(found) else _not_modified(etag)

    def _handle(
        self, operation: Operation[Any], request: Request, in_path: Mapping[str, Value], query: str
    ) -> Any:
        if operation.who == ROOT and request.uid not in (0, os.geteuid()):
            raise NotAllowedError("only root may change the daemon", "use sudo")
        arguments = operation.arguments(query, request.headers, request.body)
        if not operation.watched:
            return self._handler_of[operation.name](request, **in_path, **arguments)
        for one in WATCH_PARAMETERS:  # which are ours, and not the handler's
            del arguments[one.argument]
        response = response_of(self._handler_of[operation.name](request, **in_path, **arguments))
        return response._replace(headers=(*response.headers, ("ETag", _etag(response.body))))

    async def _completed(self, work: Awaitable[Response]) -> Response:
        """Do all of a change, even if its caller goes away meanwhile."""
        task = asyncio.ensure_future(work)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return await asyncio.shield(task)


def _etag(body: bytes) -> str:
    return f'"{sha256(body).hexdigest()[:32]}"'


def _names(if_none_match: str, etag: str) -> bool:
    known = [one.strip().removeprefix("W/") for one in if_none_match.split(",")]
    return etag in known or known == ["*"]


def _not_modified(etag: str) -> Response:
    return Response(304, "", b"", (("ETag", etag),))


def _match(path: str) -> _Match | None:
    if path in ROUTES and path not in _TEMPLATES:
        return _Match(path, ROUTES[path], {})
    parts = path.split("/")
    for route, template in _TEMPLATES.items():
        pairs = list(zip(template, parts)) if len(parts) == len(template) else []
        named = {name[1:-1]: part for name, part in pairs if name.startswith("{")}
        if named and all(name == part for name, part in pairs if not name.startswith("{")):
            methods = ROUTES[route]
            parameters = next(iter(methods.values())).path_parameters
            values = {one.name: _path_value(one.type, named[one.name]) for one in parameters}
            return None if None in values.values() else _Match(route, methods, values)
    return None


def _path_value(kind: str, text: str) -> Value:
    """A parameter of a path; None if it cannot be one."""
    if kind == "integer":
        return int(text) if re.fullmatch("[0-9]{1,10}", text) else None
    return unquote(text) or None


def _at_once(request: Request, work: Callable[[], Any]) -> Response:
    try:
        return response_of(work())
    except Exception as error:  # noqa: BLE001 - it becomes the answer
        return _failure(request, error)


async def _later(request: Request, work: Callable[[], Any]) -> Response:
    try:
        return response_of(await work())
    except Exception as error:  # noqa: BLE001 - it becomes the answer
        return _failure(request, error)


def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, YunionError):
        return problem_of(error)
    log.error("the answer to %s %s has failed", request.method, request.target, exc_info=error)
    return problem(500, "a fault of the daemon", "see: journalctl -u yunion-mps-daemon")
