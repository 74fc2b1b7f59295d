"""`yunion_mps.AsyncClient`, on a whole host: as the Client, and when its tasks are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import pytest
from yunion_mps import AsyncClient, Client
from yunion_mps.client import AsyncLease, Device, Gpu, QueuedRequest, Status

from integration.daemon_host import PATIENCE_S, Daemon
from integration.lease_host import ADDRESSES, given
from simhost import SimHost

pytestmark = pytest.mark.gpus({"kind": "v100"})


@pytest.fixture(autouse=True)
def _root(host: SimHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUNION_MPS_ROOT", str(host.root))


async def until(look: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait until what `look` returns is true."""

    end_s = time.monotonic() + PATIENCE_S
    while not await look():
        assert time.monotonic() < end_s, f"{what} did not come about"
        await asyncio.sleep(0.005)


async def take_all(client: AsyncClient) -> list[AsyncLease]:
    return [await client.lease(devices=[address]) for address in ADDRESSES]


def test_both_clients_answer_the_same(ready_daemon: Daemon) -> None:
    async def answers() -> tuple[list[Device], list[Gpu], Status, list[QueuedRequest]]:
        client = AsyncClient()
        async with client.lease(count=1, name="job-17", ttl_s=60) as lease:
            device = await client.device(lease.devices[0])
            events = [event async for event in client.events(kind="lease")]
            assert [*blocking.events(kind="lease")] == events
            (record,), (same,) = await client.leases(), blocking.leases()
            assert record.id == same.id == lease.id
            assert blocking.device(lease.devices[0]) == device
        return await client.devices(), await client.gpus(), await client.status(), await client.queue()

    blocking = Client()
    devices, gpus, status, queue = asyncio.run(answers())
    assert (devices, len(gpus), status.state, queue) == (blocking.devices(), 1, "ready", [])
    assert given(ready_daemon) == []


def test_a_task_that_is_cancelled_while_it_waits_leaves_the_queue(ready_daemon: Daemon) -> None:
    async def cancelled() -> None:
        client = AsyncClient()
        leases = await take_all(client)
        waiting = asyncio.ensure_future(_held(client))
        await until(client.queue, "that it waits")
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
        await until(lambda: _is_empty(client), "that it does not wait any more")
        for lease in leases:
            await lease.release()

    asyncio.run(cancelled())
    assert given(ready_daemon) == []


async def _held(client: AsyncClient) -> None:
    async with client.lease(wait_s=600):
        await asyncio.sleep(PATIENCE_S)


async def _is_empty(client: AsyncClient) -> bool:
    return not await client.queue()


def test_a_task_that_is_cancelled_in_its_block_releases_the_device(ready_daemon: Daemon) -> None:
    async def cancelled() -> None:
        client = AsyncClient()
        holding = asyncio.ensure_future(_held(client))
        await until(client.leases, "its lease")
        holding.cancel()
        await asyncio.wait({holding})
        assert holding.cancelled()
        assert await client.leases() == []

    asyncio.run(cancelled())


def test_a_task_that_waits_goes_on_past_a_restart_of_the_daemon(ready_daemon: Daemon) -> None:
    async def restarted() -> None:
        said: list[str] = []
        client = AsyncClient(said.append)
        leases = await take_all(client)
        waiting = asyncio.ensure_future(_held(client))
        await until(client.queue, "that it waits")
        await asyncio.to_thread(ready_daemon.kill)
        await asyncio.to_thread(lambda: ready_daemon.start().wait_ready())
        await until(client.queue, "that it waits again")
        await leases[2].release()
        await until(lambda: _has(client, ADDRESSES), "its lease")
        assert said[-1] == "the daemon is responding again"
        waiting.cancel()
        await asyncio.wait({waiting})

    asyncio.run(restarted())


async def _has(client: AsyncClient, addresses: list[str]) -> bool:
    return sorted(one for lease in await client.leases() for one in lease.devices) == addresses


def test_a_crowd_of_tasks_is_answered(ready_daemon: Daemon) -> None:
    """More than the kernel lets wait for a connection at once."""

    async def crowd() -> list[int]:
        client = AsyncClient()
        answers = await asyncio.gather(*(client.devices() for _ in range(300)))
        return [len(answer) for answer in answers]

    assert asyncio.run(crowd()) == [4] * 300


def test_events_are_followed_without_blocking_the_loop(ready_daemon: Daemon) -> None:
    async def followed() -> list[str]:
        client = AsyncClient()
        following = client.events(kind="lease", follow=True)
        first = asyncio.ensure_future(_subjects(following, 2))
        async with client.lease(devices=[ADDRESSES[1]]):
            pass
        return await asyncio.wait_for(first, PATIENCE_S)

    assert asyncio.run(followed()) == [ADDRESSES[1]] * 2


async def _subjects(events: object, number: int) -> list[str]:
    found: list[str] = []
    async for event in events:  # type: ignore[attr-defined]
        found.append(event.subject)
        if len(found) == number:
            break
    return found
