"""Which values are due, what is told of them, and what is remembered; no driver is asked here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest
from yunion_mps.core.enums import TIME_SLICING
from yunion_mps.core.errors import DriverError, ShortageError, UnsupportedError, YunionError
from yunion_mps.core.models import Event, Gpu, Holder, Lease, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import (
    DRIVER_HUNG,
    GPU_OTHER_DRIVER,
    SETTING_NOT_RESTORED,
    TIME_SLICE_CHANGED,
    TIME_SLICE_REFUSED,
    Reason,
)
from yunion_mps.gpus.blockers import WITHOUT_MPS, Blockers, KeptBy, Needs
from yunion_mps.gpus.kind import TRIED_AGAIN, Kind, Step
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.reconciler import (
    UNLIMITED_S,
    Look,
    Observed,
    Reconciler,
    Restoration,
    Results,
    TimeLimit,
    observe,
)
from yunion_mps.host.store import Store
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger

from unit.builders import gpu
from unit.leases.lease_builders import device

ONE, TWO = gpu(1, uuid="GPU-1"), gpu(2, uuid="GPU-2")
REFUSED = DriverError("Not Supported", "", TIME_SLICE_REFUSED)
NVML = cast(Nvml, SimpleNamespace(processes=dict))
BOTH = (ONE, TWO)


class Fan(Kind):
    """The speed of a fan, kept in a dict, that no poll reads and that the plan's time slices say."""

    name, label = "fan", "fan speed"
    refused_code, changed_code = TIME_SLICE_REFUSED, TIME_SLICE_CHANGED

    def __init__(self) -> None:
        self.speeds = {"GPU-1": "low", "GPU-2": "low"}
        self.refusing: set[str] = set()
        self.error = REFUSED
        self.shortage: ShortageError | None = None
        #: The GPUs whose speed cannot be read.
        self.hidden: set[str] = set()
        self.reads = 0

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        return plan.time_slices.get(gpu.uuid or "")

    def needs(self, step: Step) -> Needs:
        return Needs(leases=WITHOUT_MPS, processes=True) if step.restores else Needs()

    def observe(self, nvml: Nvml, uuid: str) -> str:
        self.reads += 1
        if uuid in self.hidden:
            raise REFUSED
        return self.speeds[uuid]

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        if uuid in self.refusing:
            raise self.error
        if self.shortage:
            raise self.shortage
        self.speeds[uuid] = step.target

    def command(self, uuid: str, value: str) -> str:
        return f"fan {uuid} {value}"


class Fans:
    """A reconciler of fans, with a state file."""

    def __init__(self, store: Store) -> None:
        self.kind = Fan()
        self.reconciler = Reconciler([self.kind])
        self.store = store
        self.originals = Originals(store)
        self.processes: dict[str, list[int]] = {}
        self.ledger = Ledger()
        self.events: list[Event] = []
        self.now_s = 0.0

    @property
    def blockers(self) -> dict[str, KeptBy]:
        """What keeps fans as they are, by GPU UUID."""
        return {look.uuid: kept_by for look, kept_by in self.reconciler.pending.items()}

    def due(self, gpus: Sequence[Gpu] = BOTH, **speeds: str) -> dict[str, str]:
        """Return what may have to change if the first (`a`) and second GPU (`b`) are to have these."""
        return {look.uuid: look.target for look in self._looks(gpus, speeds)}

    def _looks(self, gpus: Sequence[Gpu], speeds: Mapping[str, str]) -> list[Look]:
        plan = Plan("host", time_slices={{"a": "GPU-1", "b": "GPU-2"}[name]: speeds[name] for name in speeds})
        looks = self.reconciler.looks(plan, gpus, self.reconciler.original_values(self.originals))
        looks = self.reconciler.due(looks, [self.kind], self.now_s)
        return self.reconciler.unblocked(looks, Blockers.of(self.ledger, gpus=gpus))

    def apply(
        self, gpus: Sequence[Gpu] = BOTH, processes: Mapping[str, Sequence[int]] = {}, **speeds: str
    ) -> Results:
        looks = self._looks(gpus, speeds)
        nvml = cast(Nvml, SimpleNamespace(processes=lambda: self.processes))
        observed = observe(looks, nvml)
        blockers = Blockers.of(self.ledger, gpus=gpus, processes=observed.processes)
        decision = self.reconciler.decide(looks, observed, blockers)
        results = self.reconciler.carry_out(decision, NVML, self.originals, gpus)
        self.events += self.reconciler.note(looks, decision.pending, results, gpus, self.now_s)
        return results

    def restore(self, gpus: Sequence[Gpu] = BOTH, limit: TimeLimit | None = None) -> Restoration:
        blockers, limit = Blockers.of(Ledger(), gpus=gpus), limit or TimeLimit(UNLIMITED_S)
        return self.reconciler.restore(self.originals, gpus, NVML, blockers, limit)

    @property
    def refused(self) -> dict[str, Reason]:
        """Why fans are refused, by GPU UUID."""
        return {refusal.attempt.key[1]: refusal.reason for refusal in self.reconciler.refusals}

    @property
    def codes(self) -> list[str]:
        return [event.code for event in self.events]


