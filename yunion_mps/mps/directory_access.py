"""Whether users can reach the sockets in a pipe directory, and no other user can replace them.

The daemon and the doctor both ask this module, so `status` and `doctor` agree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from yunion_mps.core.errors import HostError
from yunion_mps.mps.directories import directory_of, find_obstacle, locate
from yunion_mps.mps.obstacles import enter_hint

_ALL_ENTER = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_ALL_WRITE = 0o222


class AccessProblem(NamedTuple):
    """What is wrong with a path, and what the operator should do."""

    what: str
    hint: str


def find_access_problems(root: str, directory: str, group: str | None) -> list[AccessProblem]:
    """Return what is wrong with the path of a pipe directory, with its entries, or with its socket.

    What other users have done is found as a start finds it. Changes nothing.

    root: the host's root, whose own parents are not checked
    directory: the pipe directory, below the root
    group: the only group that may enter the pipe directory, if any

    Raises FileNotFoundError if the directory does not exist.
    """
    obstacle = find_obstacle(directory)
    if obstacle:
        return [AccessProblem(obstacle.message, obstacle.hint)]
    return list(_check_path(root, directory, group)) or list(_check_socket(directory))


def _check_path(root: str, directory: str, group: str | None) -> Iterator[AccessProblem]:
    """Check who can enter each directory from the host's root to `directory`."""
    path = root.rstrip("/")
    names = [name for name in directory[len(path) :].split("/") if name]
    for number, name in enumerate(names):
        path = f"{path}/{name}"
        try:
            with directory_of(f"{path}/.") as (opened, _):
                info = os.fstat(opened)
        except PermissionError:  # its parent cannot be entered, which was reported
            return
        except HostError as error:
            yield AccessProblem(error.message, error.hint)
            return
        last = number == len(names) - 1
        yield from _check_entering(path, info, closed=last and bool(group))


def _check_entering(path: str, info: os.stat_result, *, closed: bool) -> Iterator[AccessProblem]:
    if closed and info.st_mode & stat.S_IXOTH:
        text = f"{path} is open to all users, but cuda_mps_pipe_group limits it to one group"
        yield AccessProblem(text, "systemctl reload yunion-mps-daemon")
    elif not closed and info.st_mode & _ALL_ENTER != _ALL_ENTER:
        text = f"{path} is not accessible to other users: their programs cannot reach the control daemon"
        yield AccessProblem(f"{text}, and neither can their MPS servers", enter_hint(path))


def _check_socket(directory: str) -> Iterator[AccessProblem]:
    path = f"{directory}/control"
    try:
        with locate(path) as control:
            mode = os.fstat(control).st_mode
    except (OSError, HostError):
        return
    if mode & _ALL_WRITE != _ALL_WRITE:
        yield AccessProblem(f"other users may not connect to {path}", f"chmod a+rw {path}")
