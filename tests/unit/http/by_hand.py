"""What the daemon does and knows beyond the snapshot, made by hand, as the snapshots themselves are.

test_openapi.py holds these answers to their schemas, and test_api_contract.py the real daemon's to the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from yunion_mps.errors import NotFoundError, YunionError
from yunion_mps.http.messages import OPENMETRICS
from yunion_mps.http.router import Handlers, Router
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import Holder, Owner
from yunion_mps.service.clients import ClientService
from yunion_mps.service.events import EventFilter, Events
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.queries import Queries
from yunion_mps.service.reload import Reloader

Json = Any

NOTHING: Json = {"changes": [], "pending": []}
AT_ONCE: Json = {
    "kind": "setting",
    "subject": "cuda_mps_stop_timeout_s",
    "before": "10",
    "after": "20",
    "effect": "at once",
}
LATE: Json = {
    "kind": "budget",
    "subject": "00:06.0",
    "before": "4 x 5760 MiB, 25 %",
    "after": "2 x 11520 MiB, 50 %",
    "effect": "when its MPS server (PID 4250) has ended",
}
WAITS = "other limits take effect when its MPS server (PID 4250) has ended"
PLANNED: Json = {"changes": [AT_ONCE, LATE], "pending": []}
RELOADED: Json = {
    "changes": [AT_ONCE, LATE],
    "pending": [{"domain": "host", "pending": WAITS, "leases": []}],
}

SERVER: Json = {
    "pid": 4250,
    "uid": 1000,
    "user": "alice",
    "command": "nvidia-cuda-mps-server",
    "started": 1788000000.25,
    "domain": "host",
    "state": "ACTIVE",
}
CLIENT: Json = {
    "pid": 4260,
    "uid": 1000,
    "user": "alice",
    "command": "python train.py",
    "started": 1788000060.5,
    "container": None,
    "container_id": None,
    "mps": True,
    "server": 4250,
    "domain": "host",
    "device": "00:06.0-1",
    "gpus": ["00:06.0"],
    "memory_by_gpu": [512],
    "memory_used": 512,
}
#: All but the PID of a process that ended while it was looked at.
GONE: Json = {
    **CLIENT,
    "pid": 4261,
    "uid": None,
    "user": None,
    "command": None,
    "started": None,
    "mps": None,
    "server": None,
    "device": None,
    "gpus": [],
    "memory_by_gpu": [],
    "memory_used": None,
}


#: It is another user's, and waits for the server.
WAITING: Json = {
    "pid": 4262,
    "uid": 1001,
    "user": "bob",
    "command": "python eval.py",
    "started": 1788000009.5,
    "since": 1788000010.0,
    "server": 4250,
    "server_user": "alice",
    "domain": "host",
}


def clients(
    *found: Json,
    servers: tuple[Json, ...] = (SERVER,),
    waiting: tuple[Json, ...] = (),
    troubles: tuple[str, ...] = (),
) -> Json:
    """The answer with these clients."""
    return {
        "servers": list(servers),
        "clients": list(found),
        "waiting": list(waiting),
        "troubles": list(troubles),
        "total": len(found),
    }


LEASE: Json = {
    "id": "7c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44",
    "devices": ["00:06.0-1"],
    "gpus": ["00:06.0"],
    "memory": [5760],
    "thread_percentage": 25,
    "budget_enforced": True,
    "unenforced_gpus": [],
    "binding": "process",
    "pid": 4260,
    "uid": 1000,
    "user": "alice",
    "command": "python train.py",
    "container": None,
    "container_id": None,
    "name": None,
    "since": 1788000060.5,
    "expires": None,
    "cdi": None,
    "environment": {"CUDA_VISIBLE_DEVICES": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"},
}
WAITER: Json = {
    "pid": 4300,
    "uid": 1001,
    "user": "bob",
    "command": "yunion-mps run",
    "container": None,
    "container_id": None,
    "name": None,
    "since": 1788000090.5,
    "wants": "2 devices on one GPU",
}


class _ByHand:
    """Answers once `gate` is open; raises `error` where there is one; `asked`, `over` and `done` say what it
    was asked, is through with, and did."""

    def __init__(self) -> None:
        self.error: YunionError | Exception | None = None
        self.asked: list[str] = []
        self.over: list[str] = []
        self.done: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    async def _pass(self, what: str) -> None:
        self.asked.append(what)
        if not self.gate.is_set():
            await asyncio.to_thread(self.gate.wait)
        self.over.append(what)
        if self.error:
            raise self.error
        self.done.append(what)


class FakeReloader(_ByHand, Reloader):
    """A configuration whose change is given by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = NOTHING
        self.reloaded = NOTHING

    async def plan(self) -> Any:
        await self._pass("plan")
        return self.planned

    async def reload(self, requester: str = "", *, drain: bool = False, now: bool = False) -> Any:
        await self._pass("reload" + (" drain" if drain else "") + (" now" if now else ""))
        return self.reloaded

    async def reexec(self) -> Any:
        await self._pass("reexec")
        return {"pid": 4200}


