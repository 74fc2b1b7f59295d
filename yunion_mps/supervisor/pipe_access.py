"""Pipe directories that users cannot reach, or that others can change: conditions of the host."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from yunion_mps.models import Condition, Event
from yunion_mps.mps.directory_access import find_access_problems
from yunion_mps.reasons import PIPE_DIRECTORY, Reason
from yunion_mps.supervisor.fleet import Fleet

log = logging.getLogger(__name__)


class PipeAccess:
    """Checks the pipe directories of the running domains, at the start and at each poll of the GPUs."""

    def __init__(
        self, fleet: Fleet, root: str, record: Callable[[Event], None], changed: Callable[[], None]
    ) -> None:
        """`root` is that of the host; `changed` is called when the conditions change."""
        self._fleet = fleet
        self._root = root
        self._record = record
        self._changed = changed
        #: The conditions of the last check, each with the name of the first domain that it is about.
        self._domains: dict[Condition, str] = {}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(self._domains)

    def check(self) -> None:
        """Check all directories; log and record what is new, and what is no longer wrong."""
        before = self._domains
        self._domains = self._find()
        for condition, domain in self._domains.items():
            if condition not in before:
                log.warning("%s; %s", condition.reason, condition.hint)
                self._record(Event("error", "domain", domain, condition.reason, code=condition.reason.code))
        for condition, domain in before.items():
            if condition not in self._domains:
                self._record(Event("info", "domain", domain, f"no longer: {condition.reason}"))
        if self._domains.keys() != before.keys():
            self._changed()

    def _find(self) -> dict[Condition, str]:
        found: dict[Condition, str] = {}
        for domain in self._fleet.domains:
            plan = domain.in_effect
            if domain.control.pid is None:
                continue  # before it starts, its directory may not exist
            with contextlib.suppress(OSError):  # the directory is gone, which the domain itself notices
                for what, hint in find_access_problems(self._root, plan.pipe_directory, plan.pipe_group):
                    condition = Condition(Reason(what, PIPE_DIRECTORY), hint)
                    found.setdefault(condition, plan.name)
        return found
