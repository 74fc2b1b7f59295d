"""What a look at the GPUs adds to the last hour: the same that the metrics tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import Gpu
from yunion_mps.service.metrics import Observation, use_of
from yunion_mps.service.usage import ProcessDevices, Processes, UsageHistory, UsageSampler, use_by_gpu

from unit.leases.shares import HOLDER, device, lease
from unit.service.job import Job

pytestmark = pytest.mark.processes

GPU = Gpu("0000:00:00.0", uuid="GPU-0")
#: A job's devices, and how much of its memory each has: a device's budget is 300 MiB.
DEVICES = ["00:00.0-2", "00:00.0-0", "00:00.0-1"]
MIB, PARTS = 700, [300, 300, 100]


class Use(NamedTuple):
    """What the last hour and the metrics have of one look, in MiB by address."""

    hour: dict[str, int]
    metric: dict[str, int]


@pytest.fixture(params=["named by its environment", "by its lease alone"])
def told(request: pytest.FixtureRequest) -> Iterator[Use]:
    """Of a job with several devices of one GPU, and of a process that is no job."""
    job = Job(",".join(DEVICES) if request.param.startswith("named") else "")
    holder = HOLDER._replace(pid=job.pid)
    ledger = Ledger([lease("a", device(0, 2), device(0, 0), device(0, 1))._replace(holder=holder)])
    plan = SimpleNamespace(devices=[device(0, slot) for slot in range(4)])
    snapshot = SimpleNamespace(plan=plan, inventory=SimpleNamespace(gpus=[GPU]))
    supervisor: Any = SimpleNamespace(jobs=SimpleNamespace(started=job.started), snapshot=lambda: snapshot)
    processes: Processes = {"GPU-0": {job.pid: MIB, os.getpid(): 1000}}
    devices, usage = ProcessDevices(supervisor, ledger), UsageHistory()
    UsageSampler(supervisor, devices, usage).record(processes, 6000)
    answer = usage.last_hour(6000, 0.0, None, devices=True)
    known = devices.known()
    seen = Observation(6000.0, (), processes, {"GPU-0": {job.pid}}, devices.of(job.started, known))
    yield Use(
        {one["addr"]: one["memory_used"][-1] or 0 for one in [*answer["gpus"], *answer["devices"]]},
        {name: used.mib for name, used in use_of(seen, known.budgets).devices.items()},
    )
    job.end()


def test_the_hour_and_the_metric_agree_on_a_client_with_several_devices_of_a_gpu(told: Use) -> None:
    by_device = {name: mib for name, mib in told.hour.items() if name != GPU.address}
    assert by_device == told.metric == dict(zip(DEVICES, PARTS))


def test_only_jobs_count(told: Use) -> None:
    assert told.hour[GPU.address] == MIB


def test_memory_counts_for_the_gpu_that_it_is_on() -> None:
    gpus = [Gpu("0000:00:06.0", uuid="GPU-a"), Gpu("0000:00:07.0", uuid="GPU-b"), Gpu("0000:00:08.0")]
    processes: Processes = {"GPU-a": {1: 100, 2: 50, 3: None, 4: 7}, "GPU-b": {1: 30}}
    assert use_by_gpu(processes, gpus) == {"00:06.0": 157, "00:07.0": 30, "00:08.0": 0}
