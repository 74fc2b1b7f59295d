"""Starting a control daemon: its directories, its log and its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from yunion_mps.errors import HostError, ShortageError
from yunion_mps.host.processes import Process, spawn
from yunion_mps.models import DomainPlan
from yunion_mps.mps import directories
from yunion_mps.mps.adoption import find
from yunion_mps.mps.control import SilentError, peer_of
from yunion_mps.mps.log_file import LOG_NAME, look_at_log
from yunion_mps.mps.ownership import MpsProcess, control_environment, forget, record

#: Has the control daemon give all users one server; before 570 it is not known.
MULTIUSER = "-multiuser-server"

#: It listens after about 2 ms.
START_TIMEOUT_S = 10.0
_FIRST_LOOK_S = 0.0002
_LONGEST_LOOK_S = 0.05


def prepare(plan: DomainPlan) -> None:
    """Make both directories, and see that nothing of another user lies where clients go.

    Raises HostError where that is not so, or cannot be found out.
    """
    set_access(plan)
    try:
        for path in (plan.log_directory, plan.pipe_directory):
            directory = directories.make_directory(path)
            try:
                directories.check_entries(directory, path)
            finally:
                os.close(directory)
    except OSError as error:
        raise ShortageError(f"the domain's directories cannot be made: {error}") from None


def set_access(plan: DomainPlan) -> None:
    """Make the pipe directory, and set who may enter it as planned; raises HostError."""
    try:
        directory = directories.make_directory(plan.pipe_directory)
        try:
            directories.set_access(directory, plan.pipe_directory, plan.pipe_group)
        finally:
            os.close(directory)
    except OSError as error:
        raise ShortageError(f"access to {plan.pipe_directory} cannot be set: {error}") from None


def obstacle(plan: DomainPlan, ours: Sequence[MpsProcess] | None = None) -> HostError | None:
    """What would keep a control daemon from being started, or taken over; `ours` as `find` takes it."""
    try:
        found = find(plan, ours)
        if found:
            found.process.close()
        else:
            prepare(plan)
    except HostError as error:
        return error
    return None


def begin(program: str, plan: DomainPlan) -> Process:
    """Start NVIDIA's control daemon in the foreground, its log behind what is there; raises HostError."""
    prepare(plan)
    try:
        directory = directories.make_directory(plan.log_directory)
        try:
            output = directories.open_log(directory, plan.log_directory, LOG_NAME)
        finally:
            os.close(directory)
    except OSError as error:
        raise ShortageError(f"the control daemon's log cannot be opened: {error}") from None
    if plan.pipe_group:
        directories.join(plan.pipe_group)
    words = [program, "-f", MULTIUSER] if plan.multiuser else [program, "-f"]
    record(plan)
    try:
        environment = control_environment(plan, program)
        process = spawn(words, environment, stdin=None, stdout=output, stderr=output)
    except HostError:
        forget(plan)
        raise
    finally:
        os.close(output)
    record(plan, process.pid)
    return process


class Starting:
    """Waiting for a control daemon's first sign of life; nothing here waits, or can be watched."""

    def __init__(self, process: Process, plan: DomainPlan, now_s: float) -> None:
        self._process = process
        self._plan = plan
        self._look_s = _FIRST_LOOK_S
        self._deadline_s = now_s + START_TIMEOUT_S

    def descriptors(self) -> list[int]:
        """None tells of it."""
        return []

    def tick(self, now_s: float) -> float | None:
        """When to be called again, sooner at first; None once it listens. Raises SilentError in the end."""
        peer = peer_of(self._plan.pipe_directory)
        if peer and peer.pid == self._process.pid:
            return None
        if now_s >= self._deadline_s:
            what = f"the control daemon did not answer within {START_TIMEOUT_S:g} s after its start"
            raise SilentError(what, look_at_log(self._plan))
        self._look_s = min(self._look_s * 1.5, _LONGEST_LOOK_S)
        return min(now_s + self._look_s, self._deadline_s)

    def close(self) -> None:
        """Nothing is held."""
