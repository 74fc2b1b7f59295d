"""The floors: the least that a program in Python, or one that runs NVIDIA's control daemon, can take."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.values import BenchError
from simhost import SimHost

#: The interpreter that the virtual environment was made with: what `python3` is there, without its packages.
PYTHON = str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
DEADLINE_S = 60.0
_LOOK_S = 0.0001


def program(host: SimHost, name: str) -> str:
    """The path of a program on the host; raises BenchError where it is not there."""
    path = shutil.which(name, path=host.env["PATH"])
    if path is None:
        raise BenchError(f"{name} is not there: run scripts/setup")
    return path


def spawn(argv: list[str], environment: Mapping[str, str]) -> int:
    """Start a program with nothing to read and its output thrown away; return its PID.

    Floors and the commands that are compared with them are started alike, and by the cheapest way there is.
    """
    null = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(argv[0], argv, environment, file_actions=null)


def run_ms(argv: list[str], environment: Mapping[str, str]) -> float:
    """How long a program takes from its start to its end; raises BenchError where it fails."""
    begin_s = time.perf_counter()
    _, status = os.waitpid(spawn(argv, environment), 0)
    taken_ms = (time.perf_counter() - begin_s) * 1000
    if status != 0:
        raise BenchError(f"{' '.join(argv)} failed ({os.waitstatus_to_exitcode(status)})")
    return taken_ms


def python_ms(host: SimHost, statement: str = "pass", python: str = PYTHON) -> float:
    return run_ms([python, "-I", "-c", statement], host.env)


def control_ms(host: SimHost) -> float:
    """How long a bare control daemon takes from its start until it accepts on its `control` socket."""
    folder = tempfile.mkdtemp(prefix="bench.", dir=host.root)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder, "LC_ALL": "C"}
    argv = [program(host, "nvidia-cuda-mps-control"), "-f"]
    begin_s = time.perf_counter()
    pid = spawn(argv, environment)
    try:
        while not _accepts(f"{folder}/control"):
            if time.perf_counter() - begin_s > DEADLINE_S or os.waitpid(pid, os.WNOHANG)[0]:
                raise BenchError(f"{argv[0]} does not serve: try it with CUDA_MPS_PIPE_DIRECTORY={folder}")
            time.sleep(_LOOK_S)
        return (time.perf_counter() - begin_s) * 1000
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
        return True
