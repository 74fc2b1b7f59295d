"""Starting a control daemon: its directories, its log, and what the log said last."""

from __future__ import annotations

import os

from yunion_mps.errors import ShortageError
from yunion_mps.models import DomainPlan
from yunion_mps.mps import directories
from yunion_mps.mps.adoption import control_environment
from yunion_mps.process import Process, spawn

LOG_NAME = "control.log"
_LOG_LINES = 5


def prepare(plan: DomainPlan) -> None:
    """Make both directories, and see that nothing of another user lies where clients go.

    Raises HostError where that is not so, or cannot be found out.
    """
    try:
        for path in (plan.log_directory, plan.pipe_directory):
            is_pipe = path == plan.pipe_directory
            directory = directories.make_directory(path, traversable=is_pipe)
            try:
                directories.check_entries(directory, path)
            finally:
                os.close(directory)
    except OSError as error:
        raise ShortageError(f"the domain's directories cannot be made: {error}") from None


def launch(program: str, plan: DomainPlan) -> Process:
    """Start NVIDIA's control daemon in the foreground, its log behind what is there; raises HostError."""
    try:
        directory = directories.make_directory(plan.log_directory)
        try:
            output = directories.open_log(directory, plan.log_directory, LOG_NAME)
        finally:
            os.close(directory)
    except OSError as error:
        raise ShortageError(f"the control daemon's log cannot be opened: {error}") from None
    try:
        environment = control_environment(plan)
        return spawn([program, "-f"], environment, stdin=None, stdout=output, stderr=output)
    finally:
        os.close(output)


def look_at_log(plan: DomainPlan) -> str:
    """Where the control daemon's log is, and its last words."""
    path = os.path.join(plan.log_directory, LOG_NAME)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
            lines = file.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        lines = []
    return f"its log is {path}" + "".join(f"\n  {line}" for line in lines)
