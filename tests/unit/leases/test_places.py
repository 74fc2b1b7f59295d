"""The places of those who wait, from one daemon to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.leases.places import COME_BACK_S, Places


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Where the places are kept."""
    return str(tmp_path / "waiting")


def after(folder: str) -> Places:
    """Those of the next daemon, which starts at 0 s."""
    places = Places(folder)
    places.recall(0.0)
    return places


def test_the_next_daemon_knows_since_when_somebody_waits(folder: str) -> None:
    Places(folder).keep("0-a", 1000.1)
    places = after(folder)
    assert places.come("0-b", 2000.0, 1.0) == 2000.0
    assert places.come("0-a", 2000.0, 1.0) == 1000.1
    assert places.come("0-a", 2000.0, 1.0) == 2000.0, "a place is somebody's once"


def test_nobody_new_is_before_those_who_may_come_back_though_the_clock_was_set_back(folder: str) -> None:
    Places(folder).keep("0-a", 1000.0)
    assert after(folder).come("0-b", 500.0, 1.0) == 1000.0


def test_who_does_not_come_back_in_time_has_lost_its_place(folder: str) -> None:
    Places(folder).keep("0-a", 1000.0)
    places = after(folder)
    assert places.come("0-a", 2000.0, COME_BACK_S + 1) == 2000.0
    assert os.listdir(folder) == []


def test_who_has_been_served_has_none_and_who_is_sent_away_keeps_it(folder: str) -> None:
    places = after(folder)
    for key in ("0-a", "0-b"):
        places.keep(key, 1000.0)
    places.leave("0-a")
    places.let_go({"0-b": 1000.0}, 5.0)
    places.leave("0-b")
    assert os.listdir(folder) == ["0-b"]
    assert places.come("0-b", 2000.0, 6.0) == 1000.0, "this daemon goes on after all"
    places.keep("0-b", 1000.0)
    assert after(folder).come("0-b", 2000.0, 1.0) == 1000.0


def test_who_gives_its_request_no_name_has_no_place_to_come_back_to(folder: str) -> None:
    places = after(folder)
    places.keep("", 1000.0)
    places.leave("")
    assert not os.path.exists(folder)
