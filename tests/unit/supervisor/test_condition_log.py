"""A condition is recorded once when it begins, when its reason changes, and when it ends."""

from __future__ import annotations

import pytest
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_CDI_FILES, ABOUT_ENTRY, ABOUT_EVENT_LOG, ABOUT_PIPE_DIRECTORY, BROKEN
from yunion_mps.core.models import Event
from yunion_mps.core.reasons import CDI_DIRECTORY_FAILED, GPU_MISSING, PIPE_DIRECTORY, Reason
from yunion_mps.supervisor.condition_log import ConditionLog


def condition(kind: str, text: str, code: str, subject: str = "") -> Condition:
    return Condition(kind, subject, BROKEN, Reason(text, code))


@pytest.mark.parametrize(
    ("kind", "code", "event_kind"),
    [
        (ABOUT_ENTRY, GPU_MISSING, "gpu"),
        (ABOUT_PIPE_DIRECTORY, PIPE_DIRECTORY, "domain"),
        (ABOUT_CDI_FILES, CDI_DIRECTORY_FAILED, "daemon"),
    ],
)
def test_the_begin_and_the_end_of_a_condition_are_an_event_each(
    kind: str, code: str, event_kind: str
) -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    one = condition(kind, "why", code)
    for current in ([one], [one], [], []):
        log.note(current)
    assert [event.kind for event in events] == [event_kind] * 2
    assert (events[0].severity in ("warning", "error"), events[0].code) == (True, code)
    assert (events[1].severity, events[1].code) == ("info", "")


def test_an_entry_that_is_missing_for_another_reason_is_recorded_again() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    for text in ("it is not there", "it is bound to vfio-pci"):
        log.note([condition(ABOUT_ENTRY, text, GPU_MISSING, "00:06.0")])
    assert [(event.what, event.cause) for event in events] == [
        ("missing", "it is not there"),
        ("missing", "it is bound to vfio-pci"),
    ]


def test_two_conditions_of_one_directory_begin_and_end_apart() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    closed, foreign = (condition(ABOUT_PIPE_DIRECTORY, text, PIPE_DIRECTORY, "host") for text in ("a", "b"))
    for current in ([closed], [closed, foreign], [foreign]):
        log.note(current)
    assert [event.what for event in events] == ["a", "b", "no longer: a"]


def test_what_is_recorded_where_it_is_noticed_is_no_event_here() -> None:
    events: list[Event] = []
    ConditionLog(events.append).note([condition(ABOUT_EVENT_LOG, "why", "")])
    assert events == []
