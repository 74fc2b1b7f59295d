"""Finds the operation that a request is for, has it answered out of the services, and counts the answers.

An operation's handler is the method of `Handlers` that has its name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from yunion_mps.errors import NotAllowedError, NotFoundError, YunionError
from yunion_mps.escaping import printable
from yunion_mps.host.proc import started_ticks, uid_of
from yunion_mps.host.systemd import job_unit_of
from yunion_mps.http.messages import Answer, Request, Response, json_response, problem, problem_of
from yunion_mps.http.openapi import document
from yunion_mps.http.operations import (
    COMMAND_LENGTH,
    OPERATIONS,
    ROOT,
    ROUTES,
    BadRequestError,
    ContradictionError,
    Operation,
    Value,
    arguments_of,
)
from yunion_mps.leases.queue import QueuedRequest
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Holder, Owner
from yunion_mps.service.clients import ClientService
from yunion_mps.service.events import EventFilter, Events
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.metrics import BOUNDS_S, Counted, Latency
from yunion_mps.service.queries import Filters, Queries
from yunion_mps.service.reload import Reloader

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
        cached = self._cached.get(request.target) if request.method in _READ else None
        if cached:
            return cached
        try:
            url = urlsplit(request.target)
        except ValueError:
            return OTHER, problem(400, "the request's target is no URL that can be taken apart")
        match = _match(url.path)
        if match is None:
            hint = "the paths are in /v1/openapi.json"
            return OTHER, problem(404, f"there is nothing at {url.path[:200]!r}", hint)
        operation = match.methods.get(request.method)
        if operation is None:
            allowed = (("Allow", ", ".join(match.methods)),)
            return match.route, problem(405, f"{request.method} is not supported here", headers=allowed)

        def work() -> Any:
            return self._handle(operation, request, match.arguments, url.query)

        if not operation.cached:
            answer = _later(request, work)
            return match.route, self._completed(answer) if operation.completes else answer
        response = _at_once(request, work)
        if response.status < 500:
            self._cached[request.target] = match.route, response
            self._cached_bytes += len(request.target) + len(response.body)
        return match.route, response

    def _handle(
        self, operation: Operation[Any], request: Request, in_path: Mapping[str, Value], query: str
    ) -> Any:
        if operation.who == ROOT and request.uid not in (0, os.geteuid()):
            raise NotAllowedError("only root may change the daemon", "use sudo")
        arguments = arguments_of(query, operation.query_parameters)
        return self._handler_of[operation.name](request, **in_path, **arguments)

    async def _completed(self, work: Awaitable[Response]) -> Response:
        """Do all of a change, even if its caller goes away meanwhile."""
        task = asyncio.ensure_future(work)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return await asyncio.shield(task)


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
        return json_response(work())
    except Exception as error:  # noqa: BLE001 - it becomes the answer
        return _failure(request, error)


async def _later(request: Request, work: Callable[[], Any]) -> Response:
    try:
        found = await work()
        return found if isinstance(found, Response) else json_response(found)
    except Exception as error:  # noqa: BLE001 - it becomes the answer
        return _failure(request, error)


def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, YunionError):
        return problem_of(error)
    log.error("the answer to %s %s has failed", request.method, request.target, exc_info=error)
    return problem(500, "a fault of the daemon", "see: journalctl -u yunion-mps-daemon")


if TYPE_CHECKING:
    from yunion_mps import answers


class Handlers:
    """Answers the operations out of the services: one method for each, with its name and its parameters."""

    def __init__(
        self,
        queries: Queries,
        reloader: Reloader,
        clients: ClientService,
        leases: LeaseService,
        events: Events,
        metrics: Callable[[str], Awaitable[tuple[str, bytes]]],
    ) -> None:
        """`metrics` gives the content type and the text for an Accept header."""
        self._queries = queries
        self._reloader = reloader
        self._clients = clients
        self._leases = leases
        self._events = events
        self._metrics = metrics

    @property
    def version(self) -> int:
        """Changes when a cached answer may change."""
        return self._queries.version

    def get_devices(
        self,
        _: Request,
        *,
        limit: int,
        offset: int,
        dev_type: str | None,
        model: str | None,
        addr: str | None,
        device_path: str | None,
        vendor_device_id: str | None,
        numa_node: int | None,
        unused: bool,
    ) -> answers.DeviceList:
        filters = Filters(dev_type, model, addr, device_path, vendor_device_id, numa_node, unused)
        return self._queries.devices(filters, limit, offset)

    def get_device(self, _: Request, *, id: str) -> answers.DeviceDetails:  # noqa: A002 - it is the parameter's name
        return self._queries.device(id)

    async def get_gpus(self, _: Request) -> answers.GpuList:
        """Of the last poll, so that it cannot be a cached answer."""
        return self._queries.gpus()

    def get_status(self, _: Request) -> answers.Status:
        return self._queries.status()

    def get_document(self, _: Request) -> Mapping[str, object]:
        return document()

    async def get_metrics(self, request: Request) -> Response:
        content_type, text = await self._metrics(request.accept)
        return Response(200, content_type, text)

    async def get_events(
        self, request: Request, *, after: int | None, since: float, limit: int, kind: str | None, wait: int
    ) -> answers.EventList:
        """The events that are wanted; if there are none, the first that come within `wait` seconds."""
        if wait:
            request.await_event()
        return await self._events.wait(EventFilter(after, since, limit, kind or ""), wait)

    async def get_usage(self, _: Request, *, gpu: str | None, devices: bool) -> answers.Usage:
        """Of the moment, so that it cannot be a cached answer."""
        now_s = asyncio.get_running_loop().time()
        return self._queries.usage.last_hour(now_s, time.time(), gpu, devices=devices)

    async def get_plan(self, _: Request) -> answers.ChangeList:
        return await self._reloader.plan()

    async def reload(self, _: Request, *, drain: bool, now: bool) -> answers.ChangeList:
        return await self._reloader.reload(drain=drain, now=now)

    async def reexec(self, _: Request) -> answers.Reexec:
        return await self._reloader.reexec()

    async def get_clients(self, _: Request, *, seen: bool) -> answers.ClientList:
        return await self._clients.clients(seen=seen)

    async def terminate_client(self, request: Request, *, pid: int, force: bool) -> answers.Termination:
        return await self._clients.terminate(pid, request.uid, force=force)

    async def get_leases(self, _: Request) -> answers.LeaseList:
        return self._leases.leases()

    async def take_lease(
        self,
        asked: Request,
        *,
        count: int,
        memory: int | None,
        units: int | None,
        device: str | None,
        gpu: str | None,
        across: bool,
        placement: str,
        enforced: bool,
        wait: int,
        cdi: bool,
        dry: bool,
        request: str | None,
        binding: str | None,
        pid: int | None,
        command: str | None,
        name: str | None,
        ttl: int | None,
    ) -> answers.LeaseRecord:
        if asked.body_bytes:
            hint = "write it as parameters: /v1/leases?name=a&ttl=60"
            raise BadRequestError("a body is not read here", hint)
        if sum((count > 1, bool(device), memory is not None, units is not None)) > 1:
            raise ContradictionError("count, device, memory and units exclude each other", "give one")
        if across and count == 1:
            raise ContradictionError("across wants several devices, and count is 1", "write count=2 or more")
        memory_mib = (memory or 0) + (units or 0) * self._leases.memory_unit_mib
        wanted = LeaseRequest(count, device or "", gpu or "", across, placement, memory_mib, enforced)
        queued = QueuedRequest(wanted, _holder(asked, binding, pid, command, name, ttl), request or "", cdi)
        return self._leases.would_take(queued) if dry else await self._leases.take(queued, asked.keep, wait)

    async def end_lease(self, request: Request, *, lease: str) -> answers.LeaseRecord:
        return self._leases.release(lease, _caller(request))

    async def renew_lease(self, request: Request, *, lease: str) -> answers.LeaseRecord:
        return self._leases.renew(lease, _caller(request))

    async def bind_lease(self, request: Request, *, lease: str, pid: int | None) -> answers.LeaseRecord:
        holder = _process("container", request.pid if pid is None else pid, request)
        return self._leases.bind(lease, _caller(request), holder)


def _caller(request: Request) -> Owner:
    return Owner(request.uid, job_unit_of(request.pid))


def _holder(
    request: Request,
    binding: str | None,
    pid: int | None,
    command: str | None,
    name: str | None,
    ttl: int | None,
) -> Holder:
    """The holder that the parameters name; raises ContradictionError and what `_process` raises."""
    if (binding or (name and "name")) == "name":
        if not name or ttl is None:
            what = "a lease of a name needs both its name and its time to live"
            raise ContradictionError(what, "write name=job-17&ttl=600, in seconds")
        if command is not None:
            raise ContradictionError("command does not go with binding=name", "leave one of them out")
        return Holder("name", request.uid, name=name, ttl_s=ttl, unit=job_unit_of(request.pid))
    for parameter, value in (("name", name), ("ttl", ttl)):
        if value is not None:
            raise ContradictionError(f"{parameter} goes with binding=name only", "leave one of them out")
    if binding == "connection" and pid not in (None, request.pid):
        raise ContradictionError("pid goes with binding=process only")
    holder = _process(binding or "process", request.pid if pid is None else pid, request)
    return holder._replace(command=printable((command or "")[:COMMAND_LENGTH]))


def _process(binding: str, pid: int, request: Request) -> Holder:
    """A process of the caller's user, or any for root; raises NotFoundError and NotAllowedError.

    A process' lease belongs to the process' owner, and a container's to the engine that asks: the user in a
    container, or the user outside that its root is mapped to, is no user of the host's.
    """
    started, owner = (started_ticks(pid), uid_of(pid)) if pid else (None, None)
    if started is None or owner is None:
        hint = "a process in another PID namespace cannot be seen from here: take the lease by name and ttl"
        raise NotFoundError(f"there is no process with PID {pid}", hint)
    if request.uid not in (0, os.geteuid(), owner):
        raise NotAllowedError(f"PID {pid} is another user's", "only root may take a lease for it")
    lease_owner = _caller(request) if binding == "container" else Owner(owner, job_unit_of(pid))
    return Holder(binding, lease_owner.uid, pid, started, unit=lease_owner.unit)
