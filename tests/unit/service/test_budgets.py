"""When a job exceeds its budget, which process is terminated, and when none is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from yunion_mps.core.enums import TERMINATE
from yunion_mps.core.errors import BusyError
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.reasons import OVER_BUDGET_TERMINATED
from yunion_mps.leases.ledger import Ledger
from yunion_mps.observe.observer import GpuUsage, HostUsage, Observation, Observer
from yunion_mps.service.budgets import BudgetEnforcer, Excess, JobBudget, find_excesses
from yunion_mps.service.queries import Queries
from yunion_mps.service.terminate import TERM, Terminator

from clocks import SetLoop
from unit import builders
from unit.described_supervisor import NO_GPUS, DescribedSupervisor
from unit.http.fake_services import CLIENT, LEASE, FakeLeases, clients, lease_of

GPU, UUID = "00:06.0", "GPU-a"
OTHER = "11111111-8a52-4f0e-8b5e-3f9d2a6c1b44"
#: Two processes that run for as long as the test does.
OLD, NEW = os.getppid(), os.getpid()
#: Larger than any PID.
GONE = 1 << 22


def process(mib: int | None, pid: int = NEW, **fields: Any) -> Any:
    """A process of the lease; the higher its PID, the later it started, unless `started` is given."""
    started = f"2026-08-29T10:41:{int(pid != OLD):02}.500Z"
    return {**CLIENT, "pid": pid, "started": started, "memory_by_gpu_mib": [mib], **fields}


def excesses_of(*processes: Any, lease: Any = LEASE) -> list[Excess]:
    return list(find_excesses([lease], processes, {GPU}).values())


# -- what counts


def test_the_processes_of_a_lease_are_over_budget_together() -> None:
    within, over = (process(2880, OLD), process(2880)), (process(2880, OLD), process(2881))
    assert excesses_of(*within) == []
    (excess,) = excesses_of(*over)
    assert excess.budget == JobBudget(LEASE["id"], GPU, 1000, 5760)
    assert excess.text == "the processes of lease 7c1f0e7a together use 5761 of 5760 MiB (00:06.0-1)"


def test_devices_of_one_gpu_are_one_budget() -> None:
    two = {**LEASE, **lease_of({"00:06.0-1": 5760, "00:06.0-2": 5760})}
    assert excesses_of(process(5760, OLD), process(5760), lease=two) == []
    assert excesses_of(process(5760, OLD), process(5761), lease=two)[0].budget.memory_mib == 11520


def test_each_gpu_has_a_budget_of_its_own() -> None:
    two: Any = {**LEASE, **lease_of({"00:06.0-1": 5760, "00:07.0-1": 1000})}
    uses = process(5760, gpus=[GPU, "00:07.0"], memory_by_gpu_mib=[5760, 1001])
    assert excesses_of(uses, lease=two) == [], "over_budget is report for the second GPU"
    both = find_excesses([two], [uses], {GPU, "00:07.0"})
    assert [budget.gpu for budget in both] == ["00:07.0"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mps": False},
        {"started": None},
        {"lease": OTHER},
        {"lease": None},
        {"uid": 1001},
        {"gpus": ["00:07.0"]},
        {"memory_by_gpu_mib": [None]},
    ],
    ids=[
        "outside MPS",
        "ended",
        "an earlier lease",
        "no lease",
        "another user",
        "GPU",
        "unknown",
    ],
)
def test_a_process_that_may_not_belong_to_the_job_does_not_count(fields: dict[str, Any]) -> None:
    assert excesses_of(process(5760, OLD), process(5760, **fields)) == []


def test_naming_another_users_lease_does_not_endanger_that_user() -> None:
    (excess,) = excesses_of(process(3000, OLD), process(6000, uid=1001))
    assert [client["uid"] for client in excess.processes] == [1001]


def test_the_newest_process_is_the_one_that_started_last() -> None:
    (excess,) = excesses_of(
        process(3000, 900, started="2026-08-29T10:41:00.500Z"),
        process(3000, 20, started="2026-08-29T10:41:00.510Z"),  # PIDs have begun again
    )
    assert excess.newest["pid"] == 20


# -- when


#: What has been observed of the GPUs at some time, except which of them have answered.
USE = HostUsage(0.0, {}, {}, {})


class GivenObserver(Observer):
    """Observes the clients that are listed by hand; `use` is None if the driver has not answered."""

    def __init__(self) -> None:
        # Without super().__init__(), which needs what is observed.
        self.listed: Any = clients()
        self.use: HostUsage | None = USE

    async def observe(self) -> Observation:
        return Observation(self.listed, self.use)


class RecordingTerminator(Terminator):
    """Records which clients it is told to terminate for the lease's user; each test sets the results."""

    def __init__(self, listed: Callable[[], Any], uid: Callable[[], int | None]) -> None:
        # Without super().__init__(), which needs the clients of control daemons.
        self.listed = listed
        self.uid = uid
        #: Called at the beginning of a termination.
        self.meanwhile: Callable[[], object] = lambda: None
        #: The PIDs and signals of the terminations, and the results of the next ones.
        self.ended: list[tuple[int, tuple[int, ...]]] = []
        self.outcomes: list[tuple[bool, str]] = []
        self.causes: set[str] = set()

    async def terminate_all(self, choose: Any, uid: int, cause: str = "", **how: Any) -> Any:
        self.meanwhile()
        assert (uid, how["container"], how["code"]) == (self.uid(), None, OVER_BUDGET_TERMINATED)
        self.causes.add(cause)
        chosen = choose(self.listed())
        self.ended += [(client["pid"], how["signals"]) for client in chosen]
        outcomes = [self.outcomes.pop(0) if self.outcomes else (True, "") for _ in chosen]
        return [{"ended": ended, "reason_code": reason} for ended, reason in outcomes]


