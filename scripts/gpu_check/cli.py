"""`scripts/gpu-check`: find a GPU, run the steps, write the results, and end all processes of the run."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu_check import (
    page,
    steps_daemon,
    steps_ends,
    steps_faults,
    steps_look,
    steps_memory,
    steps_recovery,
    steps_sharing,
    steps_users,
)
from gpu_check.host import DriverFiles, NoGpu, find_driver, notes, probe
from gpu_check.processes import become_subreaper, end_all
from gpu_check.runner import run_steps
from gpu_check.values import Host, Step

_CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_DESCRIPTION = """\
Measure what MPS does on a real NVIDIA GPU, and write a JSON file and a page. It changes no setting of
the GPU, touches no control daemon that it did not start, and ends everything that it started. If there is no
GPU, it says so and exits with 0."""

#: The most important first: steps for which there is no time left are omitted.
STEPS: tuple[Step, ...] = (
    *steps_look.STEPS,
    *steps_memory.STEPS,
    *steps_sharing.STEPS,
    *steps_ends.STEPS,
    *steps_faults.STEPS,
    *steps_users.STEPS,
    *steps_recovery.STEPS,
    *steps_daemon.STEPS,
)


class Interrupted(BaseException):
    """A signal interrupted the run; the text is its number."""


def main(arguments: Sequence[str], steps: Sequence[Step] = STEPS) -> int:
    """Run the command; returns its exit status."""
    options = _parse(arguments, steps)
    if options.list:
        for step in steps:
            print(f"{step.name:<22} {step.title}")
        return 0
    by_name = {step.name: step for step in steps}
    chosen = [by_name[name] for name in options.only or by_name]
    become_subreaper()
    directory = tempfile.mkdtemp(prefix="gc-", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
    os.chmod(directory, 0o711)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _measure(options, chosen, directory)
    except NoGpu as reason:
        print(f"gpu-check: skipped: {reason}")
        return 0
    except Interrupted as error:
        print("gpu-check: interrupted; the results so far have been written", file=sys.stderr)
        return 128 + int(str(error))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for line in end_all(directory):
            print(f"gpu-check: {line}", file=sys.stderr)
        shutil.rmtree(directory, ignore_errors=True)


def _interrupt(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def _parse(arguments: Sequence[str], steps: Sequence[Step]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu-check", description=_DESCRIPTION)
    names = [step.name for step in steps]
    parser.add_argument(
        "--output",
        metavar="DIR",
        default=os.path.join(_CHECKOUT, "docs/gpu"),
        help="directory for the results (default: docs/gpu)",
    )
    parser.add_argument(
        "--minutes", metavar="N", type=float, default=8.0, help="time limit of the whole run (default: 8)"
    )
    parser.add_argument(
        "--device", metavar="N", type=int, default=0, help="index of the GPU in PCI order (default: 0)"
    )
    parser.add_argument(
        "--programs", metavar="DIR", default="", help="directory to search first for NVIDIA's programs"
    )
    parser.add_argument("--only", metavar="STEP[,STEP...]", help="run only these steps, in this order")
    parser.add_argument("--list", action="store_true", help="list the steps, and exit")
    options = parser.parse_args(arguments)
    options.only = [name for name in (options.only or "").split(",") if name]
    unknown = [name for name in options.only if name not in names]
    if unknown:
        parser.error(f"unknown step: {', '.join(unknown)} (choose from: {', '.join(names)})")
    return options


def _measure(options: argparse.Namespace, steps: Sequence[Step], directory: str) -> int:
    start_s = time.monotonic()
    found = find_driver(options.programs)
    host = probe(found, directory, options.device)
    result = _head(found, host, steps)
    os.makedirs(options.output, exist_ok=True)
    stem = _stem(options.output, result["date"], host.gpu["name"])
    print(f"gpu-check: {host.gpu['name']}; writing {stem}.json and .md", file=sys.stderr, flush=True)

    def save(done: list[dict[str, Any]]) -> None:
        result.update(steps=done, seconds=round(time.monotonic() - start_s, 1))
        _write(f"{stem}.json", json.dumps(result, indent=1) + "\n")
        _write(f"{stem}.md", page.draw(result))

    save([])
    run_steps(steps, host, directory, start_s + options.minutes * 60, save)
    print(f"{stem}.json\n{stem}.md")
    return 0


def _head(found: DriverFiles, host: Host, steps: Sequence[Step]) -> dict[str, Any]:
    now = dt.datetime.now(dt.timezone.utc)
    return {
        "version": 1,
        "date": now.strftime("%Y-%m-%d"),
        "started": now.isoformat(timespec="seconds"),
        "seconds": 0.0,
        "gpu": host.gpu,
        "settings": host.settings,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "kernel": " ".join(os.uname()[i] for i in (0, 2, 4)),
            "python": sys.version.split()[0],
            "uid": os.geteuid(),
        },
        "programs": {"libcuda": found.libcuda, "control": found.control, "server": found.server},
        "notes": _try(notes, host),
        "catalogue": [
            {"name": step.name, "title": step.title, "questions": [list(pair) for pair in step.questions]}
            for step in steps
        ],
        "steps": [],
    }


def _try(make: Callable[[Host], list[str]], host: Host) -> list[str]:
    try:
        return make(host)
    except OSError as error:
        return [f"The state of the host could not be read: {error}."]


def _stem(folder: str, date: str, name: str) -> str:
    """Return the path of new result files, without the extension."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"
    stem = os.path.join(folder, f"{date}-{slug}")
    number = 2
    while os.path.exists(f"{stem}.json"):
        stem = os.path.join(folder, f"{date}-{slug}-{number}")
        number += 1
    return stem


def _write(path: str, text: str) -> None:
    """Replace the file atomically, so that an interrupted run leaves the previous version."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)
