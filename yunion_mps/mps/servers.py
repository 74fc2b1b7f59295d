"""The MPS servers of a control daemon, found without asking it: they are its children."""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.host.proc import children_of, name_of, parent_of, program_name
from yunion_mps.mps.control import PROGRAM
from yunion_mps.mps.ownership import SERVER, our_processes

#: What the kernel keeps of a program's name (TASK_COMM_LEN less its NUL); the control daemon's is the same.
_NAME = SERVER[:15]


def server_pids(control_pid: int) -> list[int]:
    """The PIDs of the control daemon's servers, also of one that is about to start; empty where it is gone.

    Raises ShortageError where they cannot be read.
    """
    return [pid for pid in children_of(control_pid) if name_of(pid) == _NAME]


def is_server(pid: int) -> bool:
    """Whether the process is an MPS server, also one that has not come as far as its program."""
    return name_of(pid) == _NAME


def still_serving(pids: Iterable[int]) -> tuple[int, ...]:
    """Those of the PIDs that are still those of MPS servers; takes no descriptor, so it never lacks one."""
    return tuple(pid for pid in pids if program_name(pid) == SERVER)


def orphans_in(pipe_directory: str) -> list[int]:
    """The PIDs of the servers of ours on the directory whose control daemon is gone.

    Looks at every process. Raises ShortageError if they cannot be listed.
    """
    return [
        one.pid
        for one in our_processes()
        if one.is_server
        and one.pipe_directory == pipe_directory
        and program_name(parent_of(one.pid)) != PROGRAM
    ]


def named(pids: Iterable[int]) -> str:
    """`its MPS server (PID 12)`, `its MPS servers (PIDs 12, 13)`."""
    texts = [str(pid) for pid in pids]
    plural = "s" if len(texts) > 1 else ""
    return f"its MPS server{plural} (PID{plural} {', '.join(texts)})"
