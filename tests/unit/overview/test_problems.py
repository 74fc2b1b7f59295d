"""What is wrong, with its reason code and a hint."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps import __version__
from yunion_mps.answers import StatusProblemJson
from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_EVENT_LOG, IMPAIRED
from yunion_mps.core.reasons import (
    BUDGET_NOT_ENFORCED,
    CODES,
    COMPUTE_MODE_CHANGED,
    EVENTS_NOT_WRITTEN,
    MIG_ENABLED,
    OVER_BUDGET,
    VERSION_DIFFERS,
    VGPU,
    XID,
    Reason,
    hint_of,
)
from yunion_mps.service.queries import Queries
from yunion_mps.views.overview import fold_problems, problems_of, version_mismatch, with_hints

from unit.http import snapshots
from unit.http.fake_services import status_of


def test_a_warning_of_the_daemon_keeps_its_code_and_hint() -> None:
    warning = Condition(ABOUT_EVENT_LOG, "", IMPAIRED, Reason("no room", EVENTS_NOT_WRITTEN))
    found = snapshots.with_conditions(snapshots.troubled(), reported=(warning,))
    problems = status_of(Queries(lambda: found, 0.0, 1))["problems"]
    told = [(one["code"], one["text"], one["hint"]) for one in problems if one["level"] == "warning"]
    assert told[0] == (EVENTS_NOT_WRITTEN, "no room", CODES[EVENTS_NOT_WRITTEN].hint)
    assert [code for code, *_ in told[1:]] == [BUDGET_NOT_ENFORCED, COMPUTE_MODE_CHANGED]


def test_a_gpu_in_mig_mode_is_shown_with_the_command_for_it() -> None:
    found = snapshots.snapshot(snapshots.H100, snapshots.IN_MIG_MODE)
    problems = status_of(Queries(lambda: found, 0.0, 1))["problems"]
    first = next(one for one in problems if one["level"] == "problem")
    assert (first["code"], first["gpu"]) == (MIG_ENABLED, snapshots.IN_MIG_MODE.address)
    assert f"nvidia-smi -i {snapshots.IN_MIG_MODE.uuid} -mig 0" in first["hint"]


def problem(level: str, code: str, text: str, hint: str) -> StatusProblemJson:
    return {
        "level": level,
        "code": code,
        "text": text,
        "hint": hint,
        "kind": "gpu",
        "subject": "",
        "waits_for": "",
        "gpu": None,
        "devices": [],
        "pid": None,
    }


def test_problems_with_the_same_code_are_folded() -> None:
    many = [problem("warning", VGPU, f"GPU {n}", "reload") for n in range(9)]
    many.append(problem("problem", XID, "x", "y"))
    assert [one.text for one in fold_problems(many)] == [
        "GPU 0",
        "GPU 1",
        "GPU 2",
        "and 6 more of the same kind (all: yunion-mps status -o json)",
        "x",
    ]


def test_the_rest_of_the_problems_of_many_processes_has_a_general_hint() -> None:
    many = [problem("problem", OVER_BUDGET, f"{n}", hint_of(OVER_BUDGET, pid=n)) for n in range(1, 6)]
    assert [one.text[:6] for one in fold_problems(many)] == ["1", "2", "3", "and 2 "]
    assert fold_problems(many)[-1].hint.endswith("yunion-mps terminate PID")


def test_a_hint_that_neighbours_share_is_given_once() -> None:
    alike = fold_problems([problem("warning", VGPU, f"GPU {n}", "reload") for n in range(2)])
    assert [hint for _, hint in with_hints(alike)] == ["", "reload"]


@pytest.mark.parametrize("version", [__version__, "0.0.1"])
def test_a_daemon_of_another_version_than_installed_is_shown(version: str) -> None:
    status: Any = {"version": version, "problems": [problem("pending", VGPU, "a", "b")]}
    said = f"the daemon runs version {version}, but {__version__} is installed"
    assert version_mismatch(status) == ("" if version == __version__ else said)
    codes = [one["code"] for one in problems_of(status)]
    assert codes == ([VGPU] if version == __version__ else [VERSION_DIFFERS, VGPU])
