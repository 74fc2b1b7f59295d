"""The answers of the document's examples, and services that give them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from yunion_mps.answers import ClientListJson
from yunion_mps.containers.lookup import Containers
from yunion_mps.core.enums import OPENMETRICS
from yunion_mps.core.errors import NotConfirmedError, YunionError
from yunion_mps.core.models import Holder, Owner
from yunion_mps.core.paths import Paths
from yunion_mps.host.store import Store
from yunion_mps.http.handlers import Handlers
from yunion_mps.http.router import RequestCounter, Router
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import LeaseRequest, QueuedRequest
from yunion_mps.observe.clients import ClientService
from yunion_mps.observe.holdings import NO_CLIENTS
from yunion_mps.service.events import EventFilter, EventService
from yunion_mps.service.lease_terminator import LeaseTerminator
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.queries import Queries
from yunion_mps.service.reload import Reloader
from yunion_mps.service.services import Services
from yunion_mps.service.status import StatusService
from yunion_mps.service.terminate import KILL, TERM, Terminator, find_client, termination_json
from yunion_mps.supervisor.event_log import EventLog, EventRecord

Json = Any

#: An example of each schema, out of the document.
EXAMPLES: Json = {
    name: schema["examples"][0]
    for name, schema in json.loads(files("yunion_mps.http").joinpath("schemas.json").read_text()).items()
}

NO_CHANGES: Json = {
    "changes": [],
    "pending": [],
    "losses": [],
    "clients": [],
    "errors": [],
    "confirmation": "",
}
CHANGE_AT_ONCE: Json = {
    "kind": "setting",
    "subject": "cuda_mps_stop_timeout_s",
    "before": "10",
    "after": "20",
    "effect": "at once",
    "at_once": True,
}
LATE_CHANGE: Json = EXAMPLES["Change"]
PENDING_REASON = EXAMPLES["Pending"]["pending"]
PLANNED: Json = {**NO_CHANGES, "changes": [CHANGE_AT_ONCE, LATE_CHANGE]}
RELOADED: Json = {**PLANNED, "pending": [EXAMPLES["Pending"]]}

SERVER: Json = EXAMPLES["MpsServer"]
CLIENT: Json = {**EXAMPLES["MpsClient"], "started": "2026-08-29T10:41:00.500Z"}
#: All but the PID of a process that ended while it was looked at.
ENDED_CLIENT: Json = {
    **dict.fromkeys(CLIENT),
    "pid": 4261,
    "domain": "host",
    "gpus": [],
    "memory_by_gpu_mib": [],
    "sm_utilization_by_gpu": [],
}
#: It is another user's, and waits for the server.
WAITING_CLIENT: Json = {
    **EXAMPLES["WaitingClient"],
    "started": "2026-08-29T10:40:09.500Z",
    "since": "2026-08-29T10:40:10.000Z",
}


def clients(
    *found: Json,
    servers: tuple[Json, ...] = (SERVER,),
    waiting: tuple[Json, ...] = (),
    errors: tuple[str, ...] = (),
) -> Json:
    return {
        "servers": list(servers),
        "clients": list(found),
        "waiting": list(waiting),
        "errors": list(errors),
        "total": len(found),
    }


LEASE: Json = {
    **EXAMPLES["LeaseRecord"],
    "budget_enforced": True,
    "unenforced_gpus": [],
    "since": "2026-08-29T10:41:00.500Z",
}


def lease_of(memory_mib: Mapping[str, int], use: Sequence[tuple[int | None, int | None]] = ()) -> Json:
    """The fields of a lease of these devices, by address, with each one's peak memory and SM utilization."""
    budgets: Json = []
    for address, (peak_mib, sm) in zip(memory_mib, use or [(None, None)] * len(memory_mib)):
        own = {"addr": address, "gpu": address.rpartition("-")[0], "memory_mib": memory_mib[address]}
        own["thread_percentage"] = 25
        budgets.append({**own, "memory_peak_mib": peak_mib, "sm_utilization": sm})
    gpus = list(dict.fromkeys(one["gpu"] for one in budgets))
    return {"devices": list(memory_mib), "gpus": gpus, "budgets": budgets}


