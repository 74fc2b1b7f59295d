"""The gateway's requests to the daemon, and its cache of the page's overview."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from yunion_mps.core.errors import NotAllowedError, UnreachableError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.units import rfc3339
from yunion_mps.http.client import Exchange, result_of, send_to
from yunion_mps.http.messages import Response, encode
from yunion_mps.http.operation import EncodedRequest, Operation
from yunion_mps.http.operations import GET_CLIENTS, GET_DEVICES, GET_EVENTS, GET_GPUS, GET_LEASES, GET_STATUS
from yunion_mps.http.parameters import Value
from yunion_mps.views.overview import HostAnswers, HostOverview, page

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson


T = TypeVar("T")

#: How long a cached overview is fresh.
_MAX_AGE_S = 1.0
#: The shortest time between two overviews.
_MIN_INTERVAL_S = 0.1
#: How often devices are queried without an event.
_DEVICES_MAX_AGE_S = 30.0


async def get_from_daemon(
    paths: Paths, target: str, accept: str = "*/*", timeout_s: float = 10.0
) -> Response:
    """Return the daemon's answer to a GET, of any status; raises UnreachableError if there is none.

    target: the path with its query
    accept: the value of the header Accept
    """
    try:
        exchange = Exchange("GET", EncodedRequest(target), accept or "*/*")
        return await asyncio.wait_for(send_to(paths.socket, exchange), timeout_s)
    except asyncio.TimeoutError:
        message = f"the daemon did not answer within {timeout_s:g} s"
    except NotAllowedError:
        message = "the gateway's user has no access to the daemon's socket"
        raise UnreachableError(message, "run it as root or as a member of the group yunion-mps") from None
    except UnreachableError:
        message = "the daemon is not running"
    raise UnreachableError(message, "see: systemctl status yunion-mps-daemon")


class Overview(NamedTuple):
    """The contents of the web page at a time."""

    #: Changes with the contents.
    mark: str
    #: When the daemon was queried (RFC 3339).
    taken: str
    contents: Mapping[str, object]


#: How long each answer of the daemon may take, in s.
_ANSWER_S = 10.0


class OverviewCache:
    """Caches the page's overview for all clients; devices are queried again only after an event."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        #: None if the last query failed.
        self._overview: Overview | None = None
        self._begun_s = 0.0
        self._taken_s = 0.0
        self._last_event = 0
        self._query: asyncio.Task[None] | None = None
        self._devices_key: tuple[object, ...] = ()
        self._listed_s = 0.0
        self._devices: list[DeviceJson] = []

    def current(self, event: int, arrived_s: float = math.inf) -> Overview | None:
        """Return the cached overview, if it is current for a client that arrived then, by default now.

        An overview from before the `event` (an id) is not current, unless it was queried after the client
        arrived: otherwise a client that names a future event would never get one.
        """
        is_fresh = time.monotonic() <= self._taken_s + _MAX_AGE_S and event <= self._last_event
        return self._overview if is_fresh or self._begun_s >= arrived_s else None

    async def overview(self, event: int = 0) -> Overview:
        """Return the current overview; raises UnreachableError.

        One query serves, or fails for, all clients that wait for it; it continues if one of them leaves.
        """
        arrived_s = time.monotonic()
        while True:
            overview = self.current(event, arrived_s)
            if overview is not None:
                return overview
            if self._query is None or self._query.done():
                self._query = asyncio.ensure_future(self._refresh())
            await asyncio.shield(self._query)

    async def _refresh(self) -> None:
        await asyncio.sleep(self._taken_s + _MIN_INTERVAL_S - time.monotonic())
        begun_s = time.monotonic()
        overview = None
        try:
            last: int = (await self._call(GET_EVENTS, limit=1))["last"]
            contents = page(HostOverview.of(await self._query_all(last)))
            mark = sha256(encode(contents)).hexdigest()[:16]
            overview = Overview(mark, rfc3339(time.time()), contents)
            self._last_event = last
        finally:
            self._overview = overview
            self._begun_s = begun_s
            self._taken_s = time.monotonic()

    async def _query_all(self, last: int) -> HostAnswers:
        status = await self._call(GET_STATUS)
        leases = await self._call(GET_LEASES)
        devices_key = (last, status["devices"], status["gpus"], status["started"])
        if devices_key != self._devices_key or time.monotonic() - self._listed_s > _DEVICES_MAX_AGE_S:
            self._devices = (await self._call(GET_DEVICES, limit=0))["isolated_devices"]
            self._devices_key = devices_key
            self._listed_s = time.monotonic()
        gpus = (await self._call(GET_GPUS))["gpus"]
        clients = await self._call(GET_CLIENTS, seen=True)
        return HostAnswers(
            status=status,
            gpus=gpus,
            devices=self._devices,
            leases=leases["leases"],
            waiting=leases["waiting"],
            clients=clients,
        )

    async def _call(self, operation: Operation[T], **arguments: Value) -> T:
        target = operation.encode(arguments).target
        answer = await get_from_daemon(self._paths, target, timeout_s=_ANSWER_S)
        try:
            result: T = result_of(answer)
        except YunionError as error:
            raise UnreachableError(error.message, error.hint) from None
        return result
