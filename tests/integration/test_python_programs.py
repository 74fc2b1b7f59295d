"""Programs in Python on a whole host: with `AsyncClient`, and the examples of docs/examples.

The examples get stand-ins for torch and fastapi where they are missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from yunion_mps import AsyncClient, Client
from yunion_mps.client import AsyncHeldLease, DeviceInfo, GpuInfo, QueuedRequestInfo, Status

from integration.daemon_host import PATIENCE_S, Daemon, eventually
from integration.lease_host import ADDRESSES, leased_addresses
from simhost import SimHost
from simhost.host import IN_UNITS

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


async def take_all(client: AsyncClient) -> list[AsyncHeldLease]:
    return [await client.lease(devices=[address]) for address in ADDRESSES]


def test_both_clients_answer_the_same(ready_daemon: Daemon) -> None:
    async def answers() -> tuple[list[DeviceInfo], list[GpuInfo], Status, list[QueuedRequestInfo]]:
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
    assert leased_addresses(ready_daemon) == []


def test_both_clients_tell_the_free_memory_of_pools(daemon: Daemon) -> None:
    daemon.host.divide(IN_UNITS)
    daemon.start().wait_ready()
    with Client().lease(memory="6GiB"):
        (pool,) = Client().pools()
        assert asyncio.run(AsyncClient().pools()) == [pool]
    assert (pool.addr, pool.memory_unit_mib, pool.memory_free_mib, pool.state) == (
        ("00:06.0", 1024, 10240, "available")
    )


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
    assert leased_addresses(ready_daemon) == []


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


def test_a_waiting_task_survives_a_daemon_restart(ready_daemon: Daemon) -> None:
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


EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"

#: What the examples use of torch: workers that begin by `worker_init_fn`, and share the items.
TORCH = """
import multiprocessing

class Dataset:
    def __class_getitem__(cls, item):
        return cls

class DataLoader:
    def __init__(self, dataset, *, batch_size, num_workers, worker_init_fn, multiprocessing_context):
        self.dataset, self.number, self.begin = dataset, num_workers, worker_init_fn
        self.context = multiprocessing.get_context(multiprocessing_context)

    def __iter__(self):
        done, begun = self.context.Queue(), self.context.Barrier(self.number)
        shared = (self.number, self.begin, self.dataset, begun, done)
        workers = [self.context.Process(target=work, args=(one, *shared)) for one in range(self.number)]
        for worker in workers:
            worker.start()
        for _ in range(len(self.dataset)):
            yield done.get(timeout=60)
        for worker in workers:
            worker.join()

def work(worker, number, begin, dataset, begun, done):
    begin(worker)
    begun.wait(60)
    for item in range(worker, len(dataset), number):
        done.put(dataset[item])
"""
FASTAPI = """
import types

class HTTPException(Exception):
    pass

class FastAPI:
    def __init__(self, lifespan):
        self.lifespan, self.state, self.routes = lifespan, types.SimpleNamespace(), {}

    def get(self, path):
        return lambda function: self.routes.setdefault(path, function)
"""
#: What runs the service: its life, and a probe of its health until that fails.
SERVER = """
import asyncio, service

async def main():
    async with service.lifespan(service.app):
        print(await service.healthz(), flush=True)
        while True:
            try:
                await service.healthz()
            except service.HTTPException as error:
                return print(error.args[-1], flush=True)
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


def stand_ins(host_env: dict[str, str], directory: Path) -> dict[str, str]:
    """The environment of a program that finds the examples, and what they import."""
    for name, path, text in (("torch", "torch/utils/data.py", TORCH), ("fastapi", "fastapi.py", FASTAPI)):
        if find_spec(name) is None:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)
    return {**host_env, "PYTHONPATH": f"{directory}:{EXAMPLES}"}


def test_each_dataloader_worker_has_a_device_of_its_own(ready_daemon: Daemon, tmp_path: Path) -> None:
    env = stand_ins(ready_daemon.host.env, tmp_path)
    done = ready_daemon.host.run([sys.executable, EXAMPLES / "dataloader.py"], env=env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sorted(re.findall(r"worker \d: (\S+) with 4096 MiB", done.stdout)) == ADDRESSES[:2]
    assert {line.rpartition(" ")[2] for line in lines if "prepared on" in line} == {*ADDRESSES[:2]}
    eventually(lambda: leased_addresses(ready_daemon) == [], "that all is free")


def test_a_service_holds_a_device_until_its_gpu_is_lost(ready_daemon: Daemon, tmp_path: Path) -> None:
    env = stand_ins(ready_daemon.host.env, tmp_path)
    with ready_daemon.host.popen([sys.executable, "-c", SERVER], env=env, stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == f"{{'device': '{ADDRESSES[0]}'}}\n"
        assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
        ready_daemon.host.gpus[0].lose()
        assert re.search(r"is unavailable: .* \[gpu_(lost|fault)\]", server.stdout.readline())
    assert (server.returncode, leased_addresses(ready_daemon)) == (0, [])


def test_servers_share_a_gpu_until_one_of_them_ends(ready_daemon: Daemon) -> None:
    serve = "echo {port} on $YUNION_MPS_DEVICE; [ {port} = 8001 ] && exit 7; exec sleep 600"
    command = [sys.executable, EXAMPLES / "llm_servers.py", "2", "sh", "-c", serve]
    done = ready_daemon.host.run(command)
    assert (done.returncode, done.stderr) == (7, "")
    lines = {f"port {8000 + number}: {address} with 4096 MiB" for number, address in enumerate(ADDRESSES[:2])}
    lines |= {f"{8000 + number} on {address}" for number, address in enumerate(ADDRESSES[:2])}
    assert set(done.stdout.splitlines()) == lines
    assert leased_addresses(ready_daemon) == []