QUEUED_REQUEST: Json = {
    **EXAMPLES["QueuedRequest"],
    "pid": 4300,
    "uid": 1001,
    "user": "bob",
    "command": "yunion-mps run",
    "since": "2026-08-29T10:41:30.500Z",
}


class _Fake:
    """Answers once `gate` is open, and raises `error` if there is one.

    `asked`, `finished` and `done` list what it was asked, what of that has ended, and what it did.
    """

    def __init__(self) -> None:
        self.error: YunionError | Exception | None = None
        self.asked: list[str] = []
        self.finished: list[str] = []
        self.done: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    async def _pass(self, what: str) -> None:
        self.asked.append(what)
        if not self.gate.is_set():
            await asyncio.to_thread(self.gate.wait)
        self.finished.append(what)
        if self.error:
            raise self.error
        self.done.append(what)


MORE_LOST = "nothing was changed, because the reload would also end or remove: PID 4270"


class FakeReloader(_Fake, Reloader):
    """A configuration whose change is given by hand."""

    planned = reloaded = NO_CHANGES
    #: The next plans, before `planned`; each is out of date as soon as it is answered.
    plans: Sequence[Any] = ()

    async def plan(self) -> Any:
        await self._pass("plan")
        if not self.plans:
            return self.planned
        first, *self.plans = self.plans
        return first

    async def reload(
        self, requester: str = "", *, drain: bool = False, now: bool = False, confirmation: str = ""
    ) -> Any:
        await self._pass("reload" + (" drain" if drain else "") + (" now" if now else ""))
        if now and confirmation != self.planned["confirmation"]:
            raise NotConfirmedError(MORE_LOST)
        return self.reloaded

    async def reexec(self, *, requires_driver: bool = False) -> Any:
        await self._pass("reexec")
        return {"pid": 4200}


class FakeClients(_Fake, ClientService, Terminator):
    """Clients given by hand, and how they end."""

    listed = clients(CLIENT)
    #: Why the client that is to be terminated is not.
    refusal: YunionError | None = None
    ended = True
    how = "its MPS server disconnected it; ended by SIGTERM"

    async def clients(self, *, seen: bool = False) -> Any:
        await self._pass("clients")
        return self.listed

    async def terminate_all(self, choose: Any, uid: int, cause: str = "", **more: Any) -> Any:
        """One by one; an error is in the termination_json."""
        found = []
        for client in choose(self.listed):
            try:
                found.append(await self.terminate_client(client["pid"], uid, cause, signals=more["signals"]))
            except YunionError as error:
                found.append(termination_json(client, error.message, ended=False, code=error.code))
        return found

    async def terminate_client(
        self, pid: int, uid: int, cause: str = "", *, started: str = "", signals: Any = TERM
    ) -> Any:
        since = f" since {started}" if started else ""
        await self._pass(f"terminate {pid}{since} for {uid}" + (" force" if signals is KILL else ""))
        client = find_client(self.listed, pid)
        if self.refusal:
            raise self.refusal
        return termination_json(client, self.how, ended=self.ended)


class FakeEvents(EventService):
    """The events of the event log, unless an answer is given by hand."""

    answer: Json = None

    async def wait(self, event_filter: EventFilter, wait_s: float) -> Any:
        return await super().wait(event_filter, wait_s) if self.answer is None else self.answer


async def metrics(accept: str) -> tuple[str, bytes]:
    """Metrics given by hand: one, in the format that was asked for."""
    return OPENMETRICS if OPENMETRICS in accept else "text/plain", b"yunion_mps_up 1\n"


