"""Pipe directories that users cannot reach, or that others can change: conditions of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_PIPE_DIRECTORY, BROKEN
from yunion_mps.core.reasons import PIPE_DIRECTORY, Reason
from yunion_mps.mps.directory_access import find_access_problems
from yunion_mps.supervisor.fleet import Fleet


class PipeAccess:
    """Checks the pipe directories of domains that have served, at the start and at each poll of the GPUs."""

    def __init__(self, fleet: Fleet, root: str, changed: Callable[[], None]) -> None:
        """`root` is that of the host; `changed` is called when the conditions change."""
        self._fleet = fleet
        self._root = root
        self._changed = changed
        #: The conditions of the last check, each with the name of the first domain that it is about.
        self.conditions: tuple[Condition, ...] = ()

    def check(self) -> None:
        """Check all directories."""
        conditions = self._find()
        if conditions != self.conditions:
            self.conditions = conditions
            self._changed()

    def _find(self) -> tuple[Condition, ...]:
        by_reason: dict[Reason, Condition] = {}
        for domain in self._fleet.domains:
            plan = domain.in_effect
            if domain.control.pid is None or not domain.control.has_served:
                continue  # its directory may not exist yet, nor its socket be open to other users
            with contextlib.suppress(OSError):  # the directory is gone, which the domain itself notices
                for problem, hint in find_access_problems(self._root, plan.pipe_directory, plan.pipe_group):
                    reason = Reason(problem, PIPE_DIRECTORY)
                    condition = Condition(ABOUT_PIPE_DIRECTORY, plan.name, BROKEN, reason, hint)
                    by_reason.setdefault(reason, condition)
        return tuple(by_reason.values())
