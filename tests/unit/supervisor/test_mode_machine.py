"""Compute modes under faults and commands in any order: none is changed and forgotten."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import ROOT_VARIABLE, Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store

from simhost import SimHost
from unit.supervised import Supervised, configure, modes

GPUS = [{"kind": "v100"}, {"kind": "a100", "compute_mode": "prohibited"}]
which = st.integers(0, len(GPUS) - 1)


class Modes(RuleBasedStateMachine):
    """A host with two GPUs, and one daemon after another on it.

    What a GPU's mode was is known to this machine alone: it looks before our code may do something, and
    compares what our code has recorded and done with that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self.host = self._stack.enter_context(SimHost.create(GPUS))
        self._stack.enter_context(self.host.pynvml())
        for name in ("PATH", ROOT_VARIABLE):
            self._stack.enter_context(_variable(name, self.host.env[name]))
        configure(self.host)
        self.runs: Supervised | None = None
        self.lost: set[int] = set()
        self.refused: set[int] = set()
        #: What each GPU (UUID) that we have changed is to have again.
        self.owed: dict[str, str] = {}

    # -- commands

    @rule()
    def start(self) -> None:
        if self.runs is None:
            self.ours(self._start)

    @rule()
    def stop(self) -> None:
        if self.runs:
            self.ours(self._stop)
            assert not self.owed or self.lost or self.refused, "what can be restored is"

    @rule()
    def crash(self) -> None:
        """The control daemon lives on, and the next daemon takes it over."""
        if self.runs:
            self.runs.supervisor.release()
            self.runs.preflight.close()
            self.runs = None

    @rule(mode=st.sampled_from(["exclusive_process", "keep"]), enabled=st.sampled_from([True, True, False]))
    def configure(self, mode: str, *, enabled: bool) -> None:
        configure(self.host, enable_cuda_mps=str(enabled).lower(), cuda_mps_compute_mode=mode)

    @rule(numbers=st.sampled_from([(4, 4), (4,), (2, 8)]))
    def divide(self, numbers: tuple[int, ...]) -> None:
        self.host.divide(*numbers)

    @rule()
    def reload(self) -> None:
        if self.runs:
            self.ours(self._reload)

    # -- what happens to the host

    @rule(slot=which, mode=st.sampled_from(["default", "prohibited", "exclusive_process"]))
    def meddle(self, slot: int, mode: str) -> None:
        self.host.gpus[slot].compute_mode = mode

    @rule(slot=which)
    def lose(self, slot: int) -> None:
        self.host.gpus[slot].lose()
        self.lost.add(slot)

    @rule(slot=which)
    def restore(self, slot: int) -> None:
        self.host.gpus[slot].restore()
        self.lost.discard(slot)

    @rule(slot=which)
    def refuse(self, slot: int) -> None:
        """The next mode that is set there is not."""
        self.refused.add(slot)
        self.host.fail("nvmlDeviceSetComputeMode", "unknown", gpu=slot, times=1)

    @rule()
    def obey(self) -> None:
        self.host.clear()
        self.refused.clear()

    @rule()
    def poll(self) -> None:
        if self.runs:
            self.ours(self._poll)

    # -- what must hold

    def ours(self, work: Callable[[Supervised | None], Supervised | None]) -> None:
        """Have our code do something, and see what has become of the modes by that."""
        uuids = [gpu.uuid for gpu in self.host.gpus]
        before = dict(zip(uuids, modes(self.host)))
        self.runs = work(self.runs)
        after = dict(zip(uuids, modes(self.host)))
        recorded = self._recorded()
        for uuid in uuids:
            if uuid in recorded:
                owed = self.owed.setdefault(uuid, before[uuid])
                assert recorded[uuid] == owed, "what it was before we first touched it"
            elif uuid in self.owed:
                assert after[uuid] == self.owed.pop(uuid), "nothing is forgotten that was not restored"
            else:
                assert after[uuid] == before[uuid], "nothing is changed that is not recorded"

    def _recorded(self) -> dict[str, str]:
        with contextlib.closing(Store(Paths(str(self.host.root)))) as store:
            return {uuid: mode.lower() for uuid, mode in Originals(store).of("compute_mode").items()}

    def teardown(self) -> None:
        try:
            for slot in range(len(GPUS)):
                self.restore(slot)
            self.host.clear()
            configure(self.host)
            self.host.divide(4, 4)
            if self.runs is None:
                self.ours(self._start)
            assert self.runs, "with nothing wrong it starts"
            self.ours(self._stop)
            assert self.owed == {}
        finally:
            if self.runs:
                self.runs.stop()
                self.runs.preflight.close()
            self._stack.close()

    # -- our code

    def _start(self, _: Supervised | None) -> Supervised | None:
        try:
            made = Supervised(self.host)
        except YunionError:
            return None
        try:
            return made.start()
        except YunionError:
            made.stop()
            made.preflight.close()
            return None

    def _stop(self, runs: Supervised | None) -> None:
        assert runs
        runs.stop()
        runs.preflight.close()

    def _reload(self, runs: Supervised | None) -> Supervised | None:
        assert runs
        with contextlib.suppress(YunionError):
            runs.reload()
        return runs

    def _poll(self, runs: Supervised | None) -> Supervised | None:
        assert runs
        if runs.supervisor.nvml:
            runs.rescan()
        runs.reconcile()
        return runs


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name, "")
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ[name] = before


TestModes = Modes.TestCase
TestModes.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
