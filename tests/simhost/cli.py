"""`simhost [--gpus FILE] [--root DIR] -- COMMAND...`: run a command on a simulated host."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .description import REFERENCE, DescriptionError
from .host import SimHost
from .install import BuildError
from .mps import StandIns, program_version
from .state import StateError

_EPILOG = """\
The host has the GPUs that FILE describes (YAML; tests/simhost/README.md has all keys), or one Tesla P40:

  driver: {version: 535.261.03, cuda: "12.2"}
  gpus:
  - {kind: h100, count: 8, numa_node: 1}
  - {kind: tesla-p40, pci: "10000:e1:00.0", virtual_number: 2}

Its root directory is $YUNION_MPS_ROOT. simhost-ctl changes the host while programs run. Examples:

  scripts/simhost -- nvidia-smi -L
  scripts/simhost --gpus eight.yml -- sh -c 'simhost-ctl lose 3; nvidia-smi -L'
  scripts/simhost --jobs -- bash
"""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status; 2 for wrong usage, 126 and 127 as in a shell."""
    parser = argparse.ArgumentParser(
        prog="simhost",
        usage="simhost [--gpus FILE] [--jobs] [--root DIR] -- COMMAND...",
        description="Run a command on a host with simulated GPUs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpus", type=Path, metavar="FILE", help="description of the GPUs (default: one Tesla P40)"
    )
    parser.add_argument(
        "--jobs", action="store_true",
        help="add stand-ins for libcuda and the MPS server, so that CUDA programs run, "
        "and simulate the driver version of the installed NVIDIA programs",
    )  # fmt: skip
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="keep the host's files here and use them again"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("COMMAND is missing")
    try:
        mask = hold_signals()
        description = None if given.gpus is None else _read(given.gpus)
        if given.jobs:
            gpus = REFERENCE if description is None else description
            description = {"driver": {"version": program_version()}, **gpus}
        with SimHost.create(description, given.root) as host, ExitStack() as stack:
            if given.jobs:
                stack.enter_context(StandIns(host)).install_libcuda()
            return run(command, host.env, mask)
    except (DescriptionError, StateError, BuildError) as error:
        where = f"{given.gpus}: " if given.gpus and isinstance(error, DescriptionError) else ""
        sys.stderr.write(f"simhost: {where}{error}\n")
        return 2


def _read(path: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with path.open("rb") as file:
            return yaml.load(file, Loader=loader)
    except OSError as error:
        raise DescriptionError(f"cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark: Any | None = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise DescriptionError(f"{line}not YAML: {getattr(error, 'problem', error)}") from error


_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_WATCHED = {signal.SIGCHLD, *_PASSED_ON}
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_SI_KERNEL = 0x80  # siginfo(7): from the kernel, here the terminal, to its whole foreground group
_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 2.0


def hold_signals() -> set[signal.Signals]:
    """Keep signals waiting until the command runs, so that none ends us between making and removing the host.

    Returns the mask before, which the command gets.
    """
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)}


def run(command: list[str], env: dict[str, str], mask: set[signal.Signals]) -> int:
    """Run the command under held signals and return its status, negative for a signal (see end_as)."""
    program = shutil.which(command[0], path=env["PATH"])
    if program is None:
        there = "/" in command[0] and Path(command[0]).exists()
        sys.stderr.write(f"simhost: {command[0]}: {'not executable' if there else 'no such command'}\n")
        return 126 if there else 127
    # Daemons that the command leaves become ours instead of init's, so that they end with the host.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        pid = os.posix_spawn(program, command, env, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)
    except OSError as error:
        sys.stderr.write(f"simhost: {command[0]}: {error.strerror}\n")
        return 126
    status = _wait(pid)
    _end_others()
    return status


def end_as(status: int) -> None:
    """End by the signal that ended the command, if one did; otherwise return."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = -status
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)


def _wait(pid: int) -> int:
    """Wait for the command; pass signals on; return its status, negative for a signal."""
    while True:
        info = signal.sigwaitinfo(_WATCHED)
        if info.si_signo == signal.SIGCHLD:
            for done, status in _reaped():
                if done == pid:
                    return os.waitstatus_to_exitcode(status)
        elif info.si_code != _SI_KERNEL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)


def _reaped() -> list[tuple[int, int]]:
    done = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            done.append(found)
    return done


def _end_others() -> None:
    """End all that the command left running: politely, then not."""
    deadline = time.monotonic() + _GRACE_S
    number = signal.SIGTERM
    asked: set[int] = set()
    while children := _children():
        if time.monotonic() > deadline:
            number, asked = signal.SIGKILL, set()
        for pid in children - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        asked |= children
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)
        _reaped()


def _children() -> set[int]:
    """Return the processes whose parent is this one, from /proc (field 4 of stat is the parent)."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
                if int(stat.rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(entry))
    return found