@pytest.fixture
def fans(paths: Paths) -> Iterator[Fans]:
    with closing(Store(paths)) as store:
        yield Fans(store)


def test_only_values_of_working_gpus_are_due(fans: Fans) -> None:
    assert fans.due(a="high", b="low") == {"GPU-1": "high", "GPU-2": "low"}
    lost = ONE._replace(reason=Reason("it is lost", "gpu_lost"))
    assert fans.due((lost, TWO), a="high", b="low") == {"GPU-2": "low"}


def test_a_value_is_set_once_and_its_original_is_recorded_before(fans: Fans) -> None:
    fans.apply(a="high", b="low")
    assert fans.kind.speeds == {"GPU-1": "high", "GPU-2": "low"}
    assert fans.originals.of("fan") == {"GPU-1": "low", "GPU-2": "low"}
    assert [(event.subject, event.what) for event in fans.events] == [("01:00.0", "fan speed high")]
    assert fans.due(a="high", b="low") == {}
    assert fans.due(a="max", b="low") == {"GPU-1": "max"}


def test_what_the_plan_no_longer_has_is_restored_and_forgotten(fans: Fans) -> None:
    fans.apply(a="high", b="low")
    fans.apply(b="low")
    assert fans.kind.speeds["GPU-1"] == "low"
    assert fans.originals.of("fan").keys() == {"GPU-2"}
    fans.apply()
    assert fans.originals.gpus() == set()


def test_without_a_record_nothing_is_changed(fans: Fans) -> None:
    fans.store.close()
    with pytest.raises(YunionError):
        fans.originals.of("fan")
    results = fans.apply(a="high")
    assert results.not_recorded
    assert fans.kind.speeds["GPU-1"] == "low"
    assert fans.due(a="high") == {"GPU-1": "high"}, "it is tried again"


def test_a_value_is_due_again_after_its_gpu_was_lost(fans: Fans) -> None:
    fans.apply(a="high")
    assert fans.due(a="high") == {}
    assert fans.due((TWO,), a="high") == {}
    assert fans.due(a="high") == {"GPU-1": "high"}


def test_a_refused_value_is_tried_again_after_pauses_that_grow(fans: Fans) -> None:
    fans.kind.refusing.add("GPU-1")
    tries_s = []
    for second in range(200):
        fans.now_s = float(second)
        if fans.due(a="high"):
            tries_s.append(second)
            fans.apply(a="high")
    assert tries_s == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    fans.kind.refusing.clear()
    fans.now_s = 243.0
    fans.apply(a="high")
    assert (fans.kind.speeds["GPU-1"], fans.refused) == ("high", {})
    fans.now_s = 1000.0
    assert fans.due(a="high") == {}


def test_an_error_is_logged_when_it_changes(fans: Fans, caplog: pytest.LogCaptureFixture) -> None:
    fans.kind.refusing.add("GPU-1")
    for second in range(4):
        fans.now_s = 100.0 * second
        fans.apply(a="high")
    assert caplog.text.count("cannot be set") == 1