class FakeLeases(_Fake, LeaseService):
    """Leases given by hand: every request gets the same one."""

    listed: Json = {"leases": [LEASE], "waiting": [QUEUED_REQUEST]}
    granted: Json = LEASE
    refusal: YunionError | None = None
    memory_unit_mib = 1024
    is_new = True

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.containers = Containers(Paths("/nowhere"))
        self.requested: list[tuple[LeaseRequest, Holder, float]] = []
        #: Raises what a request is refused with.
        self.check: Callable[[LeaseRequest], object] = lambda _: None

    def leases(self, *, brief: bool = False) -> Any:
        return self.listed["leases"]

    def waiting(self) -> Any:
        return self.listed["waiting"]

    async def take(
        self, queued: QueuedRequest, on_disconnect: Callable[[Callable[[], None]], None], wait_s: float
    ) -> Any:
        await self._pass("take")
        return self._answer(queued, wait_s), self.is_new

    async def preview(self, queued: QueuedRequest) -> Any:
        return self._answer(queued, -1)

    def _answer(self, queued: QueuedRequest, wait_s: float) -> Json:
        self.requested.append((queued.request, queued.holder, wait_s))
        self.check(queued.request)
        if self.refusal:
            raise self.refusal
        return self.granted

    def lease(self, name: str, caller: Owner) -> Any:
        self.done.append(f"lease {name} for {caller.uid}")
        return self.granted

    def release(self, name: str, caller: Owner) -> Any:
        self.done.append(f"release {name} for {caller.uid}")
        return self.granted

    def renew(self, name: str, caller: Owner) -> Any:
        self.done.append(f"renew {name} for {caller.uid}")
        return self.granted

    async def bind(self, name: str, caller: Owner, holder: Holder) -> Any:
        self.done.append(f"bind {name} for {caller.uid} to {holder.pid}")
        return self.granted


class FakeLeaseTerminator(LeaseTerminator):
    def __init__(self, leases: FakeLeases, clients: FakeClients) -> None:
        self._fakes = leases, clients

    async def terminate(self, name: str, caller: Owner, signals: Any) -> Any:
        leases, clients = self._fakes
        return await clients.terminate_lease(leases.lease(name, caller), caller.uid, signals=signals)

    async def release(self, name: str, caller: Owner) -> Any:
        await self.terminate(name, caller, KILL)
        return self._fakes[0].release(name, caller)


def services(
    queries: Queries, reloader: FakeReloader, clients: FakeClients, leases: FakeLeases, events: EventService
) -> Services:
    """What the handlers call; there is no supervisor, and nothing observes processes."""
    absent: Any = None
    status = StatusService(queries, leases, clients)
    lease_terminator: Any = FakeLeaseTerminator(leases, clients)
    terminators = (clients, lease_terminator, absent)
    return Services(
        absent, queries, absent, leases, absent, clients, *terminators, status, events, absent, reloader
    )


class NoEvents(EventLog):
    """An event log without events and without a state file."""

    def __init__(self) -> None:
        super().__init__(_no_state_file, "/nowhere/events")

    def newest(self, *_: Any, **__: Any) -> list[EventRecord]:
        return []

    def after(self, *_: Any) -> list[EventRecord]:
        return []

    def last_id(self) -> int:
        return 0


def _no_state_file() -> Store:
    raise AssertionError("an event log without events needs no state file")


def router(service: Queries) -> Router:
    """A router over the service and all these, and an event log without events."""
    given = services(service, FakeReloader(), FakeClients(), FakeLeases(), EventService(NoEvents()))
    return Router(Handlers(given, metrics), RequestCounter())


def status_of(service: Queries, *leases: Json, clients: ClientListJson = NO_CLIENTS) -> Any:
    """The status of a host with these leases and clients."""
    return services_of_status(service, leases).of(clients)


def services_of_status(
    service: Queries, leases: Sequence[Json], waiting: Sequence[Json] = ()
) -> StatusService:
    """What makes the status of a host with these leases and queued requests."""
    held = FakeLeases()
    held.listed = {"leases": list(leases), "waiting": list(waiting)}
    return StatusService(service, held, FakeClients())
