"""The client whose methods are awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from datetime import datetime, timedelta
from typing import Any

from yunion_mps.client.blocking import silent
from yunion_mps.client.lease import AsyncLease, hold
from yunion_mps.client.queries import Questions
from yunion_mps.client.request import LeaseArguments, lease_request
from yunion_mps.client.taking import Say
from yunion_mps.client.values import Device, DeviceDetails, Event, Gpu, LeaseRecord, QueuedRequest, Status
from yunion_mps.http.asynchronous import AsyncDaemonClient
from yunion_mps.http.client import DaemonClient
from yunion_mps.paths import Paths


class AsyncClient:
    """A Client in asyncio: the same methods, which are awaited. It belongs to no event loop."""

    def __init__(self, say: Say = silent) -> None:
        """`say` is given a line for people now and then: what is waited for, and that it has come."""
        self._transport = AsyncDaemonClient(Paths.from_environment())
        self._say = say
        self._ask = Questions(self._transport, say)

    async def devices(self, *, unused: bool = False) -> list[Device]:
        return await self._ask.devices(unused=unused)

    def watch_devices(self) -> AsyncIterator[list[Device]]:
        return self._ask.watch_devices()

    async def device(self, name: str) -> DeviceDetails:
        return await self._ask.device(name)

    async def gpus(self) -> list[Gpu]:
        return await self._ask.gpus()

    async def status(self) -> Status:
        return await self._ask.status()

    async def leases(self) -> list[LeaseRecord]:
        return await self._ask.leases()

    async def queue(self) -> list[QueuedRequest]:
        return await self._ask.queue()

    def events(
        self,
        *,
        since: datetime | timedelta | None = None,
        kind: str | None = None,
        follow: bool = False,
    ) -> AsyncIterator[Event]:
        return self._ask.events(since, kind, goes_on=follow)

    def lease(
        self,
        *,
        memory: str | None = None,
        count: int = 1,
        across: bool = False,
        devices: Sequence[str] = (),
        gpu: str | None = None,
        placement: str = "binpack",
        enforced: bool = True,
        wait_s: float = 0,
        name: str | None = None,
        ttl_s: int | None = None,
    ) -> LeaseTaking:
        """Take devices as `Client.lease` does: await it, or enter it with `async with`.

        If the task is cancelled while it waits, it leaves the queue and has no lease.
        """
        request = lease_request(
            memory=memory, count=count, across=across, devices=devices, gpu=gpu, placement=placement,
            enforced=enforced, wait_s=wait_s, name=name, ttl_s=ttl_s,
        )  # fmt: skip
        return LeaseTaking(self._transport, request, self._say)


class LeaseTaking:
    """A lease that is taken once this is awaited, or entered with `async with`."""

    def __init__(self, transport: AsyncDaemonClient, request: LeaseArguments, say: Say) -> None:
        self._transport = transport
        self._request = request
        self._say = say
        self._lease: AsyncLease | None = None

    def __await__(self) -> Generator[Any, None, AsyncLease]:
        daemon = DaemonClient(Paths.from_environment())
        return hold(AsyncLease, self._transport, daemon, self._request, self._say).__await__()

    async def __aenter__(self) -> AsyncLease:
        self._lease = await self
        return self._lease

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._lease:
            await self._lease.__aexit__(kind, error, traceback)
