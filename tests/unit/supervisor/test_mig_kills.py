"""MIG layouts after a daemon that was killed at any step of bringing one into effect."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from yunion_mps import reasons
from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.mig import DISABLED
from yunion_mps.paths import Paths
from yunion_mps.planning.mig import describe, resolve
from yunion_mps.supervisor.mig import LayoutTask, carry_out

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
            store = Store(Paths(str(host.sim.root)))
            with Nvml() as nvml:
                mig: Any = _Kill(Mig(nvml), counter, step)
                killing: Any = _Kill(store, counter, step)
                carry_out([LayoutTask(host.layout(*names), host.gpu, NOTHING_BUSY)], mig, killing)
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
        host.store.forget_mig(str(host.gpu.uuid))
        if before:
            assert host.apply(*before) == ""
        step += 1
        if not killed_at(host, step, *after):
            break
        _finish(host, after)
    assert step > steps, "there is a step before each call of the driver and the state file"


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
    assert step > 3
