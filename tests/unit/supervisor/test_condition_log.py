"""A condition is recorded once when it begins, when its reason changes, and when it ends."""

from __future__ import annotations

import pytest
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import (
    ABOUT_CDI_FILES,
    ABOUT_COMPUTE_MODE,
    ABOUT_ENTRY,
    ABOUT_EVENT_LOG,
    ABOUT_GPU,
    ABOUT_MIG_LAYOUT,
    ABOUT_PIPE_DIRECTORY,
    ABOUT_SETTING,
    ABOUT_TIME_SLICE,
    BROKEN,
    PENDING,
    REFUSED,
)
from yunion_mps.core.models import Event, Plan, Snapshot
from yunion_mps.core.reasons import (
    CDI_DIRECTORY_FAILED,
    GPU_LOST,
    GPU_MISSING,
    MIG_FOREIGN_INSTANCE,
    MIG_IN_USE,
    PIPE_DIRECTORY,
    SETTING_PENDING,
    TIME_SLICE_REFUSED,
    Reason,
)
from yunion_mps.core.waits import Users, wait_reason
from yunion_mps.supervisor.condition_log import ConditionLog

from unit.http import snapshots


def condition(kind: str, text: str, code: str, subject: str = "") -> Condition:
    return Condition(kind, subject, BROKEN, Reason(text, code))


def with_conditions(*conditions: Condition) -> Snapshot:
    """The reference case, with these conditions."""
    return snapshots.reference()._replace(conditions=conditions)


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
        log.note(with_conditions(*current))
    assert [event.kind for event in events] == [event_kind] * 2
    assert (events[0].severity in ("warning", "error"), events[0].code) == (True, code)
    assert (events[1].severity, events[1].code) == ("info", "")


def test_an_entry_that_is_missing_for_another_reason_is_recorded_again() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    for text in ("it is not there", "it is bound to vfio-pci"):
        log.note(with_conditions(condition(ABOUT_ENTRY, text, GPU_MISSING, "00:06.0")))
    assert [(event.what, event.cause) for event in events] == [
        ("missing", "it is not there"),
        ("missing", "it is bound to vfio-pci"),
    ]


def test_two_conditions_of_one_directory_begin_and_end_apart() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    closed, foreign = (condition(ABOUT_PIPE_DIRECTORY, text, PIPE_DIRECTORY, "host") for text in ("a", "b"))
    for current in ([closed], [closed, foreign], [foreign]):
        log.note(with_conditions(*current))
    assert [event.what for event in events] == ["a", "b", "no longer: a"]


def test_a_gpu_that_can_be_used_again_or_is_no_longer_divided_says_so() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    gpu = snapshots.P40.address
    lost = condition(ABOUT_GPU, "it has fallen off the bus", GPU_LOST, gpu)
    without = with_conditions()._replace(plan=Plan("host"))
    for current in (with_conditions(lost), with_conditions(), with_conditions(lost), without):
        log.note(current)
    assert [(event.subject, event.what, event.code) for event in events] == [
        (gpu, "unavailable", GPU_LOST),
        (gpu, "available", ""),
        (gpu, "unavailable", GPU_LOST),
        (gpu, "no longer configured", ""),
    ]
    assert events[1].cause == "previously unavailable: it has fallen off the bus"


def test_a_layout_that_waits_only_within_a_round_is_no_event() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    gpu = snapshots.P40.address
    waits = Condition(ABOUT_MIG_LAYOUT, gpu, PENDING, Reason("it waits for leases", MIG_IN_USE))
    log.note(with_conditions(waits))
    log.note(with_conditions(), is_settled=True)
    assert events == []
    log.note(with_conditions(waits), is_settled=True)
    log.note(with_conditions())
    assert [event.what for event in events] == ["pending"]
    log.note(with_conditions(), is_settled=True)
    assert [event.what for event in events] == ["pending", "no longer pending"]


@pytest.mark.parametrize(
    ("kind", "event_kind"),
    [(ABOUT_TIME_SLICE, "gpu"), (ABOUT_SETTING, "gpu"), (ABOUT_COMPUTE_MODE, "compute_mode")],
)
def test_a_refused_setting_is_recorded_but_not_one_that_waits(kind: str, event_kind: str) -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    refused = Condition(kind, "00:06.0", REFUSED, Reason("the driver refuses it", TIME_SLICE_REFUSED))
    waits = Condition(kind, "00:06.0", PENDING, Reason("it waits for leases", SETTING_PENDING))
    for current in ([waits], [refused], []):
        log.note(with_conditions(*current))
    assert [(event.severity, event.kind, event.what) for event in events] == [
        ("warning", event_kind, "the driver refuses it"),
        ("info", event_kind, "no longer: the driver refuses it"),
    ]


def test_what_is_recorded_where_it_is_noticed_is_no_event_here() -> None:
    events: list[Event] = []
    ConditionLog(events.append).note(with_conditions(condition(ABOUT_EVENT_LOG, "why", "")))
    assert events == []


def test_a_layout_that_waits_for_other_users_of_the_same_kind_is_no_event() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    process, other = Users(processes=(50,)), Users(processes=(51, 52))
    lease, other_lease = Users(("lease 1",), processes=(51,)), Users(("lease 2",), processes=(53,))
    for users in (process, other, lease, other_lease, process):
        why = wait_reason("its MIG layout", users, MIG_IN_USE)
        one = Condition(ABOUT_MIG_LAYOUT, "00:06.0", PENDING, why, waits_for=users)
        log.note(with_conditions(one), is_settled=True)
    assert [event.cause for event in events] == [
        "its MIG layout waits for the process (PID 50) to end",
        "its MIG layout waits for lease 1 and the process (PID 51) to end",
        "its MIG layout waits for the process (PID 50) to end",
    ]


def test_another_process_on_an_instance_that_is_in_the_way_is_no_event() -> None:
    events: list[Event] = []
    log = ConditionLog(events.append)
    for pid in (50, 51):
        why = Reason(f"instance g1, which the process (PID {pid}) uses, is in the way", MIG_FOREIGN_INSTANCE)
        one = Condition(ABOUT_MIG_LAYOUT, "00:06.0", REFUSED, why)
        log.note(with_conditions(one), is_settled=True)
    assert len(events) == 1
