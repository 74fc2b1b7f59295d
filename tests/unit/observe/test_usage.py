"""The memory that jobs use: which devices a job has, what counts for which, and what the last hour keeps."""

from __future__ import annotations

import os
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from yunion_mps.core.models import Gpu, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.store import Store
from yunion_mps.inventory.nvml import GpuLoad, Load
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.memory_peaks import MemoryPeaks
from yunion_mps.observe.observer import ProcessFacts, host_usage
from yunion_mps.observe.process_list import GpuProcesses
from yunion_mps.observe.usage import (
    MINUTES,
    Budget,
    DeviceUsage,
    ProcessDevices,
    UsageHistory,
    UsageSampler,
    usage_by_device,
)
from yunion_mps.supervisor.fleet import Processes

from integration.daemon_host import eventually
from unit.described_supervisor import NO_GPUS, DescribedSupervisor
from unit.leases.lease_builders import HOLDER, device, lease

Start = Callable[[str], dict[int, int]]
A, B = "GPU-a", "GPU-b"
BUDGETS = {
    "00:06.0-0": Budget(A, 100),
    "00:06.0-1": Budget(A, 50),
    "00:06.0-2": Budget(A, 100),
    "00:07.0-0": Budget(B, 200),
}


class Jobs:
    """Processes whose environment names devices; it can be another one later."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._jobs: dict[int, subprocess.Popen[str]] = {}

    def start(self, names: str) -> dict[int, int]:
        """Start a process that names these devices; return its PID with its start."""
        environment = {"YUNION_MPS_DEVICE": names, "PATH": "/usr/bin:/bin"}
        command = ["sh", "-c", _NAMES_OTHERS, "sh", _NAMES_OTHERS]
        job = subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True, bufsize=1)
        self._stack.enter_context(job)
        self._jobs[job.pid] = job
        self._await_environment(job)
        return {job.pid: started_ticks(job.pid) or 0}

    def rename(self, started: dict[int, int], names: str) -> None:
        """Let the process name other devices, by executing its program again."""
        (pid,) = started
        job = self._jobs[pid]
        assert job.stdin
        job.stdin.write(f"{names}\n")
        self._await_environment(job)

    def _await_environment(self, job: subprocess.Popen[str]) -> None:
        """Wait until the program runs: only then does its process have its environment."""
        assert job.stdout
        assert job.stdout.readline() == "\n"


#: Executes itself again with the devices in each line that it is told.
_NAMES_OTHERS = """\
echo
while read -r names; do
    export YUNION_MPS_DEVICE="$names"
    exec "$0" -c "$1" "$0" "$1"
