"""The paths of leases: who has which device, and taking, renewing and giving back one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from yunion_mps.api.query import BadRequestError, ContradictionError, Request, boolean, number, refuse_unknown
from yunion_mps.errors import NotAllowedError, NotFoundError
from yunion_mps.leases.ledger import BINPACK, SPREAD, Wish
from yunion_mps.models import Holder
from yunion_mps.process import started_ticks, uid_of

Json = dict[str, Any]
Query = Mapping[str, str]

#: The most devices that one lease may have.
MOST_DEVICES = 64
#: How long one may wait for devices, and how long a lease of a name may live without renewal, in s.
LONGEST_WAIT_S = 30 * 86_400
LONGEST_TTL_S = 365 * 86_400
#: A PID has seven digits at most (PID_MAX_LIMIT of the kernel's include/linux/threads.h).
_LARGEST_PID = 9_999_999
#: More memory than any GPU has.
_MOST_MIB = 1 << 30
PLACEMENTS = (BINPACK, SPREAD)
BINDINGS = ("process", "connection", "name")
NAME = "^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,99}$"
#: What may be said of a wish for devices.
PARAMETERS = {
    "count", "memory", "units", "device", "gpu", "across", "placement",
    "binding", "pid", "name", "ttl", "wait", "since", "dry",
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
        wish: Wish,
        holder: Holder,
        keep: Callable[[Callable[[], None]], None],
        wait_s: float,
        since_s: float | None,
    ) -> Json:
        """A lease for the holder, which may take `wait_s`."""

    def would_take(self, wish: Wish, holder: Holder) -> Json:
        """The lease that the holder would get now."""

    def release(self, lease_id: str, uid: int) -> Json:
        """The lease that was ended."""

    def renew(self, lease_id: str, uid: int) -> Json:
        """The lease that was renewed."""


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
        memory_mib = number(query, "memory", 0, 1, _MOST_MIB)
        memory_mib += number(query, "units", 0, 1, _MOST_MIB) * self._giver.memory_unit_mib
        wish = Wish(count, query.get("device", ""), query.get("gpu", ""), across, placement, memory_mib)
        if sum((count > 1, bool(wish.device), "memory" in query, "units" in query)) > 1:
            raise ContradictionError("count, device, memory and units are different wishes", "give one")
        if boolean(query, "dry"):
            return self._giver.would_take(wish, _holder(request, query))
        wait_s = number(query, "wait", 0, 0, LONGEST_WAIT_S)
        since_s = _moment(query["since"]) if "since" in query else None
        return await self._giver.take(wish, _holder(request, query), request.keep, wait_s, since_s)

    async def _release(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, set())
        return self._giver.release(_id(request), request.uid)

    async def _renew(self, request: Request, query: Query) -> Json:
        refuse_unknown(query, set())
        return self._giver.renew(_id(request), request.uid)


def _moment(text: str) -> float:
    """A moment in s since 1970, down to the microsecond; raises BadRequestError."""
    if not re.fullmatch(r"[0-9]{1,11}(\.[0-9]{1,6})?", text):
        raise BadRequestError(f"since is {text[:100]!r}", "write seconds since 1970, as in 1788000000.25")
    return float(text)


def _id(request: Request) -> str:
    return urlsplit(request.target).path.split("/")[3]


def _holder(request: Request, query: Query) -> Holder:
    binding = query.get("binding", "name" if "name" in query else "process")
    if binding not in BINDINGS:
        raise BadRequestError(f"binding is {binding[:100]!r}", f"write one of {', '.join(BINDINGS)}")
    if binding == "name":
        name = query.get("name", "")
        if not re.fullmatch(NAME.strip("^$"), name) or "ttl" not in query:
            hint = "write name (letters, digits and ._:/@-, at most 100) and ttl, in seconds"
            raise ContradictionError("a lease of a name needs both its name and its time to live", hint)
        return Holder("name", request.uid, name=name, ttl_s=number(query, "ttl", 0, 1, LONGEST_TTL_S))
    for parameter in ("name", "ttl"):
        if parameter in query:
            raise ContradictionError(f"{parameter} goes with binding=name only", "leave one of them out")
    pid = number(query, "pid", request.pid, 1, _LARGEST_PID)
    if binding == "connection" and pid != request.pid:
        raise ContradictionError("pid goes with binding=process only")
    return _process(binding, pid, request.uid)


def _process(binding: str, pid: int, uid: int) -> Holder:
    """A process of the user's, or any for root; raises NotFoundError and NotAllowedError."""
    started, owner = (started_ticks(pid), uid_of(pid)) if pid else (None, None)
    if started is None or owner is None:
        hint = "a process in another PID namespace cannot be seen from here: take the lease by name and ttl"
        raise NotFoundError(f"there is no process with PID {pid}", hint)
    if uid not in (0, os.geteuid(), owner):
        raise NotAllowedError(f"PID {pid} is another user's", "only root may take a lease for it")
    return Holder(binding, owner, pid, started)