class World:
    """An enforcer with samples given by hand, on a loop whose clock the test sets."""

    def __init__(self) -> None:
        plan = NO_GPUS.plan._replace(over_budget={UUID: TERMINATE})
        inventory = builders.inventory(builders.gpu(pci_address=f"0000:{GPU}", uuid=UUID))
        self.supervisor = DescribedSupervisor(NO_GPUS._replace(plan=plan, inventory=inventory))
        self.change_settings(over_budget="terminate", over_budget_grace_s=10)
        self.leases = FakeLeases()
        self.lease(LEASE)
        self.holder = Holder("name", 0)
        self.observer = GivenObserver()
        self.reported = [UUID]
        #: What the control daemons list, if it differs.
        self.confirmed: Any = None
        self.terminator = RecordingTerminator(
            lambda: self.confirmed or self.observer.listed, lambda: self.holder.uid
        )
        self.loop = SetLoop()
        self.enforcer = self.restarted()

    def change_settings(self, **changed: Any) -> None:
        self.supervisor.settings_read = self.supervisor.config._replace(**changed)

    def lease(self, *leases: Any) -> None:
        """Let these be the leases."""
        self.leases.listed = {"leases": list(leases), "waiting": []}

    def restarted(self) -> BudgetEnforcer:
        self.leases.ledger = Ledger([Lease(name, (), self.holder, 0.0) for name in (LEASE["id"], OTHER)])
        queries = Queries(self.supervisor.snapshot, 0.0, 1)
        self.enforcer = BudgetEnforcer(self.supervisor, queries, self.leases, self.observer, self.terminator)
        return self.enforcer

    def sample(self, at_s: float, *processes: Any) -> Excess | None:
        self.loop.now_s = at_s
        self.observer.listed = clients(*processes)
        self.observer.use = USE._replace(taken_s=at_s, gpus={uuid: GpuUsage(0, 0) for uuid in self.reported})
        return self.loop.run_until_complete(self.enforcer.sample())

    def fail(self, at_s: float) -> None:
        """The driver does not answer in time: the last list is returned again, with an error."""
        self.loop.now_s = at_s
        self.observer.listed = {**self.observer.listed, "errors": ["the driver is slow to answer"]}
        assert self.loop.run_until_complete(self.enforcer.sample()) is None

    def follow(self, begin_s: int, end_s: int, *processes: Any) -> int | None:
        """Sample every second, and enforce what is due. Returns when that was, None if never."""
        for at_s in range(begin_s, end_s + 1):
            if excess := self.sample(at_s, *processes):
                self.loop.run_until_complete(self.enforcer.enforce(excess))
                return at_s
        return None


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.loop.close()


