"""What is wrong, with its reason code and a hint."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps import __version__
from yunion_mps.overview.findings import HostFinding, folded, of_status, version_mismatch, with_hints
from yunion_mps.reasons import (
    BUDGET_NOT_ENFORCED,
    CODES,
    COMPUTE_MODE_CHANGED,
    EVENTS_NOT_WRITTEN,
    MIG_ENABLED,
    OVER_BUDGET,
    Reason,
    hint_of,
)
from yunion_mps.service.queries import Queries

from unit.http import snapshots


def test_a_warning_of_the_daemon_keeps_its_code_and_hint() -> None:
    found = snapshots.troubled()._replace(warnings=(Reason("no room", EVENTS_NOT_WRITTEN),))
    status: Any = Queries(lambda: found, 0.0, 1).status()
    told = [(one.code, one.what, one.hint) for one in of_status(status, []) if one.kind == "Warning"]
    assert told[0] == (EVENTS_NOT_WRITTEN, "no room", CODES[EVENTS_NOT_WRITTEN].hint)
    assert [code for code, *_ in told[1:]] == [BUDGET_NOT_ENFORCED, COMPUTE_MODE_CHANGED]


def test_a_gpu_in_mig_mode_is_shown_with_the_command_for_it() -> None:
    found = snapshots.snapshot(snapshots.H100, snapshots.IN_MIG_MODE)
    queries = Queries(lambda: found, 0.0, 1)
    problem = next(
        one for one in of_status(queries.status(), queries.gpus()["gpus"]) if one.kind == "Problem"
    )
    assert problem.code == MIG_ENABLED
    assert f"nvidia-smi -i {snapshots.IN_MIG_MODE.uuid} -mig 0" in problem.hint


def test_findings_with_the_same_hint_are_folded() -> None:
    many = [HostFinding("Warning", "", f"GPU {n}", "reload") for n in range(9)]
    many.append(HostFinding("Problem", "", "x", "y"))
    assert [one.what for one in folded(many)] == [
        "GPU 0",
        "GPU 1",
        "GPU 2",
        "and 6 more of the same kind (all: yunion-mps status -o json)",
        "x",
    ]


def test_findings_about_many_processes_are_folded_by_their_code() -> None:
    many = [HostFinding("Problem", OVER_BUDGET, f"{n}", hint_of(OVER_BUDGET, pid=n)) for n in range(1, 6)]
    assert [one.what[:6] for one in folded(many)] == ["1", "2", "3", "and 2 "]
    assert folded(many)[-1].hint.endswith("yunion-mps terminate PID")


def test_a_hint_that_neighbours_share_is_given_once() -> None:
    alike = [HostFinding("Warning", "", f"GPU {n}", "reload") for n in range(2)]
    assert [hint for _, hint in with_hints(alike)] == ["", "reload"]


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_a_daemon_of_another_version_than_installed_is_shown(version: str) -> None:
    status: Any = {"version": version}
    said = f"the daemon runs version {version}, but {__version__} is installed"
    assert version_mismatch(status) == ("" if version == __version__ else said)