def test_after_a_call_that_hangs_no_other_gpu_is_tried_at_once(fans: Fans) -> None:
    """With many GPUs, polls would be kept waiting for minutes."""
    fans.kind.refusing = {"GPU-1"}
    fans.kind.error = DriverError("nvidia-smi did not answer", "", DRIVER_HUNG)
    fans.apply(a="high", b="high")
    assert fans.kind.speeds["GPU-2"] == "low"
    assert fans.refused.keys() == {"GPU-1", "GPU-2"}
    fans.kind.refusing, fans.now_s = set(), 1.0
    fans.apply(a="high", b="high")
    assert set(fans.kind.speeds.values()) == {"high"}


def test_what_the_driver_does_not_support_is_tried_by_a_reload_only(fans: Fans) -> None:
    fans.kind.refusing.add("GPU-1")
    fans.kind.error = UnsupportedError("Not Supported", "", TIME_SLICE_REFUSED)
    fans.apply(a="high")
    fans.now_s = 1000.0
    assert fans.due(a="high") == {}
    assert TRIED_AGAIN not in fans.refused["GPU-1"]
    fans.reconciler.check_again()
    assert fans.due(a="high") == {"GPU-1": "high"}


def test_a_refusal_lasts_until_the_entry_changes(fans: Fans) -> None:
    fans.kind.refusing.add("GPU-1")
    fans.apply(a="high", b="high")
    assert {uuid: why.code for uuid, why in fans.refused.items()} == {"GPU-1": TIME_SLICE_REFUSED}
    assert fans.due(b="high") == {"GPU-1": "low"}, "as recorded before it was tried"
    assert fans.refused == {}
    assert fans.due(a="high", b="high") == {"GPU-1": "high"}
    assert fans.codes == [""], "the refusal is a condition"


def test_a_refused_restoration_is_a_condition_and_tried_again(fans: Fans) -> None:
    fans.apply(a="high")
    fans.kind.refusing.add("GPU-1")
    fans.apply()
    why = "its original fan speed low cannot be restored: Not Supported; it is tried again"
    assert (fans.refused["GPU-1"], fans.refused["GPU-1"].code) == (why, SETTING_NOT_RESTORED)
    assert fans.due() == {}, "it has a pause"
    fans.kind.refusing.clear()
    fans.now_s = 1.0
    fans.apply()
    assert (fans.kind.speeds["GPU-1"], fans.refused, fans.originals.gpus()) == ("low", {}, set())


def test_a_refusal_ends_when_something_keeps_the_value(fans: Fans) -> None:
    fans.apply(a="high")
    fans.kind.refusing.add("GPU-1")
    fans.apply()
    fans.processes = {"GPU-1": [7]}
    fans.now_s = 1.0
    fans.apply()
    assert (fans.refused, fans.blockers["GPU-1"].users.processes) == ({}, (7,))


def test_without_nvml_every_setting_is_refused_and_none_is_forgotten(fans: Fans) -> None:
    """Values that could not be set were taken for set."""
    looks = fans.reconciler.looks(Plan("host", time_slices={"GPU-1": "high"}), BOTH, {})
    decision = fans.reconciler.decide(looks, Observed(error=REFUSED), Blockers.of(Ledger()))
    results = fans.reconciler.carry_out(decision, NVML, fans.originals, BOTH)
    fans.reconciler.note(looks, decision.pending, results, BOTH, 0.0)
    assert fans.refused.keys() == {"GPU-1"}
    fans.now_s = 1.0
    assert fans.due(a="high") == {"GPU-1": "high"}


def test_what_was_refused_is_not_compared(fans: Fans) -> None:
    fans.kind.refusing.add("GPU-1")
    fans.apply(a="high", b="high")
    fans.reconciler.compare()
    assert fans.due(a="high", b="high") == {"GPU-2": "high"}
    fans.kind.speeds["GPU-2"] = "low"
    fans.apply(a="high", b="high")
    assert fans.codes[-1] == TIME_SLICE_CHANGED


def test_a_comparison_finds_only_changes_by_other_programs(fans: Fans) -> None:
    fans.apply(a="high")
    fans.reconciler.compare()
    assert fans.apply(a="high") == Results()
    fans.apply(a="max")
    assert fans.codes == ["", ""]


def test_a_reload_names_the_values_that_another_program_changed(fans: Fans) -> None:
    for desired in ("max", "max", "high"):
        fans.kind.speeds["GPU-1"] = "low"
        fans.reconciler.check_again()
        fans.apply(a=desired)
    assert fans.codes == ["", TIME_SLICE_CHANGED, ""]