OVER = (process(3000, OLD), process(3000))
WITHIN = (process(3000, OLD),)


def test_a_job_over_budget_for_the_grace_time_loses_its_newest_process(world: World) -> None:
    assert world.follow(100, 109, *OVER) is None
    assert world.enforcer.is_watching
    assert world.follow(110, 110, *OVER) == 110
    assert world.terminator.ended == [(NEW, TERM)]
    assert world.enforcer.terminations == {GPU: 1}
    (cause,) = world.terminator.causes
    assert cause == f"{excesses_of(*OVER)[0].text} and have exceeded the budget for at least 10 s"


def test_a_sample_within_the_budget_starts_the_time_again(world: World) -> None:
    assert world.follow(100, 109, *OVER) is None
    assert world.sample(110, *WITHIN) is None
    assert not world.enforcer.is_watching
    assert world.follow(111, 121, *OVER) == 121


def test_a_failed_sample_neither_ends_nor_restarts_the_time(world: World) -> None:
    assert world.follow(100, 108, *OVER) is None
    world.fail(109)
    world.fail(112)
    assert world.follow(113, 113, *OVER) == 113


def test_a_gap_of_several_samples_starts_the_time_again(world: World) -> None:
    assert world.follow(100, 109, *OVER) is None
    assert world.follow(115, 124, *OVER) is None
    assert world.follow(125, 125, *OVER) == 125


def test_a_sample_without_the_memory_of_a_process_changes_nothing(world: World) -> None:
    assert world.follow(100, 108, *OVER) is None
    assert world.sample(109, process(3000, OLD), process(None)) is None
    world.reported = []
    assert world.sample(110) is None
    assert world.enforcer.is_watching
    world.reported = [UUID]
    assert world.follow(111, 111, *OVER) == 111


def test_the_same_list_is_not_counted_twice(world: World) -> None:
    assert world.sample(100, *OVER) is None
    for at_s in range(101, 120):
        world.loop.now_s = at_s
        assert world.loop.run_until_complete(world.enforcer.sample()) is None
    assert world.terminator.ended == []


@pytest.mark.parametrize("key", ["over_budget_grace_s", "cuda_mps_replicas"])
def test_a_changed_configuration_starts_the_time_again(world: World, key: str) -> None:
    assert world.follow(100, 109, *OVER) is None
    world.change_settings(**{key: 9})
    assert world.follow(110, 118, *OVER) is None
    assert world.terminator.ended == []


def test_a_reload_spares_a_process_about_to_be_terminated(world: World) -> None:
    excess = next(filter(None, (world.sample(at_s, *OVER) for at_s in range(100, 111))))

    def reload() -> None:
        world.change_settings(over_budget="report")

    world.terminator.meanwhile = reload
    world.loop.run_until_complete(world.enforcer.enforce(excess))
    assert world.terminator.ended == []


def test_a_daemon_that_is_stopping_terminates_no_process(world: World) -> None:
    def refuse() -> None:
        raise BusyError("the daemon is stopping", "")

    world.terminator.meanwhile = refuse
    assert world.follow(100, 110, *OVER) == 110
    assert world.enforcer.terminations[GPU] == 0


def test_a_changed_budget_starts_the_time_again(world: World) -> None:
    assert world.follow(100, 109, *OVER) is None
    world.lease({**LEASE, **lease_of({"00:06.0-1": 5000})})
    assert world.follow(110, 119, *OVER) is None


