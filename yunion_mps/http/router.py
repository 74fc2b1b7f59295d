"""The router: dispatches requests to their operations, caches responses, and counts requests."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from yunion_mps.core.errors import ShortageError, YunionError
from yunion_mps.core.exposition import Histogram
from yunion_mps.core.identity import fingerprint
from yunion_mps.http.handlers import Handlers
from yunion_mps.http.messages import (
    EventualResponse,
    Request,
    Response,
    problem_of,
    problem_response,
    response_of,
)
from yunion_mps.http.operation import ROOT, WATCH_PARAMETERS, Operation
from yunion_mps.http.operations import OPERATIONS, ROUTES
from yunion_mps.http.parameters import Value
from yunion_mps.service.facts import RequestCounts
from yunion_mps.service.permissions import refuse_unprivileged

log = logging.getLogger(__name__)

#: The route of unknown paths, and the method of unsupported ones, so that callers cannot create counters.
OTHER = "other"

#: The buckets of request durations in s, from a cached answer to a reload that waits for jobs.
_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_READ = ("GET", "HEAD")
_METHODS = (*_READ, "POST", "DELETE")
_CACHED_BYTES = 8 << 20
#: Errors of system calls in a shortage, such as of descriptors: the next request may succeed.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_TEMPLATES = {path: path.split("/") for path in ROUTES if "{" in path}


class _Match(NamedTuple):
    route: str
    methods: Mapping[str, Operation[Any]]
    arguments: Mapping[str, Value]


class RequestCounter:
    """Counts the answered requests, and how long they took."""

    def __init__(self) -> None:
        self._responses: Counter[tuple[str, str, int]] = Counter()
        self._latencies = Histogram(_BOUNDS_S)

    def counts(self) -> RequestCounts:
        return RequestCounts(dict(self._responses), list(self._latencies.samples()))

    def count(self, route: str, request: Request, response: Response, took_s: float) -> None:
        """Count an answered request.

        route: the path of the operation, with its parameters' names
        took_s: how long the answer took
        """
        method = request.method if request.method in _METHODS else OTHER
        self._responses[route, method, response.status] += 1
        self._latencies.observe((route,), took_s)


class Router:
    """Handles requests; a cached response is reused until the snapshot changes."""

    def __init__(self, handlers: Handlers, counter: RequestCounter) -> None:
        self._handlers = handlers
        self.counter = counter
        self._handler_of = {operation.name: getattr(handlers, operation.name) for operation in OPERATIONS}
        self._cached: dict[str, tuple[str, Response]] = {}
        self._cached_for = -1
        self._cached_bytes = 0
        self._uninterruptible: set[asyncio.Task[Response]] = set()

    def handle(self, request: Request) -> EventualResponse:
        """Return the response, or an awaitable one; never raises."""
        began_s = time.perf_counter()
        route, response = self._dispatch(request)
        if isinstance(response, Response):
            self.counter.count(route, request, response, time.perf_counter() - began_s)
            return response

        def count(answered: asyncio.Future[Response]) -> None:
            if not answered.cancelled() and not answered.exception():  # otherwise there is no answer
                self.counter.count(route, request, answered.result(), time.perf_counter() - began_s)

        pending = asyncio.ensure_future(response)
        pending.add_done_callback(count)
        return pending

    def _dispatch(self, request: Request) -> tuple[str, EventualResponse]:
        version = self._handlers.version
        if version != self._cached_for or self._cached_bytes > _CACHED_BYTES:
            self._cached.clear()
            self._cached_for = version
            self._cached_bytes = 0
        cached = self._cached.get(request.target) if request.method in _READ else None
        if cached:
            return cached[0], self._conditional(request, cached[1])
        try:
            url = urlsplit(request.target)
        except ValueError:
            return OTHER, problem_response(
                400, "the request's target cannot be parsed", "write a path such as /v1/devices"
            )
        match = _match(url.path)
        if match is None:
            hint = "see the paths: /v1/openapi.json"
            return OTHER, problem_response(404, f"no such path: {url.path[:200]!r}", hint)
        operation = match.methods.get(request.method)
        if operation is None:
            allowed = ", ".join(match.methods)
            text = f"{request.method} is not supported here"
            return match.route, problem_response(405, text, f"use {allowed}", (("Allow", allowed),))

        def work() -> Any:
            return self._call_handler(operation, request, match.arguments, url.query)

        if not operation.cached:
            pending = _run_async(request, work)
            return match.route, self._shield(pending) if operation.uninterruptible else pending
        response = _run(request, work)
        if response.status < 500:
            self._cached[request.target] = match.route, response
            self._cached_bytes += len(request.target) + len(response.body)
        return match.route, self._conditional(request, response)

    def _conditional(self, request: Request, response: Response) -> EventualResponse:
        """Return the response, or 304 if the caller has it already, possibly after waiting for a change."""
        etag = dict(response.headers).get("ETag")
        if etag is None or not _matches(request.headers.get("if-none-match", ""), etag):
            return response
        url = urlsplit(request.target)
        wait_s = ROUTES[url.path]["GET"].arguments(url.query, request.headers, b"")["wait_s"]
        if not isinstance(wait_s, int) or not wait_s:
            return _not_modified(etag)
        request.await_event()
        return self._await_change(request, etag, wait_s)

    async def _await_change(self, request: Request, etag: str, wait_s: float) -> Response:
        """Return the response once it differs from the caller's; 304 if it does not within `wait_s`."""
        unconditional = request._replace(headers={})

        def evaluate() -> Response:
            response = self._dispatch(unconditional)[1]
            assert isinstance(response, Response)
            return response

        def is_changed(response: Response) -> bool:
            return dict(response.headers).get("ETag") != etag

        response = await self._handlers.changes.wait_for(evaluate, is_changed, wait_s)
        return response if is_changed(response) else _not_modified(etag)

    def _call_handler(
        self, operation: Operation[Any], request: Request, in_path: Mapping[str, Value], query: str
    ) -> Any:
        if operation.access == ROOT:
            refuse_unprivileged(request.uid, "reload or re-execute the daemon")
        arguments = operation.arguments(query, request.headers, request.body)
        if not operation.watchable:
            return self._handler_of[operation.name](request, **in_path, **arguments)
        for parameter in WATCH_PARAMETERS:  # the router handles these
            del arguments[parameter.argument]
        response = response_of(self._handler_of[operation.name](request, **in_path, **arguments))
        return response._replace(headers=(*response.headers, ("ETag", _etag(response.body))))

    async def _shield(self, work: Awaitable[Response]) -> Response:
        """Finish the work even if its caller disconnects."""
        task = asyncio.ensure_future(work)
        self._uninterruptible.add(task)
        task.add_done_callback(self._uninterruptible.discard)
        return await asyncio.shield(task)


