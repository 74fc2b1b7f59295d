"""The handlers: one method for each operation, which calls the services."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.models import ALL, Holder
from yunion_mps.core.text import printable
from yunion_mps.http.messages import CreatedResource, Request, Response
from yunion_mps.http.openapi import document
from yunion_mps.http.operations import COMMAND_LENGTH, CONTAINER_NAME
from yunion_mps.http.parameters import BadRequestError
from yunion_mps.leases.request import LeaseRequest, QueuedRequest
from yunion_mps.observe.holdings import clients_of_device
from yunion_mps.service.events import EventFilter, LongPolls
from yunion_mps.service.permissions import (
    Caller,
    awaited_container,
    named_holder,
    process_holder,
    refuse_unprivileged,
)
from yunion_mps.service.queries import Filters
from yunion_mps.service.services import Services
from yunion_mps.service.terminate import SIGNALS

if TYPE_CHECKING:
    from yunion_mps import answers

_TEXT = "text/plain; charset=utf-8"


class RequestedHolder(TypedDict):
    """The members of `HOLDER` in http/operations; None for those that were not given."""

    kind: str | None
    pid: int | None
    command: str | None
    name: str | None
    ttl_s: int | None
    uid: int | None


class Handlers:
    """A method for each operation; it raises the YunionError of its use case, which the router answers."""

    def __init__(self, services: Services, metrics: Callable[[str], Awaitable[tuple[str, bytes]]]) -> None:
        """`metrics` returns the content type and the text for an Accept header."""
        self._services = services
        self._metrics = metrics

    @property
    def changes(self) -> LongPolls:
        """The requests that wait for a cached answer to change."""
        return self._services.queries.changes

    @property
    def version(self) -> int:
        """Changes when a cached answer may change."""
        return self._services.queries.version

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
    ) -> answers.DeviceListJson:
        filters = Filters(
            dev_type=dev_type,
            model=model,
            addr=addr,
            device_path=device_path,
            vendor_device_id=vendor_device_id,
            numa_node=numa_node,
            unused=unused,
        )
        return self._services.queries.devices(filters, limit, offset)

    def get_device(self, _: Request, *, id: str) -> answers.DeviceDetailsJson:  # noqa: A002 - it is the parameter's name
        return self._services.queries.device(id)

    async def get_gpus(self, _: Request) -> answers.GpuListJson:
        """Return the GPUs; not cached, because each poll changes them."""
        return self._services.queries.gpus()

    def get_pools(self, _: Request) -> answers.PoolListJson:
        return self._services.queries.pools()

    async def get_status(self, _: Request) -> answers.StatusJson:
        return await self._services.status.status()

    async def get_health(self, _: Request) -> Response:
        return Response(200, _TEXT, b"ok\n")

    async def get_readiness(self, _: Request) -> Response:
        reasons = self._services.queries.not_ready_reasons()
        text = "".join(f"{line}\n" for line in reasons or ["ok"])
        return Response(503 if reasons else 200, _TEXT, text.encode(errors="backslashreplace"))

    def get_document(self, _: Request) -> Mapping[str, object]:
        return document()

    async def get_metrics(self, request: Request) -> Response:
        content_type, text = await self._metrics(request.headers.get("accept", ""))
        return Response(200, content_type, text)

    async def get_events(
        self,
        request: Request,
        *,
        after: int | None,
        before: int | None,
        since: float,
        limit: int,
        kind: str | None,
        severe_first: bool,
        wait_s: int,
    ) -> answers.EventListJson:
        """Return the matching events; if there are none, the first that are recorded within `wait_s`."""
        if wait_s:
            request.await_event()
        event_filter = EventFilter(
            after=after,
            since_s=since,
            limit=limit,
            kind=kind or "",
            before=before,
            severe_first=severe_first,
        )
        return await self._services.events.wait(event_filter, wait_s)

    async def get_usage(self, _: Request, *, gpu: str | None, devices: bool) -> answers.UsageJson:
        """Return the usage; not cached, because it depends on the time."""
        now_s = asyncio.get_running_loop().time()
        return self._services.queries.usage.last_hour(now_s, time.time(), gpu, devices=devices)

    async def get_plan(self, _: Request) -> answers.ChangeListJson:
        return await self._services.reloader.plan()

    async def reload(
        self, _: Request, *, mode: str | None, confirmation: str | None
    ) -> answers.ChangeListJson:
        return await self._services.reloader.reload(
            drain=mode == "drain", now=mode == "now", confirmation=confirmation or ""
        )

    async def reexec(self, _: Request) -> answers.ReexecJson:
        return await self._services.reloader.reexec()

    async def get_clients(self, _: Request, *, seen: bool) -> answers.ClientListJson:
        return await self._services.clients.clients(seen=seen)

    async def terminate_client(
        self, request: Request, *, pid: int, signals: str, started: str
    ) -> answers.TerminationJson:
        terminator = self._services.terminator
        return await terminator.terminate_client(pid, request.uid, started=started, signals=SIGNALS[signals])

    async def terminate_lease(
        self, request: Request, *, lease: str, signals: str
    ) -> answers.TerminationListJson:
        terminations = await self._services.lease_terminator.terminate(
            lease, _caller(request).owner, SIGNALS[signals]
        )
        return _list(terminations)

    async def terminate_device(
        self,
        request: Request,
        *,
        id: str,  # noqa: A002 - it is the parameter's name
        signals: str,
    ) -> answers.TerminationListJson:
        address = self._services.queries.device(id)["addr"]
        sequence = SIGNALS[signals]
        is_careful = bool(sequence) and signal.SIGKILL not in sequence
        terminations = await self._services.terminator.terminate_all(
            partial(clients_of_device, address),
            request.uid,
            signals=sequence,
            all_known_on=(gpu_of(address),) if is_careful else (),
        )
        return _list(terminations)

    async def get_leases(self, _: Request) -> answers.LeaseListJson:
        return await self._services.status.leases()

    async def get_lease(self, request: Request, *, lease: str) -> answers.LeaseDetailsJson:
        return await self._services.status.lease(lease, _caller(request).owner)

    async def take_lease(
        self,
        request: Request,
        *,
        count: int,
        across: bool,
        memory_mib: int | None,
        memory_units: int | None,
        thread_percentage: int | None,
        devices: Sequence[str] | None,
        gpu: str | None,
        placement: str,
        allow_unlimited: bool,
        reserved_for: str | None,
        wait_s: int,
        cdi: bool,
        dry_run: bool,
        holder: RequestedHolder,
        idempotency_key: str | None,
    ) -> answers.LeaseRecordJson | CreatedResource:
        """Lease devices, or show what would be leased.

        Parameters that exclude or require one another are checked here; each by itself is checked already.
        Raises BadRequestError, NotAllowedError, and the errors of the use case.
        """
        if memory_mib is not None and memory_units is not None:
            raise BadRequestError("memory_mib and memory_units are mutually exclusive", "use one of them")
        if devices and (count > 1 or memory_mib is not None or memory_units is not None):
            raise BadRequestError("devices cannot be combined with count or memory", "omit one of them")
        if thread_percentage is not None and memory_mib is None and memory_units is None:
            message = "thread_percentage requires memory_mib or memory_units"
            raise BadRequestError(message, "add one of them, or omit thread_percentage")
        if across and count == 1:
            raise BadRequestError("across requires several devices, but count is 1", "set count to 2 or more")
        mib = (memory_mib or 0) + (memory_units or 0) * self._services.leases.memory_unit_mib
        if reserved_for:
            refuse_unprivileged(request.uid, f"request devices that are reserved for {reserved_for}")
        requested = LeaseRequest(
            number=count,
            devices=tuple(devices or ()),
            gpu=gpu or "",
            across=across,
            placement=placement,
            memory_mib=mib,
            allow_unlimited=allow_unlimited,
            reserved_for=reserved_for or "",
            thread_percentage=thread_percentage or 0,
        )
        holder_of_lease = _with_user(_holder(request, holder), holder["uid"], request.uid)
        queued = QueuedRequest(requested, holder_of_lease, idempotency_key or "", cdi)
        if dry_run:
            return await self._services.leases.preview(queued)
        lease, is_new = await self._services.leases.take(queued, request.keep_open, wait_s)
        return CreatedResource(lease, f"/v1/leases/{lease['id']}") if is_new else lease

    async def end_lease(self, request: Request, *, lease: str, terminate: bool) -> answers.LeaseRecordJson:
        if terminate:
            return await self._services.lease_terminator.release(lease, _caller(request).owner)
        return self._services.leases.release(lease, _caller(request).owner)

    async def renew_lease(self, request: Request, *, lease: str) -> answers.LeaseRecordJson:
        return self._services.leases.renew(lease, _caller(request).owner)

    async def bind_lease(self, request: Request, *, lease: str, pid: int | None) -> answers.LeaseRecordJson:
        caller = _caller(request)
        holder = process_holder(caller, "container", request.pid if pid is None else pid)
        return await self._services.leases.bind(lease, caller.owner, holder)


def _list(terminations: list[answers.TerminationJson]) -> answers.TerminationListJson:
    return {"terminations": terminations, "total": len(terminations)}


def _caller(request: Request) -> Caller:
    return Caller(request.uid, request.pid, request.unit)


def _with_user(holder: Holder, uid: int | None, caller_uid: int) -> Holder:
    """Return the holder with the user whose processes will use the devices, if root has named one."""
    if uid is None:
        return holder
    if holder.binding not in ("name", "container"):
        raise BadRequestError("holder.uid requires kind name or container", "omit one of them")
    if uid != caller_uid:
        refuse_unprivileged(caller_uid, "take a lease for another user's processes")
    return holder._replace(job_uid=uid)


def _holder(request: Request, members: RequestedHolder) -> Holder:
    """Return the holder that the members name; raises BadRequestError, NotFoundError, NotAllowedError."""
    kind = members["kind"]
    pid = members["pid"]
    command = members["command"]
    name = members["name"]
    ttl_s = members["ttl_s"]
    if kind is None and name:
        kind = "name"
    if kind == "name":
        return _named_holder(request, members)
    if ttl_s is not None:
        raise BadRequestError("holder.ttl_s requires kind name", "omit one of them")
    if name is not None:
        if kind != "container" or pid is not None or command is not None:
            message = "holder.name requires kind name, or container without pid and command"
            raise BadRequestError(message, "omit one of them")
        if name == ALL or not re.fullmatch(CONTAINER_NAME, name):
            message = f"holder.name: {name} cannot be the name of a CDI device of a container"
            raise BadRequestError(message, "write lower-case letters, digits and - inside, at most 32")
        return awaited_container(_caller(request), name)
    if kind == "connection" and pid not in (None, request.pid):
        raise BadRequestError("holder.pid requires kind process or container", "omit one of them")
    holder = process_holder(_caller(request), kind or "process", request.pid if pid is None else pid)
    return holder._replace(command=printable((command or "")[:COMMAND_LENGTH]))


def _named_holder(request: Request, members: RequestedHolder) -> Holder:
    name = members["name"]
    ttl_s = members["ttl_s"]
    if not name or ttl_s is None:
        message = "a holder of kind name requires both name and ttl_s"
        raise BadRequestError(message, 'write "holder": {"name": "job-17", "ttl_s": 600}')
    for member, value in (("pid", members["pid"]), ("command", members["command"])):
        if value is not None:
            raise BadRequestError(f"holder.{member} does not apply to kind name", "omit one of them")
    return named_holder(_caller(request), name, ttl_s)