def test_a_restarted_daemon_starts_the_time_again(world: World) -> None:
    assert world.follow(100, 109, *OVER) is None
    world.restarted()
    assert world.follow(110, 119, *OVER) is None
    assert world.follow(120, 120, *OVER) == 120


def test_after_a_termination_the_time_starts_again(world: World) -> None:
    assert world.follow(100, 110, *OVER) == 110
    assert world.follow(111, 120, *OVER) is None
    assert world.follow(121, 121, *OVER) == 121


def test_the_memory_of_a_process_that_has_ended_does_not_count(world: World) -> None:
    """NVML may list it for a while, and the kernel may still be freeing its memory."""
    assert world.follow(100, 130, process(3000), process(3000, GONE)) is None
    assert not world.enforcer.is_watching


def test_with_report_nothing_is_sampled_or_terminated(world: World) -> None:
    world.supervisor.described = NO_GPUS
    assert world.follow(100, 130, *OVER) is None
    assert not world.enforcer.is_watching


# -- which process is terminated


@pytest.mark.parametrize(
    "confirmed",
    [
        clients(*WITHIN),
        clients(*OVER, errors=("domain host: the control daemon does not answer",)),
        clients(process(3000, OLD), process(3000, mps=None)),
        clients(process(3000, OLD), process(3000, server=None)),
    ],
    ids=["within its budget", "not known", "perhaps no client", "no client of ours"],
)
def test_nothing_is_terminated_unless_the_control_daemons_confirm_it(world: World, confirmed: Any) -> None:
    world.confirmed = confirmed
    assert world.follow(100, 110, *OVER) == 110
    assert world.terminator.ended == []
    assert world.enforcer.terminations[GPU] == 0


def test_a_process_that_its_user_may_not_end_does_not_count(world: World) -> None:
    """As one that root has started, with the lease's id in its environment."""
    world.holder = Holder("name", os.getuid() + 1)
    world.restarted()
    assert world.follow(0, 30, *OVER) is None
    assert world.terminator.ended == []


def test_a_process_that_ignores_sigterm_is_killed_once_disconnected(world: World) -> None:
    world.terminator.outcomes = [(False, "")]
    world.follow(100, 110, *OVER)
    assert [(pid, [one.name for one in signals]) for pid, signals in world.terminator.ended] == [  # type: ignore[attr-defined]
        (NEW, ["SIGTERM"]),
        (NEW, ["SIGKILL"]),
    ]
    assert world.enforcer.terminations == {GPU: 1}


def test_a_process_that_its_server_does_not_disconnect_is_not_killed(world: World) -> None:
    world.terminator.outcomes = [(False, "failed")]
    world.follow(100, 110, *OVER)
    assert world.terminator.ended == [(NEW, TERM)]
    assert world.enforcer.terminations[GPU] == 0
    assert world.follow(111, 121, *OVER) == 121
    assert world.terminator.ended == [(NEW, TERM)] * 2, "it was tried again"


def test_while_a_killed_process_still_runs_no_other_is_terminated(world: World) -> None:
    world.terminator.outcomes = [(False, ""), (False, "")]
    world.follow(100, 110, *OVER)
    before = list(world.terminator.ended)
    assert world.follow(111, 121, *OVER, process(3000, 1)) == 121
    assert world.terminator.ended == before


def test_the_job_that_is_over_budget_longest_comes_first(world: World) -> None:
    second = {**LEASE, **lease_of({"00:06.0-2": 1000}), "id": OTHER, "pid": None}
    world.lease(second, LEASE)
    its = process(1001, 1, lease=OTHER)
    assert world.follow(100, 104, *OVER) is None
    assert world.follow(105, 115, *OVER, its) == 110
    assert world.terminator.ended == [(NEW, TERM)]
    assert world.follow(111, 120, *WITHIN, its) == 115
    assert world.terminator.ended == [(NEW, TERM), (1, TERM)]
