"""The choice of the step to a MIG layout: which step, and when the layout takes effect."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.mig import MigInstance, MigLayout, MigProfile
from yunion_mps.core.reasons import Reason
from yunion_mps.core.waits import Users, wait_reason
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_layout import FoundLayout, LayoutLook, decide, effect_of
from yunion_mps.gpus.mig_record import MigRecord
from yunion_mps.inventory.mig import MigMode

from unit import builders

HALF = MigProfile(9, "3g.40gb", 3, 40448, 60, 2, 4, (0, 4))
WHOLE = MigProfile(0, "7g.80gb", 7, 81000, 132, 1, 8, (0,))
OURS = MigInstance(1, "3g.40gb", 0, 4, "MIG-1")
ON, OFF = MigMode(enabled=True, pending=True), MigMode(enabled=False, pending=False)
HALVED = FoundLayout(ON, (OURS,), MigRecord(before=(), created=(OURS,)))


def look(*profiles: MigProfile, **given: Any) -> LayoutLook:
    """A layout of an H100."""
    gpu = builders.gpu(1, uuid="GPU-1", mig_profiles=(HALF, WHOLE), compute_capability=(9, 0))
    return LayoutLook(MigLayout("GPU-1", bool(profiles), profiles), gpu, **given)


def test_a_switch_of_the_mode_and_the_instances_are_one_step() -> None:
    step = decide(look(HALF, HALF), FoundLayout(OFF), Blockers())
    assert (step.mode, [place.start for place in step.create], step.why) == (True, [0, 4], "")
    step = decide(look(), HALVED, Blockers())
    assert (step.mode, step.destroy, step.why) == (False, (OURS,), "")


@pytest.mark.parametrize("waits", ["lease", "process"])
def test_a_step_that_waits_changes_nothing(waits: str) -> None:
    found, blockers = HALVED, Blockers()
    if waits == "lease":
        blockers = Blockers(leases={"MIG-1": Users(("lease job",))})
        step = decide(look(WHOLE), found, blockers, offered={"MIG-1"})
    else:
        step = decide(look(WHOLE), found._replace(by_instance={1: frozenset({4321})}), blockers)
    assert step.why.code == reasons.MIG_IN_USE
    assert (step.mode, step.destroy, step.create, step.complete) == (None, (), (), ())
    assert step.record == found.record


@pytest.mark.parametrize(("capability", "effect"), [((9, 0), "at once"), ((8, 0), "after a reset of")])
def test_only_a_gpu_since_hopper_switches_at_once_for_certain(
    capability: tuple[int, int], effect: str
) -> None:
    asks = look(HALF)
    asks = asks._replace(gpu=asks.gpu._replace(compute_capability=capability))
    assert decide(asks, FoundLayout(OFF), Blockers()).effect.startswith(effect)


def test_a_layout_takes_effect_once_what_it_waits_for_has_ended() -> None:
    users = Users(("lease job",), processes=(4321,))
    why = wait_reason("its MIG layout", users, reasons.MIG_IN_USE)
    assert effect_of(why) == "once lease job and the process (PID 4321) have ended"
    step = decide(look(WHOLE), HALVED._replace(by_instance={1: frozenset({4321})}), Blockers())
    assert step.effect == "once the process (PID 4321) has ended"


def test_a_layout_that_the_operator_delays_says_why() -> None:
    why = Reason("MIG mode will be on after the next reset of the GPU", reasons.MIG_RESET_REQUIRED)
    assert effect_of(why) == f"later: {why}"
    requested = FoundLayout(MigMode(enabled=False, pending=True))
    assert decide(look(HALF, last=why), requested, Blockers()).why == why


def test_a_withdrawn_request_is_cancelled_or_left_alone() -> None:
    """If the mode has changed meanwhile, the GPU is not as it was before."""
    requested = HALVED._replace(mode=MigMode(enabled=False, pending=True), instances=())
    step = decide(look(withdrawn=True), requested, None)
    assert (step.mode, step.forgets) == (False, True)
    step = decide(look(withdrawn=True), HALVED, Blockers())
    assert (step.mode, step.destroy, step.forgets) == (None, (), False)
