"""The command."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from bench import commands, idling, ledgers, requests, starts
from bench.table import draw, machine
from bench.values import BenchError, Line, Settings
from simhost import BuildError

GROUPS: dict[str, Callable[[Settings], Iterator[Line]]] = {
    "start": starts.start_lines,
    "list": commands.list_lines,
    "run": commands.run_lines,
    "request": requests.request_lines,
    "lease": requests.lease_lines,
    "scrape": requests.scrape_lines,
    "ledger": ledgers.lines,
    "memory": idling.memory_lines,
    "idle": idling.processor_lines,
    "recovery": starts.recovery_lines,
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
        "--quick", action="store_true", help="fewer rounds: less than 40 s instead of 4 minutes"
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
