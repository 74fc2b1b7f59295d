"""The examples of docs/examples with a daemon, and stand-ins for torch and fastapi where they are missing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, given

pytestmark = pytest.mark.gpus({"kind": "v100"})

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
    eventually(lambda: given(ready_daemon) == [], "that all is free")


def test_a_service_holds_a_device_until_its_gpu_is_lost(ready_daemon: Daemon, tmp_path: Path) -> None:
    env = stand_ins(ready_daemon.host.env, tmp_path)
    with ready_daemon.host.popen([sys.executable, "-c", SERVER], env=env, stdout=subprocess.PIPE) as server:
        assert server.stdout
        assert server.stdout.readline() == f"{{'device': '{ADDRESSES[0]}'}}\n"
        assert given(ready_daemon) == [ADDRESSES[0]]
        ready_daemon.host.gpus[0].lose()
        assert re.search(r"is unavailable: .* \[gpu_(lost|fault)\]", server.stdout.readline())
    assert (server.returncode, given(ready_daemon)) == (0, [])


def test_without_arguments_the_servers_print_their_usage() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "llm_servers.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "usage: llm_servers.py NUMBER COMMAND [ARG]...\n")


def test_servers_share_a_gpu_until_one_of_them_ends(ready_daemon: Daemon) -> None:
    serve = "echo {port} on $YUNION_MPS_DEVICE; [ {port} = 8001 ] && exit 7; exec sleep 600"
    command = [sys.executable, EXAMPLES / "llm_servers.py", "2", "sh", "-c", serve]
    done = ready_daemon.host.run(command)
    assert (done.returncode, done.stderr) == (7, "")
    lines = {f"port {8000 + number}: {address} with 4096 MiB" for number, address in enumerate(ADDRESSES[:2])}
    lines |= {f"{8000 + number} on {address}" for number, address in enumerate(ADDRESSES[:2])}
    assert set(done.stdout.splitlines()) == lines
    assert given(ready_daemon) == []
