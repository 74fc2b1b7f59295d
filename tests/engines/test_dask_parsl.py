"""Workers of a real Dask and apps of a real Parsl have devices of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from engines.processes import ENGINES, kill_all_of, processes_of, with_engines
from integration.daemon_host import PATIENCE_S, Daemon, eventually
from integration.lease_host import ADDRESSES, holders, leased_addresses, leases_of, queued_requests
from simhost import SimHost
from simhost.host import Closes

pytestmark = pytest.mark.gpus({"kind": "v100"})

WORKER = "yunion-mps run -- dask worker --no-nanny --nthreads=2 --resources yunion_mps=1"
DASK = """
import json, os, sys
from dask.distributed import Client

def device():
    return os.environ["YUNION_MPS_DEVICE"]

with Client(scheduler_file=sys.argv[1]) as client:
    client.wait_for_workers(4)
    task = client.submit(device, resources={"yunion_mps": 1})
    with open("devices.json", "w") as file:
        json.dump([sorted(client.run(device).values()), task.result()], file)
"""
#: Each app waits for a file, so that four of them use the devices at the same time.
PARSL = """
import parsl
from parsl.executors import HighThroughputExecutor

executor = HighThroughputExecutor(address="127.0.0.1", max_workers_per_node=5, cores_per_worker=0.1)

@parsl.bash_app
def app(stdout):
    job = "echo $YUNION_MPS_DEVICE; until [ -e $ENGINE/go ]; do sleep 0.1; done"
    return f"yunion-mps run --wait -- sh -c '{job}'"

with parsl.load(parsl.Config([executor], run_dir="parsl", usage_tracking=0)):
    for done in [app(stdout=f"{number}.txt") for number in range(5)]:
        done.result()
"""


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    daemon.start().wait_ready()
    with Engine(daemon.host) as engine:
        yield engine


class Engine(Closes):
    """Programs of an engine, which run in a folder of the host; at the end, all processes are killed."""

    def __init__(self, host: SimHost) -> None:
        self.folder = host.root / "engine"
        self.folder.mkdir()
        self._env = {**with_engines(host.env), "ENGINE": str(self.folder), "TMPDIR": str(self.folder)}
        self._host = host
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: object) -> subprocess.Popen[str]:
        with (self.folder / "log").open("a") as log:
            started = self._host.popen(command, env=self._env, cwd=self.folder, stdout=log, stderr=log)
        self._started.append(started)
        return started

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        kill_all_of(self.folder)
        for started in self._started:
            started.wait()


def test_each_worker_of_dask_has_a_device_until_it_ends(engine: Engine, daemon: Daemon) -> None:
    scheduler = engine.folder / "scheduler.json"
    options = ["--host=127.0.0.1", "--dashboard-address=127.0.0.1:0", f"--scheduler-file={scheduler}"]
    engine.start(ENGINES / "dask", "scheduler", "--port=0", *options)
    workers = [engine.start(*WORKER.split(), *options) for _ in ADDRESSES]
    client = engine.start(ENGINES / "python", "-c", DASK, scheduler)
    assert client.wait(4 * PATIENCE_S) == 0, engine.log()
    devices, device = json.loads((engine.folder / "devices.json").read_text())
    assert devices == leased_addresses(daemon) == ADDRESSES
    assert device in devices
    assert holders(daemon) == {worker.pid for worker in workers}
    workers[0].kill()
    eventually(lambda: len(leases_of(daemon)) == 3, "the end of its lease")


def test_each_app_of_parsl_has_a_device_and_the_fifth_waits(engine: Engine, daemon: Daemon) -> None:
    program = engine.start(ENGINES / "python", "-c", PARSL)
    eventually(lambda: len(queued_requests(daemon)) == 1, "the fifth app", 4 * PATIENCE_S, engine.log)
    assert leased_addresses(daemon) == ADDRESSES
    (engine.folder / "go").touch()
    assert program.wait(4 * PATIENCE_S) == 0, engine.log()
    found = [path.read_text().strip() for path in engine.folder.glob("*.txt")]
    assert sorted(set(found)) == ADDRESSES
    assert len(found) == 5
    assert leases_of(daemon) == []
    eventually(lambda: processes_of(engine.folder) == [], "the end of Parsl")  # with its semaphores
