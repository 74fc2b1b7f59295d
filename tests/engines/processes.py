"""The programs of Ray, Dask and Parsl, and all processes of an engine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from integration.daemon_host import eventually, is_running
from simhost.environment import CHECKOUT

#: The programs of the virtual environment that scripts/setup creates for the engines.
ENGINES = CHECKOUT / ".engines/bin"


def with_engines(env: Mapping[str, str], *folders: Path) -> dict[str, str]:
    """A host's environment in which these folders and the programs of the engines come first."""
    return {**env, "PATH": os.pathsep.join([*map(str, folders), str(ENGINES), env["PATH"]])}


def kill_all_of(folder: Path) -> None:
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: not any(map(is_running, processes_of(folder))), f"the end of all processes of {folder}"
    )


def processes_of(folder: Path) -> list[int]:
    """All other processes that have the folder in their environment, or a file or socket of it open.

    Some, such as slurmstepd, write their title over their environment, and may have only a socket there.
    """
    found, sockets = [], _sockets_in(folder)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            proc = Path("/proc", entry)
            files = {os.readlink(link) for link in (proc / "fd").iterdir()}
            is_ours = bytes(folder) in (proc / "environ").read_bytes()
            if int(entry) != os.getpid() and (
                is_ours or sockets & files or any(file.startswith(str(folder)) for file in files)
            ):
                found.append(int(entry))
    return found


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


def _sockets_in(folder: Path) -> set[str]:
    """The Unix sockets that are bound in the folder, as the links in /proc/PID/fd name them."""
    rows = map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:])
    return {f"socket:[{row[6]}]" for row in rows if row[-1].startswith(str(folder))}
