"""MIG layouts on a host: what is applied, what is in the way, and what a killed daemon leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from yunion_mps import reasons
from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner
from yunion_mps.mig import DISABLED, MigLayout
from yunion_mps.models import Gpu
from yunion_mps.paths import Paths
from yunion_mps.planning.mig import describe, resolve
from yunion_mps.reasons import Reason
from yunion_mps.supervisor.mig import LayoutResult, LayoutTask, MigRecord, carry_out, restore

from simhost import Description, SimHost

NOTHING_BUSY: frozenset[str] = frozenset()


class MigHost(NamedTuple):
    """A host whose first GPU gets layouts."""

    sim: SimHost
    mig: Mig
    nvml: Nvml
    store: Store

    @property
    def gpu(self) -> Gpu:
        return Scanner(Paths(str(self.sim.root))).scan(self.nvml).gpus[0]

    @property
    def has(self) -> str:
        """What nvidia-smi would list."""
        return describe(self.gpu.mig_instances)

    @property
    def ours(self) -> list[int]:
        return [one.id for one in MigRecord.read(self.store, str(self.gpu.uuid)).created]

    def layout(self, *names: str, **given: Any) -> MigLayout:
        gpu = self.gpu
        return MigLayout(str(gpu.uuid), names[0] != DISABLED, resolve(names, gpu), **given)

    def apply(self, *names: str, busy: frozenset[str] | None = NOTHING_BUSY, force: bool = False) -> Reason:
        return self.result(LayoutTask(self.layout(*names), self.gpu, busy, force)).reasons[str(self.gpu.uuid)]

    def result(self, task: LayoutTask) -> LayoutResult:
        return carry_out([task], self.mig, self.store)

    def process(self, instance: int, pid: int = 4321) -> None:
        self.sim.gpus[0].add_process(pid, 100, on=(instance, 0))


MakeMigHost = Callable[..., MigHost]


@pytest.fixture
def mig_host() -> Iterator[MakeMigHost]:
    with ExitStack() as stack:

        def make(description: Description | None = None) -> MigHost:
            sim = stack.enter_context(SimHost.create(description or [{"kind": "h100"}]))
            stack.enter_context(sim.pynvml())
            nvml = stack.enter_context(Nvml())
            store = Store(Paths(str(sim.root)))
            stack.callback(store.close)
            return MigHost(sim, Mig(nvml), nvml, store)

        yield make


# -- what is applied


def test_a_layout_is_applied_mode_first(mig_host: MakeMigHost) -> None:
    host = mig_host()
    task = LayoutTask(host.layout("all-balanced"), host.gpu, NOTHING_BUSY)
    result = host.result(task)
    assert result.reasons == {host.gpu.uuid: ""}
    assert result.changes[str(host.gpu.uuid)].startswith("switched MIG mode on, created g")
    assert host.has == "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb"
    assert sorted(host.ours) == sorted(one.id for one in host.gpu.mig_instances)


def test_a_layout_in_effect_is_left_alone(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-balanced")
    before = host.gpu.mig_instances
    host.sim.fail("nvmlDeviceCreateGpuInstance*", "unknown")
    host.sim.fail("nvmlGpuInstanceDestroy", "unknown")
    host.sim.fail("nvmlDeviceSetMigMode", "unknown")
    assert host.apply("all-balanced") == ""
    assert host.gpu.mig_instances == before


def test_a_new_layout_keeps_the_instances_that_it_has_too(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("3g.40gb", "2g.20gb")
    kept = {one.uuid for one in host.gpu.mig_instances}
    assert host.apply("3g.40gb", "2g.20gb", "1g.10gb") == ""
    assert kept < {one.uuid for one in host.gpu.mig_instances}


def test_all_disabled_destroys_what_is_ours_and_switches_the_mode_off(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-1g.10gb")
    assert host.apply(DISABLED) == ""
    assert (host.gpu.mig_enabled, host.gpu.mig_instances) == (False, ())


def test_every_layout_agrees_with_nvidia_smi(mig_host: MakeMigHost) -> None:
    host = mig_host()
    for names in (["all-1g.10gb"], ["all-balanced"], ["4g.40gb", "1g.20gb", "1g.10gb"], ["all-7g.80gb"]):
        assert host.apply(*names) == ""
        listed = host.sim.run(["nvidia-smi", "mig", "-lgi"], check=True).stdout
        assert {f"{one.id}" for one in host.gpu.mig_instances} == {
            row.split()[-3] for row in listed.splitlines() if "MIG " in row
        }
        shown = host.sim.run(["nvidia-smi", "-L"], check=True).stdout
        assert all(one.uuid in shown for one in host.gpu.mig_instances)


# -- what it waits for


def test_a_mode_that_needs_a_reset_is_pending(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "a100"}])
    why = host.apply("all-1g.5gb")
    assert (why, why.code) == (
        "MIG mode will be on after the next reset of the GPU",
        reasons.MIG_RESET_REQUIRED,
    )
    assert host.apply("all-1g.5gb").code == reasons.MIG_RESET_REQUIRED
    host.sim.gpus[0].reset()
    assert host.apply("all-1g.5gb") == ""
    assert host.has == "7 x 1g.5gb"


def test_no_mode_is_switched_on_a_gpu_with_processes_or_leases(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.sim.gpus[0].add_process(4321, 100)
    why = host.apply("all-1g.10gb", force=True)
    assert (why, why.code) == (
        "MIG mode cannot be switched on while processes use the GPU (PID 4321)",
        reasons.MIG_IN_USE,
    )
    host.sim.gpus[0].remove_process(4321)
    leased = frozenset({str(host.gpu.uuid)})
    assert host.apply("all-1g.10gb", busy=leased).code == reasons.MIG_IN_USE
    assert host.gpu.mig_pending is False
    assert host.apply("all-1g.10gb", busy=leased, force=True) == ""


def test_nothing_is_taken_away_before_the_leases_are_known(mig_host: MakeMigHost) -> None:
    host = mig_host()
    assert host.apply("all-1g.10gb", busy=None).code == reasons.MIG_PENDING
    host.apply("all-2g.20gb")
    assert host.apply("all-3g.40gb", busy=None).code == reasons.MIG_IN_USE
    assert host.has == "3 x 2g.20gb"
    host.sim.reboot()
    assert host.apply("all-2g.20gb", busy=None) == "", "what is only created needs no leases"


def test_an_instance_with_a_client_is_not_destroyed_even_now(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    number = host.gpu.mig_instances[0].id
    host.process(number)
    for force in (False, True):
        why = host.apply("all-1g.10gb", force=force)
        assert why.code == reasons.MIG_IN_USE
        assert f"instance g{number} (3g.40gb) is in the way of its MIG layout" in why
        assert "PID 4321" in why
        assert host.has == "2 x 3g.40gb"
    host.sim.gpus[0].remove_process(4321)
    assert host.apply("all-1g.10gb") == ""


def test_a_leased_instance_is_destroyed_only_now(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-3g.40gb")
    leased = frozenset({host.gpu.mig_instances[1].uuid})
    why = host.apply("all-1g.10gb", busy=leased)
    assert (why, why.code) == (
        "its MIG layout waits for the leases of 1 x 3g.40gb to end",
        reasons.MIG_IN_USE,
    )
    assert host.has == "2 x 3g.40gb"
    assert host.apply("all-1g.10gb", busy=leased, force=True) == ""


def test_an_instance_of_another_program_is_destroyed_only_now(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    (other,) = host.sim.create_mig_devices(0, "3g.40gb")
    why = host.apply("all-7g.80gb")
    assert why.code == reasons.MIG_FOREIGN_INSTANCE
    assert f"instance g{other.gpu_instance} (3g.40gb), which another program created" in why
    assert host.sim.gpus[0].mig_devices() == [other]
    assert host.apply(DISABLED).code == reasons.MIG_FOREIGN_INSTANCE
    assert host.apply("all-7g.80gb", force=True) == ""


def test_an_instance_of_another_program_is_used_if_the_layout_has_it(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    (other,) = host.sim.create_mig_devices(0, "3g.40gb")
    assert host.apply("all-3g.40gb") == ""
    assert other.uuid in {one.uuid for one in host.gpu.mig_instances}
    assert other.gpu_instance not in host.ours
    assert host.apply("all-7g.80gb").code == reasons.MIG_FOREIGN_INSTANCE


def test_an_instance_of_another_program_beside_the_layout_stays_even_now(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    (other,) = host.sim.create_mig_devices(0, "1g.10gb")
    for force in (False, True):
        assert host.apply("2g.20gb", force=force) == ""
        assert other in host.sim.gpus[0].mig_devices()


def test_an_instance_made_in_our_place_is_not_ours(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-7g.80gb")
    host.sim.gpus[0].end_instances()
    (other,) = host.sim.create_mig_devices(0, "7g.80gb")
    assert host.apply("all-1g.10gb").code == reasons.MIG_FOREIGN_INSTANCE
    assert host.sim.gpus[0].mig_devices() == [other]


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("nvmlDeviceSetMigMode", "no_permission", reasons.MIG_REFUSED),
        ("nvmlDeviceCreateGpuInstance*", "insufficient_resources", reasons.MIG_REFUSED),
        ("nvmlDeviceCreateGpuInstance*", "reset_required", reasons.MIG_RESET_REQUIRED),
        ("nvmlGpuInstanceCreateComputeInstance", "unknown", reasons.MIG_REFUSED),
    ],
)
def test_a_refusal_is_a_reason_and_the_next_attempt_continues(
    mig_host: MakeMigHost, call: str, error: str, code: str
) -> None:
    host = mig_host()
    host.sim.fail(call, error)
    why = host.apply("all-balanced")
    assert (why.code, why.startswith("its MIG layout cannot be changed: ")) == (code, True)
    host.sim.clear()
    assert host.apply("all-balanced") == ""
    assert host.has == "2 x 1g.10gb + 1 x 2g.20gb + 1 x 3g.40gb"


def test_instances_are_created_again_after_a_reboot(mig_host: MakeMigHost) -> None:
    host = mig_host()
    host.apply("all-2g.20gb")
    host.sim.reboot()
    assert (host.gpu.mig_enabled, host.has) == (True, "")
    assert host.apply("all-2g.20gb") == ""
    assert host.has == "3 x 2g.20gb"
    assert host.apply("all-1g.10gb") == "", "they are ours again"


# -- what is restored


@pytest.mark.parametrize("before", [[], ["1g.10gb", "3g.40gb"]])
def test_the_layout_from_before_is_restored_only_if_so_configured(
    mig_host: MakeMigHost, before: list[str]
) -> None:
    host = mig_host([{"kind": "h100", "mig": bool(before)}])
    if before:
        host.sim.create_mig_devices(0, *before)
    had = (host.gpu.mig_enabled, host.has)
    host.apply("all-2g.20gb", force=True)
    restore([host.layout("all-2g.20gb")], [host.gpu], host.nvml, host.store, ())
    assert host.has.endswith("3 x 2g.20gb")
    restore([host.layout("all-2g.20gb", restore=True)], [host.gpu], host.nvml, host.store, ())
    assert (host.gpu.mig_enabled, host.has) == had
    assert host.ours == []


# -- a daemon that is killed


class _Kill:
    """Kills this process before or after its n-th call of an object's methods."""

    def __init__(self, target: Any, counter: list[int], at: int) -> None:
        self._target, self._counter, self._at = target, counter, at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self._step()
            result = found(*arguments)
            self._step()
            return result

        return call

    def _step(self) -> None:
        self._counter[0] += 1
        if self._counter[0] == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_at(host: MigHost, step: int, *names: str) -> bool:
    """Apply the layout in another process that is killed at this step; False if it has fewer steps."""
    pid = os.fork()
    if pid == 0:
        try:
            counter = [0]
            store = Store(Paths(str(host.sim.root)))
            with Nvml() as nvml:
                mig: Any = _Kill(Mig(nvml), counter, step)
                killing: Any = _Kill(store, counter, step)
                carry_out([LayoutTask(host.layout(*names), host.gpu, NOTHING_BUSY)], mig, killing)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


