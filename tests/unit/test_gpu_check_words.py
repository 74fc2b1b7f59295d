"""What scripts/gpu-check makes of what it has measured: its page, and the words of its answers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: importlib.import_module(f"gpu_check.{name}")


def test_without_nvidias_programs_only_steps_without_mps_run(module: Callable[[str], Any]) -> None:
    host = module("values").Host("libcuda.so.1", "", "", "", {}, 0, {"multiprocessors": 132}, {})
    steps = module("cli").STEPS
    missing_for = module("runner").missing_for
    taken = [step.name for step in steps if not missing_for(step, host)]
    assert taken == ["throughput", "outside"]
    why = {missing_for(step, host) for step in steps} - {""}
    assert why == {"nvidia-cuda-mps-control and nvidia-cuda-mps-server not found"}


def test_libraries_are_searched_for_this_architecture_only(module: Callable[[str], Any]) -> None:
    folders = module("host").library_folders
    on_arm = folders("aarch64")
    assert [folder for folder in on_arm if "x86_64" in folder] == []
    assert [folder.replace("aarch64", "x86_64") for folder in on_arm] == list(folders("x86_64"))
    assert sum("/aarch64-linux-gnu" in folder for folder in on_arm) == 3


def test_the_page_has_every_answer_and_every_reason_for_a_gap(module: Callable[[str], Any]) -> None:
    def step(name: str, status: str, reason: str, answers: dict[str, str], **more: Any) -> dict[str, Any]:
        empty = {"tables": [], "verbatim": [], "raw": {}, "left_behind": [], "seconds": 1.25}
        return {"name": name, "status": status, "reason": reason, "answers": answers, **empty, **more}

    result = {
        "date": "2026-11-20",
        "started": "2026-11-20T10:00:00+00:00",
        "seconds": 12.5,
        "gpu": {"name": "NVIDIA H200", "multiprocessors": 132, "memory_mib": 143156},
        "settings": {"compute_mode": "Default", "driver": "580.1"},
        "machine": {"cores": 16, "kernel": "Linux 6 x86_64"},
        "programs": {"control": "/usr/bin/control", "server": ""},
        "notes": ["Something to know."],
        "catalogue": [
            {"name": "one", "title": "The first", "questions": [["a", "What is a?"], ["b", "What is b?"]]},
            {"name": "two", "title": "The second", "questions": [["c", "What is c?"]]},
            {"name": "three", "title": "The third", "questions": [["d", "What is d?"]]},
        ],
        "steps": [
            step(
                "one",
                "done",
                "",
                {"a": "It is 5760M.", "b": "It is kept."},
                tables=[{"title": "Numbers", "header": ["n", "x|y"], "rows": [["1", "2"]]}],
                verbatim=[{"title": "Log", "text": "\n".join(f"line {i}" for i in range(200)) + "```"}],
            ),
            step(
                "two",
                "timed out",
                "it had not ended",
                {},
                left_behind=["sleep (PID 5) was still running and was ended"],
            ),
        ],
    }
    page = module("page").draw(result)
    assert page.startswith("# MPS on NVIDIA H200, 2026-11-20\n")
    assert "2 of 4 questions have an answer." in page
    assert "- Something to know.\n" in page
    assert "- **What is a?** It is 5760M.\n- **What is b?** It is kept.\n" in page
    assert "| n | x\\|y |\n| --- | --- |\n| 1 | 2 |\n" in page
    assert "line 0\n" in page
    assert "line 199'''\n```\n" in page
    assert "... (130 lines omitted)" in page
    assert "## The second\n\n**Timed out: it had not ended.**\n\n- **What is c?** Not measured.\n" in page
    assert "## The third\n\n**Not measured.**\n\n- **What is d?** Not measured.\n" in page
    assert (
        "| two | timed out | 1.2 s | it had not ended | sleep (PID 5) was still running and was ended |\n"
        in page
    )
    assert "| three | not measured |  |  |  |\n" in page


@pytest.mark.parametrize(
    ("taken", "sentence"),
    [
        ({"5G": 4800, "5760M": 5440, "6G": 5824}, "5760M is enforced as 5760M: 640 MiB more"),
        ({"5G": 4800, "5760M": 4800, "6G": 5824}, "5760M is enforced as 5G: the same amount"),
        ({"5G": 4800, "5760M": 5822, "6G": 5824}, "5760M is enforced as 6G: the same amount"),
        ({"5G": 4800, "5760M": 5100, "6G": 5824}, "5760M is enforced as something else: 300 MiB more"),
        ({"5G": 4800, "5760M": None, "6G": 5824}, "5760M was not enforced at all."),
    ],
)
def test_a_fractional_limit_is_judged_by_its_neighbours(
    module: Callable[[str], Any], taken: dict[str, int | None], sentence: str
) -> None:
    memory = module("steps_memory")
    found = {name: {"taken_mib": mib or 7808, "unlimited": mib is None} for name, mib in taken.items()}
    assert memory.enforced_as(memory.Sizes(143156), found).startswith(sentence)


def test_fairness_is_1_for_equal_rates_and_1_in_n_for_a_single_one(module: Callable[[str], Any]) -> None:
    fairness = module("steps_sharing").fairness
    assert fairness([5.0, 5.0, 5.0]) == pytest.approx(1)
    assert fairness([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert fairness([0.0]) == 0