def test_a_value_that_a_lost_gpu_forgot_was_not_changed_by_a_program(fans: Fans) -> None:
    fans.apply(a="high")
    fans.reconciler.check_again()
    fans.due((TWO,), a="high")
    fans.kind.speeds["GPU-1"] = "low"
    fans.apply(a="high")
    assert fans.codes == ["", ""]


def test_a_value_that_cannot_be_read_is_refused_only_after_a_reload(fans: Fans) -> None:
    """A comparison waits for the next one."""
    fans.apply(a="high")
    fans.kind.hidden.add("GPU-1")
    fans.reconciler.compare()
    assert fans.apply(a="high").errors == {}
    fans.reconciler.compare()
    fans.reconciler.check_again()
    assert [look.uuid for look in fans.apply(a="high").errors] == ["GPU-1"]


def test_a_blocker_keeps_a_restoration_pending_and_is_named(fans: Fans) -> None:
    fans.apply(a="high")
    leased = device(1, 0)._replace(sharing=TIME_SLICING)
    fans.ledger.add(Lease("a", (leased,), Holder("name", 0, name="job"), 0.0))
    reads = fans.kind.reads
    assert fans.apply() == Results()
    assert str(fans.blockers["GPU-1"].users) == "lease job of root"
    assert fans.kind.reads == reads, "the driver is not asked for what waits"
    fans.ledger.remove("a")
    fans.processes = {"GPU-1": [7]}
    fans.apply()
    assert fans.blockers["GPU-1"].users.processes == (7,)
    assert fans.kind.speeds["GPU-1"] == "high"
    fans.processes = {}
    fans.apply()
    assert (fans.blockers, fans.kind.speeds["GPU-1"]) == ({}, "low")


def test_a_value_is_not_read_while_processes_of_the_last_poll_keep_it(fans: Fans) -> None:
    fans.apply(a="high")
    looks = fans.reconciler.looks(Plan("host"), BOTH, fans.reconciler.original_values(fans.originals))
    blockers = Blockers.of(fans.ledger, gpus=BOTH)
    assert fans.reconciler.unblocked(looks, blockers, {"GPU-1": [7]}) == []
    assert fans.reconciler.unblocked(looks, blockers, {"GPU-2": [7]}) == looks


def test_a_stop_waits_for_steps_that_are_still_made(fans: Fans) -> None:
    """Otherwise it could look before such a step, and forget what has to be restored after it."""
    begun, may_end = threading.Event(), threading.Event()
    set_value = fans.kind.carry_out

    def set_slowly(nvml: Nvml, uuid: str, step: Step) -> None:
        begun.set()
        may_end.wait(60)
        set_value(nvml, uuid, step)

    fans.kind.carry_out = set_slowly  # type: ignore[method-assign]
    setting = threading.Thread(target=lambda: fans.apply(a="high"))
    setting.start()
    begun.wait(60)
    fans.reconciler.gate.end()
    stop = threading.Thread(target=fans.restore)
    stop.start()
    may_end.set()
    for thread in (setting, stop):
        thread.join(60)
    assert fans.kind.speeds["GPU-1"] == "low"
    assert fans.originals.of("fan") == {}


def test_a_stop_begins_after_the_step_at_work(fans: Fans) -> None:
    """What another GPU should have is not set first."""
    set_value = fans.kind.carry_out

    def set_until_stop(nvml: Nvml, uuid: str, step: Step) -> None:
        set_value(nvml, uuid, step)
        fans.reconciler.gate.end()

    fans.kind.carry_out = set_until_stop  # type: ignore[method-assign]
    results = fans.apply(a="high", b="high")
    assert (results.has_ended, results.errors) == (True, {})
    assert fans.kind.speeds == {"GPU-1": "high", "GPU-2": "low"}
    fans.restore()
    assert fans.kind.speeds == {"GPU-1": "low", "GPU-2": "low"}


def test_nothing_more_is_read_once_a_stop_has_begun(fans: Fans) -> None:
    looks = [Look(fans.kind, "GPU-1", "high"), Look(fans.kind, "GPU-2", "high")]
    observed = observe(looks, NVML, lambda: fans.kind.reads == 1)
    assert (len(observed.values), len(observed.errors)) == (1, 1)


