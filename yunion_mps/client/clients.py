"""The blocking and the asyncio client, whose queries are written once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from yunion_mps.client.lease import AsyncHeldLease, HeldLease, LeaseArguments, LeaseMethod, acquire
from yunion_mps.client.values import (
    DeviceDetails,
    DeviceInfo,
    EventInfo,
    GpuInfo,
    LeaseDetails,
    PoolInfo,
    QueuedRequestInfo,
    Status,
)
from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import INVALID_REQUEST
from yunion_mps.core.units import rfc3339
from yunion_mps.http.client import AsyncDaemonClient, DaemonClient
from yunion_mps.http.operations import (
    GET_DEVICE,
    GET_DEVICES,
    GET_EVENTS,
    GET_GPUS,
    GET_LEASES,
    GET_POOLS,
    GET_STATUS,
    MAX_EVENTS,
)
from yunion_mps.http.parameters import LATEST_S
from yunion_mps.http.transport import (
    BlockingTransport,
    OnMessage,
    Transport,
    follow_events,
    iterate_blocking,
    run_blocking,
    watch,
)


class ClientQueries:
    """The queries of both clients, written once as coroutines; each raises YunionError."""

    def __init__(self, transport: Transport, on_message: OnMessage) -> None:
        self._call = transport.call
        self._transport = transport
        self._on_message = on_message

    async def devices(self, *, unused: bool = False) -> list[DeviceInfo]:
        answer = await self._call(GET_DEVICES, limit=0, unused=unused)
        devices = [DeviceInfo.of(device) for device in answer["isolated_devices"]]
        return [device for device in devices if device.free] if unused else devices

    async def watch_devices(self) -> AsyncGenerator[list[DeviceInfo], None]:
        async for answer in watch(self._transport, GET_DEVICES, self._on_message, limit=0):
            yield [DeviceInfo.of(device) for device in answer["isolated_devices"]]

    async def device(self, name: str) -> DeviceDetails:
        answer = await self._call(GET_DEVICE, id=name)
        return DeviceDetails.of(answer)

    async def gpus(self) -> list[GpuInfo]:
        answer = await self._call(GET_GPUS)
        return [GpuInfo.of(gpu) for gpu in answer["gpus"]]

    async def pools(self) -> list[PoolInfo]:
        answer = await self._call(GET_POOLS)
        return [PoolInfo.of(pool) for pool in answer["pools"]]

    async def status(self) -> Status:
        return Status.of(await self._call(GET_STATUS))

    async def leases(self) -> list[LeaseDetails]:
        answer = await self._call(GET_LEASES)
        return [LeaseDetails.of(lease) for lease in answer["leases"]]

    async def queue(self) -> list[QueuedRequestInfo]:
        answer = await self._call(GET_LEASES)
        return [QueuedRequestInfo.of(queued) for queued in answer["waiting"]]

    async def events(
        self, *, since: datetime | timedelta | None = None, kind: str | None = None, follow: bool = False
    ) -> AsyncGenerator[EventInfo, None]:
        first = format_since(since)
        answer = await self._call(GET_EVENTS, limit=MAX_EVENTS, since=first, kind=kind)
        for event in answer["events"]:
            yield EventInfo.of(event)
        if follow:
            async for new in follow_events(self._transport, answer["last"], kind, self._on_message):
                for event in new:
                    yield EventInfo.of(event)


def format_since(since: datetime | timedelta | None) -> str | None:
    """Return the start time of a query for events, as the API takes it.

    Raises YunionError if it is not a time with a time zone.
    """
    if since is None:
        return None
    moment = datetime.now(timezone.utc) - since if isinstance(since, timedelta) else since
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        message = f"since: {since!r} is not a time with a time zone"
        hint = "write datetime.now(timezone.utc), or a timedelta that is subtracted from now"
        raise YunionError(message, hint, INVALID_REQUEST)
    return rfc3339(min(max(0.0, moment.timestamp()), LATEST_S))


def ignore_message(text: str) -> None:
    """Do nothing: the default of `on_message`."""


class Client(LeaseMethod[HeldLease]):
    """A client of this host's daemon. It is thread-safe, and keeps no connection open.

    Every method raises YunionError if the daemon cannot answer.
    """

    def __init__(self, on_message: OnMessage = ignore_message) -> None:
        """`on_message` is called with a line of text when a request starts or stops waiting."""
        self._daemon = DaemonClient(Paths.from_environment())
        self._transport = BlockingTransport(self._daemon)
        self._on_message = on_message
        self._queries = ClientQueries(self._transport, on_message)

    def devices(self, *, unused: bool = False) -> list[DeviceInfo]:
        """Return all devices in PCI order, or those that can be used now and are free."""
        return run_blocking(self._queries.devices(unused=unused))

    def watch_devices(self) -> Iterator[list[DeviceInfo]]:
        """Yield all devices now and whenever one of them changes, across restarts of the daemon.

        Raises UnreachableError if the daemon stays unreachable.
        """
        return iterate_blocking(self._queries.watch_devices())

    def device(self, name: str) -> DeviceDetails:
        """Return one device by id, address or a unique prefix of either; raises NotFoundError."""
        return run_blocking(self._queries.device(name))

    def gpus(self) -> list[GpuInfo]:
        """Return all GPUs of the host in PCI order; an unusable one has a reason."""
        return run_blocking(self._queries.gpus())

    def pools(self) -> list[PoolInfo]:
        """Return the GPUs whose memory is leased in units, in PCI order; an unusable one has a reason."""
        return run_blocking(self._queries.pools())

    def status(self) -> Status:
        """Return the state of the daemon, the control daemons and the devices."""
        return run_blocking(self._queries.status())

    def leases(self) -> list[LeaseDetails]:
        """Return all leases of the host."""
        return run_blocking(self._queries.leases())

    def queue(self) -> list[QueuedRequestInfo]:
        """Return the queued requests, in the order in which they are served."""
        return run_blocking(self._queries.queue())

    def events(
        self, *, since: datetime | timedelta | None = None, kind: str | None = None, follow: bool = False
    ) -> Iterator[EventInfo]:
        """Yield the events since a time or within the last timedelta, oldest first: at most the newest 1000.

        `kind` selects those of one kind, such as `lease`. With `follow` it continues with new events,
        across restarts of the daemon; raises UnreachableError if the daemon stays unreachable.
        """
        return iterate_blocking(self._queries.events(since=since, kind=kind, follow=follow))

    def _take(self, request: LeaseArguments) -> HeldLease:
        return run_blocking(acquire(HeldLease, self._transport, self._daemon, request, self._on_message))


class AsyncClient(ClientQueries, LeaseMethod["LeaseContextManager"]):
    """The same methods as Client, as coroutines. It is not bound to an event loop."""

    def __init__(self, on_message: OnMessage = ignore_message) -> None:
        """`on_message` is called with a line of text when a request starts or stops waiting."""
        super().__init__(AsyncDaemonClient(Paths.from_environment()), on_message)

    def _take(self, request: LeaseArguments) -> LeaseContextManager:
        return LeaseContextManager(self._transport, request, self._on_message)


class LeaseContextManager:
    """Takes the lease when it is awaited or entered with `async with`."""

    def __init__(self, transport: Transport, request: LeaseArguments, on_message: OnMessage) -> None:
        self._transport = transport
        self._request = request
        self._on_message = on_message
        self._lease: AsyncHeldLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncHeldLease]:
        daemon = DaemonClient(Paths.from_environment())
        return acquire(AsyncHeldLease, self._transport, daemon, self._request, self._on_message).__await__()

    async def __aenter__(self) -> AsyncHeldLease:
        self._lease = await self
        return self._lease

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._lease:
            await self._lease.__aexit__(kind, error, traceback)
