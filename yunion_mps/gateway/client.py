"""The gateway asks the daemon: one question without keeping others waiting, and the page's overview."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from yunion_mps.errors import NotAllowedError, UnreachableError, YunionError
from yunion_mps.http.asynchronous import answer_on
from yunion_mps.http.client import Exchange, result_of
from yunion_mps.http.messages import Response, encode
from yunion_mps.http.operation import EncodedRequest, Operation
from yunion_mps.http.operations import GET_CLIENTS, GET_DEVICES, GET_EVENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.http.parameters import Value
from yunion_mps.overview.holdings import NO_CLIENTS
from yunion_mps.overview.host import Answers, HostOverview, page
from yunion_mps.paths import Paths
from yunion_mps.units import rfc3339

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device


T = TypeVar("T")
Json = dict[str, Any]

#: An overview is shown to all readers for so long.
_FRESH_S = 1.0
#: The shortest time from one overview to the next.
_REST_S = 0.1
#: What no event tells of devices is asked again after so long.
_STALE_S = 30.0
#: Waking many GPUs takes the driver tens of seconds; the page does without after the first of these.
_CLIENTS_S = 2.0
_CLIENTS_TIMEOUT_S = 150.0


async def ask(paths: Paths, target: str, accept: str = "*/*", timeout_s: float = 10.0) -> Response:
    """The daemon's answer to a GET, whatever its status; raises UnreachableError if there is none."""
    try:
        exchange = Exchange("GET", EncodedRequest(target), accept or "*/*")
        return await asyncio.wait_for(answer_on(paths.socket, exchange), timeout_s)
    except asyncio.TimeoutError:
        what = f"the daemon does not answer within {timeout_s:g} s"
    except NotAllowedError:
        what = "the gateway's user has no access to the daemon's socket"
        raise UnreachableError(what, "run it as root or as a member of the group yunion-mps") from None
    except UnreachableError:
        what = "the daemon is not running"
    raise UnreachableError(what, "see: systemctl status yunion-mps-daemon")


class Overview:
    """The page's picture, once for all readers; devices are asked for again after an event."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._one_at_a_time = asyncio.Lock()
        self._picture: Json = {}
        self._taken_s = 0.0
        self._failure: UnreachableError | None = None
        self._last_event = 0
        self._seen: tuple[Any, ...] = ()
        self._listed_s = 0.0
        self._devices: list[Device] = []
        self._clients = NO_CLIENTS
        self._pending_clients: asyncio.Task[ClientList] | None = None

    async def picture(self, event: int = 0) -> Json:
        """The current picture, with a `mark` that changes when the picture does; raises UnreachableError.

        A picture that was taken before the `event` (its id) is not current, however fresh. A reader that came
        while a daemon that hangs was asked in vain gets that failure, and does not wait as long once more.
        """
        came_s = time.monotonic()
        async with self._one_at_a_time:
            if self._failure and came_s < self._taken_s:
                raise self._failure
            age_s = time.monotonic() - self._taken_s
            if self._failure or age_s > _FRESH_S or event > self._last_event:
                await asyncio.sleep(_REST_S - age_s)  # a reader that asks without end costs no more than this
                try:
                    shown = page(HostOverview.of(await self._ask_all()))
                except UnreachableError as error:
                    self._failure, self._taken_s = error, time.monotonic()
                    raise
                self._failure = None
                mark = sha256(encode(shown)).hexdigest()[:16]
                self._picture = {"mark": mark, "taken": rfc3339(time.time()), **shown}
                self._taken_s = time.monotonic()
            return self._picture

    async def _ask_all(self) -> Answers:
        last = self._last_event = (await self._call(GET_EVENTS, limit=1))["last"]
        status = await self._call(GET_STATUS)
        leases = await self._call(GET_LEASES)
        seen = (last, status["devices"], status["gpus"], status["started"])
        if seen != self._seen or time.monotonic() - self._listed_s > _STALE_S:
            self._devices = (await self._call(GET_DEVICES, limit=0))["isolated_devices"]
            self._seen, self._listed_s = seen, time.monotonic()
        gpus = (await self._call(GET_GPUS))["gpus"]
        errors = await self._ask_clients() if status["domains"] else []
        clients = self._clients if status["domains"] else NO_CLIENTS
        clients = {**clients, "errors": [*clients["errors"], *errors]}
        return Answers(status, gpus, self._devices, leases["leases"], leases["waiting"], clients)

    async def _ask_clients(self) -> Sequence[str]:
        """Ask which processes use the GPUs, as the driver sees it; returns why that is not known."""
        if self._pending_clients is None:
            question = self._call(GET_CLIENTS, _CLIENTS_TIMEOUT_S, seen=True)
            self._pending_clients = asyncio.ensure_future(question)
        await asyncio.wait({self._pending_clients}, timeout=_CLIENTS_S)
        if not self._pending_clients.done():
            return ["the driver is slow to answer, so the list of clients is out of date"]
        answered, self._pending_clients = self._pending_clients, None
        try:
            self._clients = answered.result()
        except UnreachableError as error:
            return [f"cannot list the processes on the GPUs: {error.message}"]
        return []

    async def _call(self, operation: Operation[T], timeout_s: float = 10.0, **arguments: Value) -> T:
        answer = await ask(self._paths, operation.encode(arguments).target, timeout_s=timeout_s)
        try:
            result: T = result_of(answer)
        except YunionError as error:
            raise UnreachableError(error.message, error.hint) from None
        return result