class FakeClients(_ByHand, ClientService):
    """Clients given by hand; one that is terminated is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.found = clients(CLIENT)
        #: Why the client that is to be terminated is not.
        self.refusal: YunionError | None = None
        self.ended = True
        self.how = "its MPS server let go of it; ended by SIGTERM"

    async def clients(self, *, seen: bool = False) -> Any:
        await self._pass("clients")
        return self.found

    async def terminate(self, pid: int, uid: int, *, force: bool) -> Any:
        await self._pass(f"terminate {pid} for {uid}" + (" force" if force else ""))
        if not any(client["pid"] == pid for client in (*self.found["clients"], *self.found["waiting"])):
            raise NotFoundError(f"PID {pid} is no client of MPS", "list the clients with: yunion-mps clients")
        if self.refusal:
            raise self.refusal
        return {"pid": pid, "ended": self.ended, "how": self.how}


class NoEvents(Events):
    """An event log without events."""

    def __init__(self) -> None:
        pass

    async def wait(self, wanted: EventFilter, wait_s: float) -> Any:
        return {"events": [], "last": 0}


async def metrics(accept: str) -> tuple[str, bytes]:
    """Metrics given by hand: one, in the format that was asked for."""
    return OPENMETRICS if OPENMETRICS in accept else "text/plain", b"yunion_mps_up 1\n"


class FakeLeases(_ByHand, LeaseService):
    """Leases given by hand: every request gets the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Json = {"leases": [LEASE], "waiting": [WAITER], "total": 1}
        self.given: Json = LEASE
        self.refusal: YunionError | None = None
        self.as_device = False
        self.requested: list[tuple[LeaseRequest, Holder, float]] = []

    @property
    def memory_unit_mib(self) -> int:
        return 1024

    def leases(self) -> Any:
        return self.found

    async def take(
        self,
        request: LeaseRequest,
        holder: Holder,
        on_disconnect: Callable[[Callable[[], None]], None],
        wait_s: float,
        idempotency_key: str = "",
        *,
        cdi: bool = False,
    ) -> Any:
        await self._pass("take")
        self.requested.append((request, holder, wait_s))
        self.as_device = cdi
        if self.refusal:
            raise self.refusal
        return self.given

    def would_take(self, request: LeaseRequest, holder: Holder, idempotency_key: str = "") -> Any:
        self.requested.append((request, holder, -1))
        if self.refusal:
            raise self.refusal
        return self.given

    def release(self, name: str, caller: Owner) -> Any:
        self.done.append(f"release {name} for {caller.uid}")
        return self.given

    def renew(self, name: str, caller: Owner) -> Any:
        self.done.append(f"renew {name} for {caller.uid}")
        return self.given

    def bind(self, name: str, caller: Owner, holder: Holder) -> Any:
        self.done.append(f"bind {name} for {caller.uid} to {holder.pid}")
        return self.given


def router(service: Queries) -> Router:
    """A router over the service and all these."""
    return Router(Handlers(service, FakeReloader(), FakeClients(), FakeLeases(), NoEvents(), metrics))