def _etag(body: bytes) -> str:
    return f'"{fingerprint(body)}"'


def _matches(if_none_match: str, etag: str) -> bool:
    etags = [candidate.strip().removeprefix("W/") for candidate in if_none_match.split(",")]
    return etag in etags or etags == ["*"]


def _not_modified(etag: str) -> Response:
    return Response(304, "", b"", (("ETag", etag),))


def _match(path: str) -> _Match | None:
    if path in ROUTES and path not in _TEMPLATES:
        return _Match(path, ROUTES[path], {})
    parts = path.split("/")
    for route, template in _TEMPLATES.items():
        texts = _parts_by_name(template, parts)
        if texts is None:
            continue
        methods = ROUTES[route]
        values: dict[str, Value] = {}
        for parameter in next(iter(methods.values())).path_parameters:
            value = _path_value(parameter.type, texts[parameter.name])
            if value is None:
                return None
            values[parameter.name] = value
        return _Match(route, methods, values)
    return None


def _parts_by_name(template: list[str], parts: list[str]) -> dict[str, str] | None:
    """Return what stands in the path for each `{name}` of the template; None if the path differs from it."""
    if len(parts) != len(template):
        return None
    texts: dict[str, str] = {}
    for expected, part in zip(template, parts):
        if expected.startswith("{"):
            texts[expected[1:-1]] = part
        elif expected != part:
            return None
    return texts


def _path_value(kind: str, text: str) -> Value:
    """Return the value of a path parameter; None if it is invalid."""
    if kind == "integer":
        return int(text) if re.fullmatch("[0-9]{1,10}", text) else None
    return unquote(text) or None


def _run(request: Request, work: Callable[[], Any]) -> Response:
    try:
        return response_of(work())
    except Exception as error:  # noqa: BLE001 - it becomes the answer
        return _failure(request, error)


async def _run_async(request: Request, work: Callable[[], Any]) -> Response:
    try:
        return response_of(await work())
    except Exception as error:  # noqa: BLE001 - it becomes the answer
        return _failure(request, error)


def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, YunionError):
        return problem_of(error)
    if isinstance(error, OSError) and error.errno in _SHORTAGES:
        return problem_of(ShortageError(f"the request cannot be answered: {error.strerror}"))
    if isinstance(error, MemoryError):
        return problem_of(ShortageError("the request cannot be answered: out of memory"))
    log.error("the answer to %s %s failed", request.method, request.target, exc_info=error)
    return problem_response(500, "internal error in the daemon", "see: journalctl -u yunion-mps-daemon")