#: A layout, the one after it, and how many steps there are at least: 150 in all.
FROM_AND_TO = [
    ([], ["all-1g.10gb"], 55),
    (["all-1g.10gb"], ["all-balanced"], 35),
    (["all-balanced"], ["4g.40gb", "2g.20gb", "1g.10gb"], 35),
    (["all-balanced"], [DISABLED], 25),
]


@pytest.mark.parametrize(("before", "after", "steps"), FROM_AND_TO)
def test_after_a_kill_at_any_step_the_next_daemon_finishes(
    mig_host: MakeMigHost, before: list[str], after: list[str], steps: int
) -> None:
    host = mig_host()
    step = 0
    while True:
        host.sim.gpus[0].mig = False
        host.store.forget_mig(str(host.gpu.uuid))
        if before:
            assert host.apply(*before) == ""
        step += 1
        if not killed_at(host, step, *after):
            break
        _finish(host, after)
    assert step > steps, "there is a step before and after each call of the driver and the state file"


def _finish(host: MigHost, after: list[str]) -> None:
    """The layout is completed; an instance whose creation was not recorded is reported, not destroyed."""
    why = host.apply(*after)
    if why:
        assert why.code == reasons.MIG_FOREIGN_INSTANCE
        assert host.apply(*after, force=True) == ""
    gpu = host.gpu
    if after == [DISABLED]:
        assert gpu.mig_enabled is False
        return
    assert describe(gpu.mig_instances) == describe(resolve(after, gpu))
    assert all(one.uuid for one in gpu.mig_instances)


@pytest.mark.parametrize(("before", "after"), [([], ["all-2g.20gb"]), (["all-2g.20gb"], ["2g.20gb"])])
def test_a_kill_never_makes_an_instance_of_another_program_ours(
    mig_host: MakeMigHost, before: list[str], after: list[str]
) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    step = 0
    while True:
        host.sim.gpus[0].mig = True
        host.store.forget_mig(str(host.gpu.uuid))
        other = host.sim.create_mig_devices(0, "1g.10gb")[0]
        if before:
            assert host.apply("2g.20gb") == ""
        step += 1
        if not killed_at(host, step, *after):
            break
        host.apply("all-7g.80gb")
        assert other in host.sim.gpus[0].mig_devices()
    assert step > 5
