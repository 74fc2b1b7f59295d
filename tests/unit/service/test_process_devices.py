"""Which devices a process has, and how little its word on that costs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from yunion_mps.host.proc import started_ticks
from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.usage import Budget, ProcessDevices

from integration.daemon_host import eventually
from unit.leases.shares import HOLDER, device, lease
from unit.service.job import Job

pytestmark = pytest.mark.processes

Start = Callable[[str], dict[int, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that names these devices; returns its PID with its start."""
    with ExitStack() as stack:

        def begin(names: str) -> dict[int, int]:
            job = Job(names)
            stack.callback(job.end)
            return job.started

        yield begin


def process_devices(ledger: Ledger, slots: int = 4) -> ProcessDevices:
    """Of one GPU with so many devices."""
    plan = SimpleNamespace(devices=[device(0, slot) for slot in range(slots)])
    supervisor: Any = SimpleNamespace(snapshot=lambda: SimpleNamespace(plan=plan))
    return ProcessDevices(supervisor, ledger)


def of(devices: ProcessDevices, started: dict[int, int]) -> tuple[str, ...]:
    """Those of the only process."""
    (found,) = devices.of(started, devices.known()).values()
    return found


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
def test_it_has_those_that_it_names_and_that_there_are_each_once(
    start: Start, names: str, found: tuple[str, ...]
) -> None:
    assert of(process_devices(Ledger()), start(names)) == found


def test_one_that_names_none_has_those_of_all_its_leases(start: Start) -> None:
    quiet, named = start(""), start("00:00.0-3")
    ledger = Ledger()
    for name, slot, started in (("a", 2, quiet), ("b", 0, quiet), ("c", 1, named)):
        (pid,) = started
        ledger.add(lease(name, device(0, slot))._replace(holder=HOLDER._replace(pid=pid)))
    devices = process_devices(ledger)
    assert of(devices, quiet) == ("00:00.0-2", "00:00.0-0")
    assert of(devices, named) == ("00:00.0-3",), "its own word goes before its lease"


def test_devices_made_for_a_lease_are_known_with_their_budget() -> None:
    made = device(0, 0)._replace(id="id-0-m0", addr="00:00.0-m0", memory_limit_mib=77)
    known = process_devices(Ledger([lease("a", made)]), slots=1).known()
    assert known.budgets == {"00:00.0-0": Budget("GPU-0", 300), "00:00.0-m0": Budget("GPU-0", 77)}


def test_of_an_environment_only_what_makes_sense_is_kept_and_for_no_longer_than_its_process(
    start: Start,
) -> None:
    devices, endless = process_devices(Ledger()), start(f"00:00.0-1,{'x' * 100_000}")
    assert of(devices, endless) == ("00:00.0-1",)
    assert max(map(len, devices._named.values())) < 5000
    assert of(devices, start("00:00.0-2")) == ("00:00.0-2",)
    assert len(devices._named) == 1


def test_an_environment_is_read_once_for_each_process_even_if_a_pid_returns(start: Start) -> None:
    devices, started = process_devices(Ledger()), start("00:00.0-1")
    (one,) = started.items()
    devices._named[one] = "00:00.0-2"  # what was read, were it not read again
    assert of(devices, started) == ("00:00.0-2",)
    assert of(devices, {one[0]: one[1] + 1}) == ("00:00.0-1",)


def test_a_process_without_an_environment_is_asked_again_for_it_may_only_just_be_started() -> None:
    devices = process_devices(Ledger())
    # One exec, not by way of env(1): an environment without the variable would be remembered for good.
    steps = "read -r line; export YUNION_MPS_DEVICE=00:00.0-1; exec cat"
    with subprocess.Popen(["/bin/sh", "-c", steps], env={}, stdin=subprocess.PIPE) as job:
        started = {job.pid: started_ticks(job.pid) or 0}
        assert of(devices, started) == ()
        assert job.stdin is not None
        job.stdin.write(b"go on\n")
        job.stdin.flush()
        eventually(lambda: of(devices, started) == ("00:00.0-1",), "its environment")
