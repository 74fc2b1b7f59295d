"""The asyncio client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from datetime import datetime, timedelta
from typing import Any

from yunion_mps.client.blocking import ClientQueries, ignore_message
from yunion_mps.client.lease import AsyncLease, LeaseArguments, acquire, lease_request
from yunion_mps.client.transport import OnMessage
from yunion_mps.client.values import Device, DeviceDetails, Event, Gpu, LeaseDetails, QueuedRequest, Status
from yunion_mps.http.client import AsyncDaemonClient, DaemonClient
from yunion_mps.paths import Paths


class AsyncClient:
    """The same methods as Client, as coroutines. It is not bound to an event loop."""

    def __init__(self, on_message: OnMessage = ignore_message) -> None:
        """`on_message` is called with a line of text when a request starts or stops waiting."""
        self._transport = AsyncDaemonClient(Paths.from_environment())
        self._on_message = on_message
        self._queries = ClientQueries(self._transport, on_message)

    async def devices(self, *, unused: bool = False) -> list[Device]:
        return await self._queries.devices(unused=unused)

    def watch_devices(self) -> AsyncIterator[list[Device]]:
        return self._queries.watch_devices()

    async def device(self, name: str) -> DeviceDetails:
        return await self._queries.device(name)

    async def gpus(self) -> list[Gpu]:
        return await self._queries.gpus()

    async def status(self) -> Status:
        return await self._queries.status()

    async def leases(self) -> list[LeaseDetails]:
        return await self._queries.leases()

    async def queue(self) -> list[QueuedRequest]:
        return await self._queries.queue()

    def events(
        self,
        *,
        since: datetime | timedelta | None = None,
        kind: str | None = None,
        follow: bool = False,
    ) -> AsyncIterator[Event]:
        return self._queries.events(since, kind, follow=follow)

    def lease(
        self,
        *,
        memory: str | None = None,
        count: int = 1,
        across: bool = False,
        devices: Sequence[str] = (),
        gpu: str | None = None,
        placement: str = "binpack",
        allow_unlimited: bool = False,
        wait_s: float = 0,
        name: str | None = None,
        ttl_s: int | None = None,
    ) -> LeaseContextManager:
        """Take devices as `Client.lease` does: await the result, or use it in `async with`.

        If the task is cancelled while it waits, the request leaves the queue and no lease is held.
        """
        request = lease_request(
            memory=memory, count=count, across=across, devices=devices, gpu=gpu, placement=placement,
            allow_unlimited=allow_unlimited, wait_s=wait_s, name=name, ttl_s=ttl_s,
        )  # fmt: skip
        return LeaseContextManager(self._transport, request, self._on_message)


class LeaseContextManager:
    """Takes the lease when it is awaited or entered with `async with`."""

    def __init__(self, transport: AsyncDaemonClient, request: LeaseArguments, on_message: OnMessage) -> None:
        self._transport = transport
        self._request = request
        self._on_message = on_message
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        daemon = DaemonClient(Paths.from_environment())
        return acquire(AsyncLease, self._transport, daemon, self._request, self._on_message).__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self
        return self._lease

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._lease:
            await self._lease.__aexit__(kind, error, traceback)
