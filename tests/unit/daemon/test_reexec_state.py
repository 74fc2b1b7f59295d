"""What a program hands over to the one that it executes in its place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from yunion_mps.daemon.process import ReexecState, inherited_state


@pytest.fixture
def state() -> Iterator[ReexecState]:
    listener, lock = os.pipe()
    yield ReexecState(listener=listener, lock=lock, started_s=1788000000.5)
    os.close(listener)
    os.close(lock)


def inherited(monkeypatch: pytest.MonkeyPatch, value: object) -> ReexecState | None:
    monkeypatch.setenv("YUNION_MPS_REEXEC", json.dumps(value))
    return inherited_state()


def test_the_state_is_handed_over_by_name(monkeypatch: pytest.MonkeyPatch, state: ReexecState) -> None:
    value = {"of_a_newer_version": 1, "pid": os.getpid(), **state._asdict()}
    assert inherited(monkeypatch, value) == state
    assert not os.get_inheritable(state.lock)


def test_the_state_of_an_earlier_version_is_a_list(
    monkeypatch: pytest.MonkeyPatch, state: ReexecState
) -> None:
    value = [os.getpid(), state.listener, state.lock, state.started_s]
    assert inherited(monkeypatch, value) == state


@pytest.mark.parametrize("value", [{}, [], None, 7, "x", {"pid": 1}, [1, 2, 3, 4.0], {"pid": os.getpid()}])
def test_the_state_of_another_process_or_a_damaged_one_is_ignored(
    monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    assert inherited(monkeypatch, value) is None
