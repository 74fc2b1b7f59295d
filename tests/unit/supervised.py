"""A supervisor on a simulated host, for the tests of what it does and of what it finds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import FREE, WARNING
from yunion_mps.core.models import Event, Lease, Snapshot
from yunion_mps.core.paths import ROOT_VARIABLE, Paths
from yunion_mps.gpus.mig_layout import Losses
from yunion_mps.host.processes import Watchable, drive
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner
from yunion_mps.leases.ledger import Ledger
from yunion_mps.supervisor import Change, Supervisor
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.views.devices import devices_json

from simhost import Description, SimHost
from simhost.mps import Client, StandIns

PATIENCE_S = 60.0

MakeHost = Callable[..., SimHost]


class _Polled:
    """A supervisor that is also ticked when nothing of its own is due: a test may wait for something else."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.watched = supervisor.watched

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float:
        due_s = self._supervisor.tick(now_s, readable)
        return now_s + 0.02 if due_s is None else min(due_s, now_s + 0.02)


class Supervised:
    def __init__(self, host: SimHost, make: Supervise | None = None) -> None:
        """`make` makes the next one."""
        self.host = host
        self._make = make or Supervised
        self.paths = Paths(str(host.root))
        self.preflight = run_preflight(self.paths, creates_directories=True).for_start()
        #: How much later than the clock the supervisor tries refused settings again.
        self.later_s = 0.0
        self.supervisor = Supervisor(self.paths, self.preflight, lambda: time.monotonic() + self.later_s)
        self._has_nvml = True

    @property
    def snapshot(self) -> Snapshot:
        return self.supervisor.snapshot()

    @property
    def available(self) -> int:
        return sum(device["state"] == FREE for device in devices_json(self.snapshot, Ledger()))

    @property
    def warnings(self) -> list[Condition]:
        """What works otherwise than configured."""
        return [condition for condition in self.snapshot.conditions if condition.level == WARNING]

    def start(self) -> Supervised:
        self.supervisor.start(time.monotonic())
        drive(self.supervisor, lambda: self.supervisor.fleet.started)
        return self

    def hold(self, leases: Iterable[Lease] = ()) -> Ledger:
        """Have these leases and no others, as the lease service restores them."""
        ledger, held = self.supervisor.ledger, list(leases)
        ledger.clear()
        for lease in held:
            ledger.add(lease)
        return ledger

    def next_supervisor(self) -> Supervised:
        """Return the next supervisor of the host, not started."""
        return self._make(self.host)

    def start_next(self) -> Supervised:
        return self.next_supervisor().start()

    def rescan(self) -> Snapshot:
        assert isinstance(self.preflight.nvml, Nvml)
        self.supervisor.update_gpus(Scanner(self.paths).scan(self.preflight.nvml), time.monotonic())
        return self.snapshot

    def accept(self) -> list[Change]:
        """Read the files again, and aim at what they say."""
        nvml = self.supervisor.nvml
        preflight = run_preflight(self.paths, nvml, confirms_replacements=True, creates_directories=True)
        changes = self.supervisor.accept(preflight)
        self.reconcile()
        self.supervisor.apply(time.monotonic())
        return changes

    def losses(self) -> Mapping[str, Losses]:
        """What `reload --now` would list."""
        layouts, plan = self.supervisor.layouts, self.supervisor.desired.plan
        due = layouts.looks_for(plan, self.snapshot.inventory)
        return layouts.forecast(plan, due, layouts.observe(due, self.preflight.nvml)).losses

    def reload(self) -> list[Change]:
        """As a reload of the daemon does: until every domain is ready or has said why it is not."""
        changes = self.accept()
        drive(self.supervisor, lambda: self.supervisor.fleet.started)
        self.reconcile()
        self.supervisor.record_conditions(is_settled=True)
        return changes

    def reconcile(self) -> None:
        """Set and restore the settings of GPUs that are due."""
        asyncio.run(self.supervisor.reconciliation.set_values(self.supervisor.nvml))

    def bring_about(self) -> None:
        """Bring settings and MIG layouts into effect, as each poll does."""

        async def settle() -> None:
            self.until(lambda: self.supervisor.fleet.settled)

        asyncio.run(self.supervisor.reconciliation.bring_about(self.supervisor.nvml, settle))
        self.supervisor.record_conditions(is_settled=True)

    def poll_later(self, later_s: float = 60.0) -> None:
        """Poll and bring about what is due after so many seconds, by default the longest pause."""
        self.later_s += later_s
        self.rescan()
        self.bring_about()
        self.rescan()

    def until(self, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        drive(_Polled(self.supervisor), lambda: done() or time.monotonic() > end_s)
        assert done(), self.snapshot.domains

    @property
    def events(self) -> list[Event]:
        return [one.event for one in self.supervisor.event_log.after(0, 1000)]

    def stop(self, *, restore: bool = True) -> None:
        self.supervisor.stop(time.monotonic())
        drive(self.supervisor, lambda: self.supervisor.fleet.stopped)
        if restore:
            self.supervisor.close()

    def end(self) -> None:
        """Stop, and close NVML, as the end of the daemon's process does."""
        self.stop()
        if self._has_nvml:
            self._has_nvml = False
            self.preflight.close()


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Make a host that NVML in this process, and PATH, belong to."""
    with ExitStack() as stack:

        def make(description: Description | None = None, **keys: str) -> SimHost:
            host = stack.enter_context(SimHost.create(description))
            configure(host, **keys)
            stack.enter_context(host.pynvml())
            for name in ("PATH", "LD_LIBRARY_PATH"):  # for the programs that it runs
                monkeypatch.setenv(name, host.env[name])
            monkeypatch.setenv(ROOT_VARIABLE, str(host.root))
            return host

        yield make


@pytest.fixture
def supervise() -> Iterator[Supervise]:
    with ExitStack() as stack:

        def make(host: SimHost) -> Supervised:
            made = Supervised(host, make)
            stack.callback(made.end)
            return made

        yield make


@pytest.fixture
def start_supervised(make_host: MakeHost, supervise: Supervise) -> StartSupervised:
    """Start a supervisor on a host with these GPUs and keys, the first divided into so many devices each."""

    def make(description: Description, *numbers: int, **keys: str) -> tuple[SimHost, Supervised]:
        host = make_host(description, **keys)
        if numbers:
            host.divide(*numbers)
        return host, supervise(host).start()

    return make


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStandIns]:
    """Put servers and clients on a host that the real control daemon takes for real ones."""
    with ExitStack() as stack:

        def make(host: SimHost) -> StandIns:
            made = stack.enter_context(StandIns(host))
            monkeypatch.setenv("PATH", host.env["PATH"])
            return made

        yield make


class AtWork(NamedTuple):
    """A host, stand-ins for MPS servers and clients, a started supervisor, and the first job at work."""

    host: SimHost
    jobs: StandIns
    made: Supervised
    job: Client

    def end(self) -> None:
        self.job.end()
        for server in self.jobs.servers():
            os.kill(server, signal.SIGKILL)


@pytest.fixture
def start_with_job(make_host: MakeHost, supervise: Supervise, stand_ins: MakeStandIns) -> StartWithJob:
    """Make a host with a job, its first GPUs divided into so many devices each, or all of them by four.

    What is asked for last ends first: the job, or the stop of the supervisor would wait for it.
    """

    def make(description: Description, *numbers: int, **keys: str) -> AtWork:
        host = make_host(description, **keys)
        if numbers:
            host.divide(*numbers)
        jobs = stand_ins(host)
        made = supervise(host).start()
        return AtWork(host, jobs, made, attach(jobs, host))

    return make


def attach(stand_ins: StandIns, host: SimHost) -> Client:
    """A job at work, on the pipe directory of the default configuration."""
    return stand_ins.attached(host.root / "tmp/nvidia-mps/pipe")


def configure(host: SimHost, **keys: str) -> None:
    lines = [f"{name}: {value}" for name, value in {"enable_cuda_mps": "true", **keys}.items()]
    (host.root / "etc/yunion/host.conf").write_text("\n".join(lines) + "\n")


def budgets(made: Supervised) -> list[tuple[str, int | None]]:
    return [(device["addr"], device["memory_mib"]) for device in devices_json(made.snapshot, Ledger())]


def pid(made: Supervised) -> int | None:
    return made.snapshot.domains[0].pid


def modes(host: SimHost) -> list[str]:
    return [gpu.compute_mode for gpu in host.gpus]


StartSupervised = Callable[..., tuple[SimHost, Supervised]]
Supervise = Callable[[SimHost], Supervised]
MakeStandIns = Callable[[SimHost], StandIns]
StartWithJob = Callable[..., AtWork]
