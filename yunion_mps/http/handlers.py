"""Answers the operations out of the services: one method for each, with its name and its parameters."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from yunion_mps.errors import NotAllowedError, NotFoundError
from yunion_mps.escaping import printable
from yunion_mps.host.proc import job_unit_of, started_ticks, uid_of
from yunion_mps.http.messages import Request, Response
from yunion_mps.http.openapi import document
from yunion_mps.http.operations import COMMAND_LENGTH, BadRequestError, ContradictionError
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Holder, Owner
from yunion_mps.service.clients import ClientService
from yunion_mps.service.events import EventFilter, Events
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.queries import Filters, Queries
from yunion_mps.service.reload import Reloader

if TYPE_CHECKING:
    from yunion_mps import answers


class Handlers:
    """The handlers of all operations."""

    def __init__(
        self,
        service: Queries,
        reloader: Reloader,
        clients: ClientService,
        leases: LeaseService,
        events: Events,
        metrics: Callable[[str], Awaitable[tuple[str, bytes]]],
    ) -> None:
        """`metrics` gives the content type and the text for an Accept header."""
        self._service = service
        self._reloader = reloader
        self._clients = clients
        self._leases = leases
        self._events = events
        self._metrics = metrics

    @property
    def version(self) -> int:
        """Changes when a cached answer may change."""
        return self._service.version

    def hurry(self) -> None:
        """Answer requests that wait for events with what there is, and let none wait any more."""
        self._events.end_waits()

    def get_devices(self, _: Request, *, limit: int, offset: int, **filters: Any) -> answers.DeviceList:
        return self._service.devices(Filters(**filters), limit, offset)

    def get_device(self, _: Request, *, id: str) -> answers.DeviceDetails:  # noqa: A002 - it is the parameter's name
        return self._service.device(id)

    def get_gpus(self, _: Request) -> answers.GpuList:
        return self._service.gpus()

    def get_status(self, _: Request) -> answers.Status:
        return self._service.status()

    def get_document(self, _: Request) -> dict[str, Any]:
        return document()

    async def get_metrics(self, request: Request) -> Response:
        content_type, text = await self._metrics(request.accept)
        return Response(200, content_type, text)

    async def get_events(
        self, request: Request, *, after: int | None, since: int, limit: int, kind: str | None, wait: int
    ) -> answers.EventList:
        """The events that are wanted; if there are none, the first that come within `wait` seconds."""
        if wait:
            request.await_event()
        return await self._events.wait(EventFilter(after, float(since), limit, kind or ""), wait)

    async def get_usage(self, _: Request, *, gpu: str | None, devices: bool) -> answers.Usage:
        """Of the moment, so that it cannot be a cached answer."""
        now_s = asyncio.get_running_loop().time()
        return self._service.usage.last_hour(now_s, time.time(), gpu, devices=devices)

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
        request: Request,
        /,
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
        **holder: Any,
    ) -> answers.LeaseRecord:
        """`holder` has what `_holder` takes, and the name of the `request`."""
        if request.body_bytes:
            hint = "write it as parameters: /v1/leases?name=a&ttl=60"
            raise BadRequestError("a body is not read here", hint)
        if sum((count > 1, bool(device), memory is not None, units is not None)) > 1:
            raise ContradictionError("count, device, memory and units exclude each other", "give one")
        if across and count == 1:
            raise ContradictionError("across wants several devices, and count is 1", "write count=2 or more")
        memory_mib = (memory or 0) + (units or 0) * self._leases.memory_unit_mib
        wanted = LeaseRequest(count, device or "", gpu or "", across, placement, memory_mib, enforced)
        key = holder.pop("request") or ""
        if dry:
            return self._leases.would_take(wanted, _holder(request, **holder), key)
        return await self._leases.take(wanted, _holder(request, **holder), request.keep, wait, key, cdi=cdi)

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
    *,
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
