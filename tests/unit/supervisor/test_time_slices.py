"""Which time slices are due, and which refusals are reported; nvidia-smi does not run here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from yunion_mps.errors import DriverError
from yunion_mps.models import DirectGpu, Event, Plan
from yunion_mps.reasons import TIME_SLICE_CHANGED, TIME_SLICE_REFUSED
from yunion_mps.supervisor.gpu_settings import SettingResult
from yunion_mps.supervisor.time_slices import SliceWork, TimeSlices

from unit.builders import gpu

ONE, TWO = gpu(1), gpu(2)
A, B = str(ONE.uuid), str(TWO.uuid)
REFUSED = DriverError("Not Supported", "", TIME_SLICE_REFUSED)


class Slices:
    """The time slices of two GPUs."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.gpus = SimpleNamespace(healthy={A, B}, inventory=SimpleNamespace(gpus=[ONE, TWO]))
        self.slices = TimeSlices(cast("Any", self.gpus), self.events.append)

    def due(self, direct: str = A + B, **slices: str) -> dict[str, str]:
        """What is due if these GPUs are time-sliced; `a` and `b` have the time slices."""
        desired = {{"a": A, "b": B}[name]: value for name, value in slices.items()}
        gpus = tuple(DirectGpu(uuid, 1, 1) for uuid in (A, B) if uuid in direct)
        work = self.slices.due(Plan("host", direct=gpus, time_slices=desired), None)
        return dict(work.desired) if isinstance(work, SliceWork) else {}

    def note(self, *done: str, refused: tuple[str, ...] = ()) -> bool:
        values, errors = dict.fromkeys(done, "short"), dict.fromkeys(refused, REFUSED)
        return self.slices.note(SettingResult(values, errors))

    @property
    def codes(self) -> list[str]:
        return [event.code for event in self.events]


@pytest.fixture
def slices() -> Slices:
    return Slices()


def test_only_time_slices_of_working_time_sliced_gpus_are_due(slices: Slices) -> None:
    assert slices.due(a="short", b="long") == {A: "short", B: "long"}
    assert slices.due(direct=A, a="short", b="long") == {A: "short"}
    slices.gpus.healthy.discard(A)
    assert slices.due(a="short", b="long") == {B: "long"}


def test_a_time_slice_is_due_again_after_its_gpu_was_lost(slices: Slices) -> None:
    slices.due(a="short")
    assert slices.note(A)
    assert slices.due(a="short") == {}
    slices.gpus.healthy.discard(A)
    assert slices.due(a="short") == {}
    slices.gpus.healthy.add(A)
    assert slices.due(a="short") == {A: "short"}


def test_a_refusal_is_news_and_lasts_until_the_entry_changes(slices: Slices) -> None:
    slices.due(a="short", b="short")
    assert slices.note(refused=(A,))
    assert slices.slices.refusals.keys() == {A}
    assert slices.due(b="short") == {}
    assert slices.slices.refusals == {}
    assert slices.due(a="short", b="short") == {A: "short"}


def test_what_was_refused_is_not_compared(slices: Slices) -> None:
    slices.due(a="short", b="short")
    slices.note(B, refused=(A,))
    slices.slices.compare()
    assert slices.due(a="short", b="short") == {B: "short"}
    slices.note(B)
    assert slices.codes == [TIME_SLICE_REFUSED, "", TIME_SLICE_CHANGED]


def test_a_comparison_finds_only_changes_by_other_programs(slices: Slices) -> None:
    slices.due(a="short")
    slices.note(A)
    slices.slices.compare()
    slices.due(a="short")
    assert not slices.note()
    slices.due(a="long")
    slices.note(A)
    assert slices.codes == ["", ""]


def test_a_reload_names_the_time_slices_that_another_program_changed(slices: Slices) -> None:
    for desired in ("long", "long", "short"):
        slices.slices.check_again()
        slices.due(a=desired)
        slices.slices.note(SettingResult({A: desired}, {}))
    assert slices.codes == ["", TIME_SLICE_CHANGED, ""]


def test_a_time_slice_that_a_lost_gpu_forgot_was_not_changed_by_a_program(slices: Slices) -> None:
    slices.due(a="short")
    slices.note(A)
    slices.slices.check_again()
    slices.gpus.healthy.discard(A)
    slices.due(a="short")
    slices.gpus.healthy.add(A)
    assert slices.due(a="short") == {A: "short"}
    slices.note(A)
    assert slices.codes == ["", ""]


def test_a_reload_sets_what_was_being_compared(slices: Slices, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it cannot be read, it is refused then, although a comparison would wait for the next one."""
    monkeypatch.setenv("PATH", "/nowhere")
    slices.due(a="short")
    slices.note(refused=(A,))
    store: Any = None  # nothing is set, so nothing is recorded
    for reload in (False, True):
        slices.slices.check_again()
        assert slices.slices.refusals == {}
        slices.due(a="short")
        slices.note(A)
        slices.slices.compare()
        if reload:
            slices.slices.check_again()
        assert slices.due(a="short") == {A: "short"}
        result = slices.slices.set(SliceWork({A: "short"}, {}), None, store)
        assert list(result.errors) == ([A] if reload else [])
