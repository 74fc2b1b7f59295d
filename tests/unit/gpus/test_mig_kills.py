"""MIG layouts after a daemon that was killed at any step of bringing one into effect."""

from __future__ import annotations

import os
import signal
from typing import Any, cast

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.errors import HostError
from yunion_mps.core.mig import DISABLED
from yunion_mps.core.paths import Paths
from yunion_mps.gpus.mig_record import MigIntent, MigRecord
from yunion_mps.gpus.mig_steps import bring_into_effect
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.planning.mig import describe, layout_profiles

from unit.mig_host import NOTHING_BUSY, MakeMigHost, MigHost


class _Kill:
    """Kills this process before its n-th call of an object's methods: right after the previous call."""

    def __init__(self, target: Any, counter: list[int], at: int) -> None:
        self._target, self._counter, self._at = target, counter, at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self._counter[0] += 1
            if self._counter[0] == self._at:
                os.kill(os.getpid(), signal.SIGKILL)
            return found(*arguments)

        return call


def killed_at(host: MigHost, step: int, *names: str) -> bool:
    """Apply the layout in another process that is killed at this step; False if it has fewer steps."""
    pid = os.fork()
    if pid == 0:
        try:
            counter = [0]
            originals = Originals(Store(Paths(str(host.sim.root))))
            with Nvml() as nvml:
                mig: Any = _Kill(Mig(nvml), counter, step)
                killing: Any = _Kill(originals, counter, step)
                bring_into_effect([host.look(*names)], mig, killing, NOTHING_BUSY)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


#: A layout, the one after it, and how many steps there are at least: 75 in all.
FROM_AND_TO = [
    ([], ["all-1g.10gb"], 28),
    (["all-1g.10gb"], ["all-balanced"], 18),
    (["all-balanced"], ["4g.40gb", "2g.20gb", "1g.10gb"], 18),
    (["all-balanced"], [DISABLED], 13),
]


@pytest.mark.parametrize(("before", "after", "steps"), FROM_AND_TO)
def test_after_a_kill_at_any_step_the_next_daemon_finishes(
    mig_host: MakeMigHost, before: list[str], after: list[str], steps: int
) -> None:
    host = mig_host()
    step = 0
    while True:
        host.sim.gpus[0].mig = False
        host.originals.forget_layout(str(host.gpu.uuid))
        if before:
            assert host.apply(*before) == ""
        step += 1
        if not killed_at(host, step, *after):
            break
        _finish(host, after)
    assert step > steps, "there is a step before each call of the driver and the state file"


def _finish(host: MigHost, after: list[str]) -> None:
    """The layout is completed by itself: every instance that the killed daemon has created is ours."""
    assert host.apply(*after) == ""
    gpu = host.gpu
    assert sorted(host.ours) == [one.id for one in gpu.mig_instances]
    if after == [DISABLED]:
        assert gpu.mig_enabled is False
        return
    assert describe(gpu.mig_instances) == describe(layout_profiles(after, gpu))
    assert all(one.uuid for one in gpu.mig_instances)


@pytest.mark.parametrize(("before", "after"), [([], ["all-2g.20gb"]), (["all-2g.20gb"], ["2g.20gb"])])
def test_a_kill_never_makes_an_instance_of_another_program_ours(
    mig_host: MakeMigHost, before: list[str], after: list[str]
) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    step = 0
    while True:
        host.sim.gpus[0].mig = True
        host.originals.forget_layout(str(host.gpu.uuid))
        other = host.sim.create_mig_devices(0, "1g.10gb")[0]
        if before:
            assert host.apply("2g.20gb") == ""
        step += 1
        if not killed_at(host, step, *after):
            break
        host.apply("all-7g.80gb")
        assert other in host.sim.gpus[0].mig_devices()
    assert step > 3