@pytest.mark.parametrize(
    ("seconds", "restored"),
    [(4.0, {"GPU-1", "GPU-2"}), (40.0, {"GPU-1"}), (60.0, {"GPU-1"}), (200.0, set[str]())],
)
def test_a_stop_keeps_the_record_of_what_it_has_no_time_to_restore(
    fans: Fans, caplog: pytest.LogCaptureFixture, seconds: float, restored: set[str]
) -> None:
    """Reading takes half of the time at most: otherwise nothing of many GPUs would be restored."""
    fans.apply(a="high", b="high")
    driver = SlowDriver(fans.kind, seconds)
    fans.reconciler.gate.end()
    restoration = fans.restore(limit=TimeLimit(120.0, lambda: driver.now_s))
    kept = {"GPU-1", "GPU-2"} - restored
    assert {uuid for uuid, speed in fans.kind.speeds.items() if speed == "low"} == restored
    assert fans.originals.of("fan").keys() == kept
    assert restoration.results.not_restored().get("fan speed", {}).keys() == kept
    late = "the stop has no time left for it; run: yunion-mps-daemon --restore"
    assert caplog.text.count(late) == len(kept)
    fans.restore()
    assert set(fans.kind.speeds.values()) == {"low"}


def test_a_stop_restores_settings_after_layouts_that_took_most_of_its_time(fans: Fans) -> None:
    """Reading takes half of what is left then."""
    fans.apply(a="high", b="high")
    driver = SlowDriver(fans.kind, 4.0)
    fans.reconciler.gate.end()
    limit = TimeLimit(120.0, lambda: driver.now_s)
    driver.now_s = 90.0
    fans.restore(limit=limit)
    assert fans.kind.speeds == {"GPU-1": "low", "GPU-2": "low"}


class SlowDriver:
    """Lets each call of a fan's driver take so many seconds, of which a clock tells."""

    def __init__(self, kind: Fan, seconds: float) -> None:
        self.now_s = 0.0
        self._seconds = seconds
        self._observe, self._carry_out = kind.observe, kind.carry_out
        kind.observe = self.observe  # type: ignore[method-assign]
        kind.carry_out = self.carry_out  # type: ignore[method-assign]

    def observe(self, nvml: Nvml, uuid: str) -> str:
        self.now_s += self._seconds
        return self._observe(nvml, uuid)

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        self.now_s += self._seconds
        self._carry_out(nvml, uuid, step)


def test_a_stop_restores_all_but_what_is_kept_or_not_there(fans: Fans) -> None:
    fans.apply(a="high", b="high")
    other = Reason("the GPU is bound to the driver vfio-pci", GPU_OTHER_DRIVER)
    gpus = (ONE, TWO._replace(reason=other))
    fans.reconciler.gate.end()
    restoration = fans.restore(gpus)
    assert fans.kind.speeds == {"GPU-1": "low", "GPU-2": "high"}
    assert restoration.results.not_restored()["fan speed"]["GPU-2"].code == GPU_OTHER_DRIVER
    assert fans.originals.of("fan") == {"GPU-2": "low"}


def test_no_step_is_made_after_a_stop_has_begun(fans: Fans) -> None:
    fans.reconciler.gate.end()
    assert fans.apply(a="high").has_ended
    assert fans.kind.speeds["GPU-1"] == "low"


def test_processes_are_asked_for_last_and_only_if_they_matter(fans: Fans) -> None:
    calls: list[str] = []

    def processes() -> dict[str, list[int]]:
        calls.append(f"processes after {fans.kind.reads} speeds")
        return {}

    nvml = cast(Nvml, SimpleNamespace(processes=processes))
    look = Look(fans.kind, "GPU-1", "high", restores=True)
    other = look._replace(uuid="GPU-2")
    observe([look, other], nvml)
    assert calls == ["processes after 2 speeds"]
    observe([look._replace(target="low"), other._replace(restores=False)], nvml)
    assert len(calls) == 1, "nothing is restored to another value"


def test_a_shortage_while_a_value_is_set_is_an_error(fans: Fans) -> None:
    fans.kind.shortage = ShortageError("no thread can be started")
    results = fans.apply(a="high")
    assert results.not_recorded is fans.kind.shortage
    assert fans.due(a="high") == {"GPU-1": "high"}, "it is tried again"
