"""Which MPS processes of the host are ours, judged by the process itself and never by its socket.

A control daemon of ours carries a mark in its environment, which its servers inherit (measured). Its PID and
start time are also recorded, because an environment cannot always be read. A socket proves nothing: any user
can fill its queue, and it outlives its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from yunion_mps.host.files import write_atomically
from yunion_mps.host.proc import (
    all_pids,
    credentials_of,
    environment_of,
    parent_of,
    program_name,
    started_ticks,
)
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import PROGRAM, client_variables
from yunion_mps.mps.taken_over import taken_over, taken_over_parent_of
from yunion_mps.paths import ROOT_VARIABLE, Paths

SERVER = "nvidia-cuda-mps-server"
#: Marks a control daemon as ours, in the environment that it was started with.
MARK = "YUNION_MPS_DOMAIN"
#: How long after its fork a process without an environment may still be on its way into its program. That
#: takes 44 ms on a loaded machine (measured).
_EXEC_S = 2.0
#: Stands for the PID of a control daemon that is about to be started.
_STARTING = 0


class MpsProcess(NamedTuple):
    """A control daemon of ours, or an MPS server of one, and the GPUs (UUIDs) that it serves."""

    pid: int
    started_ticks: int
    pipe_directory: str
    log_directory: str
    gpu_uuids: tuple[str, ...]
    is_server: bool = False
    #: The fields of the plan that it was started for, None if they were not recorded.
    plan: Any = None

    def __str__(self) -> str:
        """`a control daemon (PID 12)`, `an MPS server (PID 13)`."""
        return f"{'an MPS server' if self.is_server else 'a control daemon'} (PID {self.pid})"


def control_environment(plan: DomainPlan, program: str = "") -> dict[str, str]:
    """The control daemon's environment, built from nothing: just these GPUs, in NVML's order."""
    root = Paths.from_environment().root
    return {
        **client_variables(plan.pipe_directory),
        "PATH": server_path(program),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_LOG_DIRECTORY": plan.log_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.gpu_uuids),
        MARK: plan.name,
        **({} if root == "/" else {ROOT_VARIABLE: root}),
    }


def server_path(program: str) -> str:
    """The control daemon's PATH: it looks for NVIDIA's server there alone, so its own place comes first."""
    usual = client_variables("")["PATH"]
    beside = os.path.dirname(program)
    return usual if not beside or beside in usual.split(os.pathsep) else f"{beside}{os.pathsep}{usual}"


def our_processes() -> list[MpsProcess]:
    """Every control daemon and every MPS server of ours that runs, the lowest PIDs first.

    Looks at all processes, 4 us each; 20 us if a daemon ended while it started a control daemon, which may
    still run a script that executes the program. Raises ShortageError if they cannot be listed.
    """
    records = _records()
    recorded = {row.pid: row for row in records}
    plans = {(row.pipe_directory, row.gpu_uuids): row.plan for row in records}
    found = []
    for pid in reversed(all_pids()):
        program = program_name(pid)
        if program in (PROGRAM, SERVER) or pid in recorded or (_STARTING in recorded and program):
            one = _identified(pid, program, recorded.get(pid))
            if one:
                found.append(one._replace(plan=plans.get((one.pipe_directory, one.gpu_uuids))))
    return found


def record(plan: DomainPlan, pid: int = _STARTING) -> None:
    """Write down that a control daemon of ours is about to be started, and then which process it is.

    If that cannot be written, its mark still identifies it.
    """
    places = (plan.pipe_directory, plan.log_directory)
    one = MpsProcess(pid, started_ticks(pid) or 0, *places, plan.gpu_uuids, plan=plan._asdict())
    path = _record_of(plan)
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps(one._asdict()))


def forget(plan: DomainPlan) -> None:
    """Remove what was written down of a control daemon that has ended."""
    path = _record_of(plan)
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))  # unless it has others


def _record_of(plan: DomainPlan) -> str:
    name = plan.pipe_directory.replace("%", "%25").replace("/", "%2F")
    return f"{Paths.from_environment().control_daemons}/{name}"


def could_be_ours(pid: int) -> bool:
    """Whether it is NVIDIA's control program, and root's or of our user."""
    return program_name(pid) == PROGRAM and _is_trusted(pid, is_server=False)


def _is_trusted(pid: int, *, is_server: bool) -> bool:
    """Whether only root, or our user, can have started the process; no other can have chosen what it says.

    A server runs as its clients' user, but keeps the group of its control daemon (measured), which that user
    cannot have. A set-user-ID program keeps the real user of who started it.
    """
    found = credentials_of(pid)
    if found is None:
        return False
    return {0, os.geteuid()}.issuperset(found.uids) or (is_server and {os.getegid()}.issuperset(found.gids))


def _identified(pid: int, program: str, recorded: MpsProcess | None) -> MpsProcess | None:
    """The process if it is ours."""
    started = started_ticks(pid)
    # A control daemon's child is its server, also before it has come as far as that program.
    is_server = program == SERVER or program_name(parent_of(pid)) == PROGRAM
    if started is None or not _is_trusted(pid, is_server=is_server):
        return None
    if recorded and recorded.started_ticks == started:
        return recorded
    environment = _environment_after_exec(pid)
    place = environment.get("CUDA_MPS_PIPE_DIRECTORY", "")
    log_directory = environment.get("CUDA_MPS_LOG_DIRECTORY", "")
    if MARK in environment:
        gpu_uuids = tuple(environment.get("CUDA_VISIBLE_DEVICES", "").split(","))
        one = MpsProcess(pid, started, place, log_directory, gpu_uuids, is_server)
        return one if _has_our_root(pid, environment) else None
    taken = taken_over_parent_of(pid, environment) if is_server else taken_over(pid)
    if taken is None:
        return None
    return MpsProcess(pid, started, taken.pipe_directory, log_directory, taken.gpu_uuids, is_server)


def _environment_after_exec(pid: int) -> dict[str, str]:
    """The environment of a process; waits for it, because it is empty while the program is being loaded."""
    while not (environment := environment_of(pid)):
        if (age := _age_s(pid)) is None or age > _EXEC_S:
            break
        time.sleep(0.0005)
    return environment


def _age_s(pid: int) -> float | None:
    """How many seconds ago the process was forked, to a hundredth; None if it is gone."""
    ticks = started_ticks(pid)
    if ticks is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _has_our_root(pid: int, environment: Mapping[str, str]) -> bool:
    """Whether a daemon with our root started it: not one of another test, and not one in a container."""
    if environment.get(ROOT_VARIABLE, "/") != Paths.from_environment().root:
        return False
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
    except OSError:
        return False


def _records() -> list[MpsProcess]:
    """What was written down, without what is not ours, or cannot be understood."""
    unreadable = (OSError, ValueError, TypeError, AttributeError, RecursionError)
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(Paths.from_environment().control_daemons):
            with contextlib.suppress(*unreadable), open(entry.path, "rb") as file:
                if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
                    one = MpsProcess(**json.load(file))
                    found.append(one._replace(gpu_uuids=tuple(one.gpu_uuids)))
    return found
