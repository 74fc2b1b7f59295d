"""The bench: what it computes, and that it runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import ledgers
from bench.cli import draw
from bench.values import Aim, Line, Rounds, Samples, Settings

CHECKOUT = Path(__file__).resolve().parents[2]


def line(measured: float, floor: float, aim: Aim | None) -> Line:
    return Line("a start", Samples((measured,), "ms"), Samples((floor,), "ms"), "a floor", aim)


def test_the_rounds_of_all_steps_take_turns_after_a_warmup() -> None:
    order: list[str] = []

    def step(name: str) -> float:
        order.append(name)
        return float(len(order))

    rounds = Rounds("ms")
    rounds.run(2, [("a", lambda: step("a")), ("b", lambda: step("b"))])
    assert "".join(order) == "ababab"
    assert rounds.of("a").values == (3, 5)
    assert rounds.sum_of("a", "b").values == (7, 11)


def test_one_slow_round_moves_neither_the_median_nor_the_quartiles() -> None:
    samples = Samples((10.0, 11.0, 12.0, 13.0, 900.0), "ms")
    assert (samples.median, samples.spread) == (12, (11, 13))


@pytest.mark.parametrize(
    ("aim", "met"),
    [(Aim(3), True), (Aim(2.9), False), (Aim(30, "ms"), True), (Aim(29, "ms"), False), (None, None)],
)
def test_an_aim_is_met_up_to_and_with_its_own_value(aim: Aim | None, met: bool | None) -> None:
    assert line(30, 10, aim).met is met


def test_the_table_has_each_line_s_ratio_and_whether_it_met_the_aim() -> None:
    assert draw([line(30, 10, Aim(3)), line(31, 10, Aim(3))]) == (
        "what     measured  quartiles      floor   ratio  target  met\n"
        "-------  --------  ---------  ---------  ------  ------  ---\n"
        "a start   30.0 ms             10.0 ms a  3.00 x  <= 3 x  yes\n"
        "a start   31.0 ms             10.0 ms a  3.10 x  <= 3 x   NO\n"
        "\n"
        "floor a: a floor\n"
    )


def test_every_ledger_benchmark_line_has_a_positive_ratio() -> None:
    found = list(ledgers.lines(Settings(quick=True)))
    assert found
    assert all((entry.ratio or 0) > 0 for entry in found)


def test_a_quick_run_of_one_group_prints_its_table_and_writes_every_sample(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    command: list[str | Path] = [CHECKOUT / "scripts/bench", "--quick", "--only", "recovery", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "recovery of 1 control daemon, 1 GPU " in done.stdout
    assert "recovery of 8 control daemons, 8 GPUs " in done.stdout
    lines = json.loads(file.read_text())["lines"]
    assert {entry["group"] for entry in lines} == {"recovery"}
    assert all(len(entry["samples"]) == len(entry["floor_samples"]) and entry["ratio"] > 0 for entry in lines)