done
"""


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with ExitStack() as stack:
        yield Jobs(stack)


@pytest.fixture
def start(jobs: Jobs) -> Start:
    """Start a process that names these devices; returns its PID with its start."""
    return jobs.start


def process_devices(ledger: Ledger, slots: int = 4) -> ProcessDevices:
    """Of one GPU with so many devices."""
    return ProcessDevices(DescribedSupervisor(one_gpu(slots)), ledger)


def one_gpu(slots: int = 4) -> Snapshot:
    """A host with one GPU that has so many devices."""
    plan = NO_GPUS.plan._replace(devices=tuple(device(0, slot) for slot in range(slots)))
    gpus = (Gpu("0000:00:00.0", uuid="GPU-0"),)
    return NO_GPUS._replace(plan=plan, inventory=NO_GPUS.inventory._replace(gpus=gpus))


def devices_of_process(devices: ProcessDevices, started: dict[int, int]) -> tuple[str, ...]:
    """Those of the only process."""
    (found,) = devices.of(started, devices.known()).values()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("00:00.0-1", ("00:00.0-1",)),
        (" 00:00.0-2 ,00:00.0-0", ("00:00.0-2", "00:00.0-0")),
        ("00:00.0-1,00:00.0-1", ("00:00.0-1",)),
        ("00:00.0-9", ()),
        ("", ()),
    ],
)
def test_a_job_has_each_existing_device_that_it_names_once(
    start: Start, names: str, found: tuple[str, ...]
) -> None:
    assert devices_of_process(process_devices(Ledger()), start(names)) == found


@pytest.mark.processes
def test_a_job_that_names_none_has_those_of_all_its_leases(start: Start) -> None:
    quiet, named = start(""), start("00:00.0-3")
    ledger = Ledger()
    for name, slot, started in (("a", 2, quiet), ("b", 0, quiet), ("c", 1, named)):
        (pid,) = started
        ledger.add(lease(name, device(0, slot))._replace(holder=HOLDER._replace(pid=pid)))
    devices = process_devices(ledger)
    assert devices_of_process(devices, quiet) == ("00:00.0-2", "00:00.0-0")
    assert devices_of_process(devices, named) == ("00:00.0-3",), "its own word goes before its lease"


def test_devices_made_for_a_lease_are_known_with_their_budget() -> None:
    made = device(0, 0)._replace(id="id-0-m0", addr="00:00.0-m0", memory_limit_mib=77)
    known = process_devices(Ledger([lease("a", made)]), slots=1).known()
    assert known.budgets == {"00:00.0-0": Budget("GPU-0", 300), "00:00.0-m0": Budget("GPU-0", 77)}


@pytest.mark.processes
def test_only_the_beginning_of_an_endless_environment_counts(start: Start) -> None:
    devices = process_devices(Ledger())
    assert devices_of_process(devices, start(f"00:00.0-1,{'x' * 100_000}")) == ("00:00.0-1",)
    assert devices_of_process(devices, start(f"{'x' * 5000},00:00.0-1")) == ()


@pytest.mark.processes
def test_an_environment_is_read_once_while_its_process_is_seen(jobs: Jobs) -> None:
    devices, first, second = process_devices(Ledger()), jobs.start("00:00.0-1"), jobs.start("00:00.0-3")
    assert devices_of_process(devices, first) == ("00:00.0-1",)
    jobs.rename(first, "00:00.0-2")
    assert devices_of_process(devices, first) == ("00:00.0-1",), "it was not read again"
    ((pid, ticks),) = first.items()
    assert devices_of_process(devices, {pid: ticks + 1}) == ("00:00.0-2",), "another process had this PID"
    assert devices_of_process(devices, first) == ("00:00.0-2",), "it was forgotten with its process"
    jobs.rename(first, "00:00.0-0")
    assert devices_of_process(devices, second) == ("00:00.0-3",)
    assert devices_of_process(devices, first) == ("00:00.0-0",), "it was forgotten with its process"


@pytest.mark.processes
def test_a_process_that_has_just_been_started_is_read_again() -> None:
    devices = process_devices(Ledger())
    # One exec, not by way of env(1): an environment without the variable would be remembered for good.
    steps = "read -r line; export YUNION_MPS_DEVICE=00:00.0-1; exec cat"
    with subprocess.Popen(["/bin/sh", "-c", steps], env={}, stdin=subprocess.PIPE) as job:
        started = {job.pid: started_ticks(job.pid) or 0}
        assert devices_of_process(devices, started) == ()
        assert job.stdin is not None
        job.stdin.write(b"go on\n")
        job.stdin.flush()
        eventually(lambda: devices_of_process(devices, started) == ("00:00.0-1",), "its environment")


def test_memory_counts_for_the_devices_of_the_gpu_that_it_is_on() -> None:
    memory: dict[str, dict[int, int | None]] = {A: {1: 70, 2: None, 3: 7}, B: {1: 30, 9: 1000}}
    devices = {1: ("00:07.0-0", "00:06.0-0"), 2: ("00:06.0-2",)}
    assert usage_by_device(memory, devices, BUDGETS) == {
        "00:06.0-0": DeviceUsage(70, 1),
        "00:06.0-2": DeviceUsage(0, 1),
        "00:07.0-0": DeviceUsage(30, 1),
    }


def test_several_devices_are_filled_in_order_and_the_last_has_the_rest() -> None:
    three = ("00:06.0-1", "00:06.0-0", "00:06.0-2")
    for mib, parts in ((20, (20, 0, 0)), (60, (50, 10, 0)), (400, (50, 100, 250))):
        used = usage_by_device({A: {1: mib}}, {1: three}, BUDGETS)
        assert used == {name: DeviceUsage(part, 1) for name, part in zip(three, parts)}


def test_processes_with_the_same_devices_fill_them_together() -> None:
    two = ("00:06.0-0", "00:06.0-1")
    used = usage_by_device({A: {1: 80, 2: 60, 3: 5}}, {1: two, 2: two, 3: two[1:]}, BUDGETS)
    assert used == {"00:06.0-0": DeviceUsage(100, 2), "00:06.0-1": DeviceUsage(45, 3)}


def test_a_device_that_does_not_exist_is_skipped() -> None:
    used = usage_by_device({A: {1: 400}}, {1: ("00:06.0-9", "00:06.0-0")}, BUDGETS)
    assert used == {"00:06.0-0": DeviceUsage(400, 1)}


def test_a_device_is_busy_as_long_as_any_of_its_processes() -> None:
    """Time is not divided among the devices of a process, and there is no more of it than all."""
    two = ("00:06.0-0", "00:06.0-1")
    memory: Processes = {A: {1: 10, 2: 10, 3: 10, 4: 10}}
    devices = {1: two, 2: two[:1], 3: ("00:06.0-2",), 4: ("00:06.0-2",)}
    used = usage_by_device(memory, devices, BUDGETS, {A: {1: 30, 2: 90, 3: 0}, B: {4: 50}})
    assert {name: one.sm for name, one in used.items()} == {two[0]: 100, two[1]: 30, "00:06.0-2": 0}


def test_utilization_is_unknown_and_not_0_without_a_sample() -> None:
    used = usage_by_device({A: {1: 10}}, {1: ("00:06.0-0",)}, BUDGETS, {A: {}})
    assert used == {"00:06.0-0": DeviceUsage(10, 1, None)}


@pytest.mark.processes
@pytest.mark.parametrize("is_named", [True, False])
def test_the_hour_and_the_metric_agree_on_a_job_with_several_devices(
    start: Start, paths: Paths, is_named: bool
) -> None:
    """Named by its environment, or by its lease alone; another process that uses the GPU is no job."""
    names, parts = ["00:00.0-2", "00:00.0-0", "00:00.0-1"], [300, 300, 100]
    started = start(",".join(names) if is_named else "")
    (pid,) = started
    leased = lease("a", device(0, 2), device(0, 0), device(0, 1))._replace(holder=HOLDER._replace(pid=pid))
    ledger = Ledger([leased])
    supervisor = DescribedSupervisor(one_gpu())
    supervisor.jobs.started = started
    processes: Processes = {"GPU-0": {pid: 700, os.getpid(): 1000}}
    devices, usage = ProcessDevices(supervisor, ledger), UsageHistory()
    load = Load({"GPU-0": GpuLoad(utilization=81)}, {"GPU-0": {pid: 80, os.getpid(): 1}})
    with closing(Store(paths)) as store:
        peaks = MemoryPeaks(ledger, store)
        UsageSampler(supervisor, devices, usage, peaks).record(processes, load, 6000)
    known = devices.known()
    seen = ProcessFacts(6000.0, (), GpuProcesses(processes, {"GPU-0": {pid}}), devices.of(started, known))
    metric = {name: used.mib for name, used in host_usage(seen, known.budgets).devices.items()}
    assert metric == dict(zip(names, parts))
    hour = {address: series[-1] for address, series in last_minutes(usage, 6000).items()}
    assert hour == {**metric, "00:00.0": 700}
    assert peaks.by_device() == metric
    assert {one.sm for one in usage.latest.devices.values()} == {80}
    assert usage.last_hour(6000, 6000, None, devices=False)["gpus"][0]["utilization"][-1] == 81


#: Some minutes after the boot, and what that is in s since 1970.
BOOT_S = 1_788_000_000.0
GPU, DEVICE, OTHER = "00:06.0", "00:06.0-1", "00:07.0-1"


def last_minutes(
    usage: UsageHistory, now_s: float, gpu: str | None = None, *, devices: bool = True
) -> dict[str, Any]:
    """By address, the last minutes up to the newest that is not like the ones before it."""
    answer = usage.last_hour(now_s, BOOT_S + now_s, gpu, devices=devices)
    return {one["addr"]: one["memory_used_mib"] for one in [*answer["gpus"], *answer["devices"]]}


def test_the_peak_of_each_minute_is_kept() -> None:
    usage = UsageHistory()
    for now_s, mib in ((6000, 10), (6010, 300), (6020, 20), (6060, 5)):
        usage.record(now_s, {GPU: (mib, None)})
    assert last_minutes(usage, 6070)[GPU][-3:] == [None, 300, 5]


def test_a_minute_s_peak_utilization_is_kept_and_a_gap_is_unknown() -> None:
    usage = UsageHistory()
    for now_s, percent in ((6000, 10), (6010, 70), (6020, None), (6060, 0), (6180, None)):
        usage.record(now_s, {GPU: (5, percent), OTHER: (0, None), "00:07.0": (0, 0)})
    (gpu,) = usage.last_hour(6180, BOOT_S, None, devices=True)["gpus"]
    assert gpu["utilization"][-4:] == [70, 0, None, None]


def test_a_minute_without_a_poll_is_unknown_and_not_unused() -> None:
    usage = UsageHistory()
    usage.record(6000, {GPU: (7, None)})
    usage.record(6060, {})
    usage.record(6180, {GPU: (9, None)})
    assert last_minutes(usage, 6181)[GPU][-4:] == [7, 0, None, 9]
    assert usage.last_hour(6181, BOOT_S, None, devices=True)["polled"][-5:] == [
        False,
        True,
        True,
        False,
        True,
    ]


def test_the_first_minute_is_an_hour_back_by_the_wall_clock() -> None:
    usage = UsageHistory()
    usage.record(6030, {GPU: (7, None)})
    answer = usage.last_hour(6030, BOOT_S, None, devices=True)
    assert (answer["begin"], answer["step_s"]) == (rfc3339(BOOT_S - 30 - 59 * 60), 60)
    assert len(answer["polled"]) == len(answer["gpus"][0]["memory_used_mib"]) == MINUTES


def test_usage_older_than_an_hour_is_discarded() -> None:
    usage = UsageHistory()
    usage.record(6000, {GPU: (7, None), DEVICE: (7, None)})
    usage.record(6000 + 59 * 60, {GPU: (8, None)})
    assert last_minutes(usage, 6000 + 59 * 60) == {GPU: [7, *[None] * 58, 8], DEVICE: [7, *[None] * 58, 0]}
    assert last_minutes(usage, 6000 + 60 * 60) == {GPU: [*[None] * 58, 8, None]}
    assert last_minutes(usage, 6000 + 1000 * 60) == {}


def test_usage_can_be_requested_for_one_gpu_or_gpus_only() -> None:
    usage = UsageHistory()
    usage.record(6000, {GPU: (2, None), DEVICE: (1, None), "00:07.0": (3, None), OTHER: (3, None)})
    assert set(last_minutes(usage, 6000)) == {GPU, DEVICE, "00:07.0", OTHER}
    assert set(last_minutes(usage, 6000, GPU)) == {GPU, DEVICE}
    assert set(last_minutes(usage, 6000, devices=False)) == {GPU, "00:07.0"}
    assert last_minutes(usage, 6000, "00:0") == {}


def test_an_hour_of_3072_devices_takes_little_room_and_an_idle_one_nothing() -> None:
    usage = UsageHistory()
    usage.record(6000, {})
    assert last_minutes(usage, 6000) == {}
    addresses = [f"{gpu:02x}:00.0-{slot}" for gpu in range(64) for slot in range(48)]
    used = dict.fromkeys(addresses, (512, 50))
    tracemalloc.start()
    try:
        usage.record(6000, used)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(last_minutes(usage, 6000)) == 3072
    assert size < 1_800_000