def test_an_instance_that_replaces_one_of_ours_after_a_kill_is_not_ours(mig_host: MakeMigHost) -> None:
    """The driver gives it the same id, because that depends on its place."""
    host = mig_host([{"kind": "h100", "mig": True}])
    step = 0
    while True:
        host.sim.gpus[0].mig = True
        host.originals.forget_layout(str(host.gpu.uuid))
        assert host.apply("7g.80gb") == ""
        step += 1
        if not killed_at(host, step, "3g.40gb"):
            break
        host.sim.gpus[0].end_instances()
        others = host.sim.create_mig_devices(0, "7g.80gb")
        assert host.apply("all-1g.10gb").code == reasons.MIG_FOREIGN_INSTANCE, step
        assert host.sim.gpus[0].mig_devices() == others
    assert step > 5


def test_an_instance_is_ours_although_only_its_intent_could_be_recorded(mig_host: MakeMigHost) -> None:
    """The disk is full as soon as the driver has created it."""
    host = mig_host()
    full = _FullDisk(host.originals)
    look = host.look("3g.40gb")
    layout_writes = []
    for writes in range(1, 10):
        host.sim.gpus[0].mig = False
        host.originals.forget_layout(str(host.gpu.uuid))
        full.writes_left = writes
        result = bring_into_effect([look], host.mig, cast(Originals, full), NOTHING_BUSY)
        why = result.reasons[str(host.gpu.uuid)]
        layout_writes.append(why.code)
        assert host.apply("3g.40gb") == "", writes
        assert set(host.ours) == {one.id for one in host.gpu.mig_instances}
        if not why:
            break
    assert layout_writes[:-1] == [reasons.HOST_ERROR] * (len(layout_writes) - 1)
    assert len(layout_writes) > 3


class _FullDisk:
    """A state file whose disk is full after some writes."""

    def __init__(self, originals: Originals) -> None:
        self._originals = originals
        self.writes_left = 0

    def write_layout(self, uuid: str, record: MigRecord) -> None:
        if not self.writes_left:
            raise HostError("the state file cannot be written: database or disk is full")
        self.writes_left -= 1
        self._originals.write_layout(uuid, record)

    def layout(self, uuid: str) -> MigRecord:
        return self._originals.layout(uuid)


@pytest.mark.parametrize("cause", ["before", "complete", "elsewhere"])
def test_an_intent_claims_only_a_new_empty_instance_at_its_place(mig_host: MakeMigHost, cause: str) -> None:
    """Not one that was there before, that another program has completed, or that is at another place."""
    host = mig_host([{"kind": "h100", "mig": True}])
    profile = layout_profiles(["3g.40gb"], host.gpu)[0]
    start = profile.starts[1] if cause == "elsewhere" else profile.starts[0]
    number = host.mig.create(str(host.gpu.uuid), profile, profile.starts[0])
    if cause == "complete":
        host.mig.create_compute(str(host.gpu.uuid), number)
    before = (number,) if cause == "before" else ()
    record = MigRecord(intent=MigIntent(profile.name, start, before))
    host.originals.write_layout(str(host.gpu.uuid), record)
    assert host.apply("7g.80gb").code == reasons.MIG_FOREIGN_INSTANCE
    assert [one.id for one in host.gpu.mig_instances] == [number]
    assert host.originals.layout(str(host.gpu.uuid)).intent is None


def test_a_refused_creation_leaves_no_intent_for_another_programs_instance(mig_host: MakeMigHost) -> None:
    host = mig_host([{"kind": "h100", "mig": True}])
    host.sim.fail("nvmlDeviceCreateGpuInstanceWithPlacement", "insufficient_resources", times=1)
    assert host.apply("7g.80gb").code == reasons.MIG_INSUFFICIENT_RESOURCES
    profile = layout_profiles(["7g.80gb"], host.gpu)[0]
    number = host.mig.create(str(host.gpu.uuid), profile, 0)
    assert host.apply("all-1g.10gb").code == reasons.MIG_FOREIGN_INSTANCE
    assert [one.id for one in host.gpu.mig_instances] == [number]
