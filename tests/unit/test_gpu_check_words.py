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
