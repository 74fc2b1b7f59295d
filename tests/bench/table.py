"""The table of a run."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from bench.values import Line

_HEADER = ("what", "measured", "quartiles", "floor", "ratio", "target", "met")
_LEFT = 1


def draw(lines: Sequence[Line]) -> str:
    """All lines under one header, and below them what each floor is."""
    floors = {
        line.floor_is: chr(ord("a") + i) for i, line in enumerate({x.floor_is: x for x in lines}.values())
    }
    rows = [_HEADER, *(_row(line, floors) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    texts = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    texts.insert(1, "  ".join("-" * width for width in widths))
    texts += ["", *(f"floor {letter}: {floor}" for floor, letter in floors.items())]
    return "\n".join(texts) + "\n"


def machine() -> str:
    """Where the run took place."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cores = len(os.sched_getaffinity(0))
    kernel = platform.release().partition("-")[0]
    model = models[0] if models else platform.machine()
    return f"{cores} x {model}; Linux {kernel}; Python {platform.python_version()}"


def _row(line: Line, floors: dict[str, str]) -> tuple[str, ...]:
    unit = line.measured.unit
    low, high = line.measured.spread
    floor = (
        f"{_number(line.floor.median)} {unit} {floors[line.floor_is]}"
        if line.floor
        else floors[line.floor_is]
    )
    return (
        line.what,
        f"{_number(line.measured.median)} {unit}",
        f"{_number(low)}-{_number(high)}" if len(line.measured.values) > 1 else "",
        floor,
        f"{line.ratio:.2f} x" if line.ratio is not None else "",
        str(line.aim or ""),
        {True: "yes", False: "NO", None: ""}[line.met],
    )


def _number(value: float) -> str:
    digits = 0 if value >= 1000 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        text.ljust(width) if column < _LEFT else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths))
    ]
