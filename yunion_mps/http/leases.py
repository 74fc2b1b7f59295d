"""The paths of leases: who has which device, and taking, renewing and giving back one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from yunion_mps.errors import NotAllowedError, NotFoundError
from yunion_mps.escaping import printable
from yunion_mps.host.proc import job_unit_of, started_ticks, uid_of
from yunion_mps.http.query import (
    BadRequestError,
    ContradictionError,
    Request,
    boolean,
    number,
    refuse_unknown,
)
from yunion_mps.leases.bounds import (
    COMMAND_LENGTH,
    LONGEST_TTL_S,
    LONGEST_WAIT_S,
    MOST_DEVICES,
    MOST_MIB,
    NAME,
    REQUEST,
)
from yunion_mps.leases.request import BINPACK, SPREAD, LeaseRequest
from yunion_mps.models import Holder, Owner

Json = dict[str, Any]
Query = Mapping[str, str]

#: A PID has seven digits at most (PID_MAX_LIMIT of the kernel's include/linux/threads.h).
_LARGEST_PID = 9_999_999
PLACEMENTS = (BINPACK, SPREAD)
BINDINGS = ("process", "connection", "name", "container")
#: The parameters of a request for devices.
PARAMETERS = {
    "count", "memory", "units", "device", "gpu", "across", "placement",
    "enforced", "binding", "pid", "command", "name", "ttl", "wait", "request", "dry", "cdi",
}  # fmt: skip


class Giver(Protocol):
    """Who gives devices; each raises YunionError where it is refused."""

    @property
    def memory_unit_mib(self) -> int:
        """What a unit of memory is in requests."""

    def leases(self) -> Json:
        """All leases, and those who wait."""

    async def take(
        self,
        request: LeaseRequest,
        holder: Holder,
        keep: Callable[[Callable[[], None]], None],
        wait_s: float,
        idempotency_key: str,
        *,
        cdi: bool,
    ) -> Json:
        """A lease for the holder, which may take `wait_s`; the same one for the same key."""

    def would_take(self, request: LeaseRequest, holder: Holder, idempotency_key: str) -> Json:
        """The lease that the holder would get now."""

    def release(self, lease_id: str, caller: Owner) -> Json:
        """The lease that was ended."""

    def renew(self, lease_id: str, caller: Owner) -> Json:
        """The lease that was renewed."""

    def bind(self, lease_id: str, caller: Owner, holder: Holder) -> Json:
        """The lease, which ends with the container now."""


class LeasePaths:
    """Answers /v1/leases and what is below it."""

    def __init__(self, giver: Giver) -> None:
        self._giver = giver

    def find(self, path: str) -> dict[str, Callable[[Request, Query], Coroutine[Any, Any, Json]]] | None:
        """What answers the path, by method; None where it is none of these."""
        if path == "/v1/leases":
            return {"GET": self._list, "HEAD": self._list, "POST": self._take}
        parts = path.split("/")
        if parts[:3] == ["", "v1", "leases"] and len(parts) == 4 and parts[3]:
            return {"DELETE": self._release}
        if parts[:3] == ["", "v1", "leases"] and len(parts) == 5 and parts[3] and parts[4] == "renew":
            return {"POST": self._renew}
        if parts[:3] == ["", "v1", "leases"] and len(parts) == 5 and parts[3] and parts[4] == "bind":
            return {"POST": self._bind}
        return None

    async def _list(self, request: Request, query: Query) -> Json:
        del request
        refuse_unknown(query, set())
        return self._giver.leases()

    async def _take(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, PARAMETERS)
        if request.body_bytes:
            raise BadRequestError(
                "a body is not read here", "write it as parameters: /v1/leases?name=a&ttl=60"
            )
        for name in ("device", "gpu"):
            if query.get(name) == "":
                raise BadRequestError(f"{name} is ''", "leave it out, or name one")
        count = number(query, "count", 1, 1, MOST_DEVICES)
        placement = query.get("placement", BINPACK)
        if placement not in PLACEMENTS:
            raise BadRequestError(
                f"placement is {placement[:100]!r}", f"write one of {', '.join(PLACEMENTS)}"
            )
        across = boolean(query, "across")
        memory_mib = number(query, "memory", 0, 1, MOST_MIB)
        memory_mib += number(query, "units", 0, 1, MOST_MIB) * self._giver.memory_unit_mib
        wanted = LeaseRequest(
            count,
            query.get("device", ""),
            query.get("gpu", ""),
            across,
            placement,
            memory_mib,
            boolean(query, "enforced"),
        )
        if sum((count > 1, bool(wanted.device), "memory" in query, "units" in query)) > 1:
            raise ContradictionError("count, device, memory and units exclude each other", "give one")
        if across and count == 1:
            raise ContradictionError("across wants several devices, and count is 1", "write count=2 or more")
        if boolean(query, "dry"):
            return self._giver.would_take(wanted, _holder(request, query), _request_id(query))
        wait_s = number(query, "wait", 0, 0, LONGEST_WAIT_S)
        holder = _holder(request, query)
        cdi = boolean(query, "cdi")
        return await self._giver.take(wanted, holder, request.keep, wait_s, _request_id(query), cdi=cdi)

    async def _release(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, set())
        return self._giver.release(_id(request), _caller(request))

    async def _renew(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, set())
        return self._giver.renew(_id(request), _caller(request))

    async def _bind(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, {"pid"})
        pid = number(query, "pid", request.pid, 1, _LARGEST_PID)
        holder = _process("container", pid, request)
        return self._giver.bind(_id(request), _caller(request), holder)


def _request_id(query: Query) -> str:
    """What the asker calls its request, empty where it does not; raises BadRequestError."""
    name = query.get("request")
    if name is not None and not re.fullmatch(REQUEST.strip("^$"), name):
        raise BadRequestError(f"request is {name[:100]!r}", "write 16 to 64 letters, digits and -, at random")
    return name or ""


def _id(request: Request) -> str:
    return unquote(urlsplit(request.target).path.split("/")[3])


def _caller(request: Request) -> Owner:
    return Owner(request.uid, job_unit_of(request.pid))


def _holder(request: Request, query: Query) -> Holder:
    binding = query.get("binding", "name" if "name" in query else "process")
    if binding not in BINDINGS:
        raise BadRequestError(f"binding is {binding[:100]!r}", f"write one of {', '.join(BINDINGS)}")
    if binding == "name":
        name = query.get("name", "")
        if not name or "ttl" not in query:
            what = "a lease of a name needs both its name and its time to live"
            raise ContradictionError(what, "write name=job-17&ttl=600, in seconds")
        if not re.fullmatch(NAME.strip("^$"), name):
            hint = "write letters, digits and ._:/@-, a letter or digit first, at most 100"
            raise BadRequestError(f"name is {name[:100]!r}", hint)
        if "command" in query:
            raise ContradictionError("command does not go with binding=name", "leave one of them out")
        ttl_s = number(query, "ttl", 0, 1, LONGEST_TTL_S)
        return Holder("name", request.uid, name=name, ttl_s=ttl_s, unit=job_unit_of(request.pid))
    for parameter in ("name", "ttl"):
        if parameter in query:
            raise ContradictionError(f"{parameter} goes with binding=name only", "leave one of them out")
    pid = number(query, "pid", request.pid, 1, _LARGEST_PID)
    if binding == "connection" and pid != request.pid:
        raise ContradictionError("pid goes with binding=process only")
    command = printable(query.get("command", "")[:COMMAND_LENGTH])
    return _process(binding, pid, request)._replace(command=command)


def _process(binding: str, pid: int, request: Request) -> Holder:
    """A process of the caller's user, or any for root; raises NotFoundError and NotAllowedError.

    What a process has is its owner's, and a container's is the asking engine's: who runs in a container, or
    whom root in it is outside, is no user of the host's.
    """
    started, owner = (started_ticks(pid), uid_of(pid)) if pid else (None, None)
    if started is None or owner is None:
        hint = "a process in another PID namespace cannot be seen from here: take the lease by name and ttl"
        raise NotFoundError(f"there is no process with PID {pid}", hint)
    if request.uid not in (0, os.geteuid(), owner):
        raise NotAllowedError(f"PID {pid} is another user's", "only root may take a lease for it")
    whose = _caller(request) if binding == "container" else Owner(owner, job_unit_of(pid))
    return Holder(binding, whose.uid, pid, started, unit=whose.unit)
