"""The command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench import actors, ledgers, pods, programs, requests, slurm_jobs
from bench.values import BenchError, Line, Settings
from simhost import BuildError

GROUPS: dict[str, Callable[[Settings], Iterator[Line]]] = {
    "start": programs.start_lines,
    "list": programs.list_lines,
    "run": programs.run_lines,
    "request": requests.request_lines,
    "lease": requests.lease_lines,
    "scrape": requests.scrape_lines,
    "ledger": ledgers.lines,
    "memory": programs.memory_lines,
    "idle": programs.processor_lines,
    "recovery": programs.recovery_lines,
    "pods": pods.lines,
    "slurm": slurm_jobs.lines,
    "ray": actors.lines,
}


def main(arguments: Sequence[str]) -> int:
    """Measure, and print the table; returns 0 even if a target is missed, and 1 if something failed."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all hosts and daemons end
    settings = Settings(quick=options.quick)
    begin_s = time.monotonic()
    lines: list[tuple[str, Line]] = []
    try:
        for name in options.only or GROUPS:
            _say(f"{name} ...")
            lines += [(name, line) for line in GROUPS[name](settings)]
    except (AssertionError, BenchError, BuildError, OSError) as error:
        _say(str(error))
        return 1
    taken_s = time.monotonic() - begin_s
    kind = "quick" if settings.quick else "full"
    sys.stdout.write(f"{machine()}; {kind} run, {taken_s:.0f} s\n\n{draw([line for _, line in lines])}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine(), "lines": [line.as_json(name) for name, line in lines]}, file, indent=1
            )
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the daemon and its commands, relative to floors measured in the same run.",
        epilog="docs/performance.md explains how it is measured, and has the results of the last run.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: less than a minute instead of 6 minutes"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=GROUPS,
        metavar="NAME",
        help=f"measure only NAME ({', '.join(GROUPS)}); may be repeated",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every sample to FILE")
    return parser.parse_args(arguments)


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
