"""Conditions: what is wrong or pending on the host, each with its reason and what it waits for.

The snapshot has one list of them, made in `supervisor/host_conditions.py` of what it finds and of what other
parts have reported (`Supervisor.set_condition`); what follows from leases and processes is added in
`views/lease_conditions.py`. Everything that says what is wrong or pending reads this list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from yunion_mps.core.enums import (
    ABOUT_COMPUTE_MODE,
    ABOUT_SETTING,
    ABOUT_TIME_SLICE,
    BROKEN,
    IMPAIRED,
    NOTICE,
    PENDING,
    PROBLEM,
    PROBLEM_LEVELS,
    REFUSED,
    WARNING,
)
from yunion_mps.core.reasons import Reason, hint_of
from yunion_mps.core.waits import NO_USERS, Users

#: Settings of a GPU that serves with another value if the driver refuses the configured one.
_DISPENSABLE = frozenset({ABOUT_COMPUTE_MODE, ABOUT_TIME_SLICE, ABOUT_SETTING})
_LEVELS = {NOTICE: NOTICE, BROKEN: PROBLEM, REFUSED: PROBLEM, IMPAIRED: WARNING, PENDING: PENDING}


class Condition(NamedTuple):
    """Something that is wrong or pending; a value, equal as long as nothing about it changes."""

    #: What it is about, one of `CONDITION_KINDS`.
    kind: str
    #: The GPU's address, the domain's name, the entry's path or the lease's id; empty for the host.
    subject: str
    #: One of `CONDITION_STATUSES`, from which its level follows.
    status: str
    #: Why, with its code.
    reason: Reason
    #: What the operator should do, if that is not the hint of the code.
    advice: str = ""
    #: What a pending change waits for, as far as that is leases, servers and processes.
    waits_for: Users = NO_USERS
    #: How people name the subject; empty if the reason names it.
    name: str = ""
    #: The GPU's address; empty if it is not about one GPU.
    gpu: str = ""
    #: The addresses of the devices that it concerns; empty if they are not known or all of a GPU.
    devices: tuple[str, ...] = ()
    #: The process that it is about.
    pid: int | None = None
    #: The `identifier` of the condition that it follows from, which people are shown instead.
    follows_from: str = ""

    @property
    def identifier(self) -> str:
        """The kind and subject, by which other conditions name it."""
        return f"{self.kind} {self.subject}".rstrip()

    @property
    def level(self) -> str:
        """How serious it is for people, one of `PROBLEM_LEVELS`."""
        if self.status == REFUSED and self.kind in _DISPENSABLE:
            return WARNING
        return _LEVELS[self.status]

    @property
    def text(self) -> str:
        """The condition as one line for people."""
        return f"{self.name}: {self.reason}" if self.name else self.reason

    @property
    def hint(self) -> str:
        return self.advice or hint_of(self.reason.code, pid=self.pid)


def with_known_causes(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the conditions; one whose cause is not among them follows from none, so that it is shown."""
    identifiers = {condition.identifier for condition in conditions}
    checked = []
    for condition in conditions:
        is_known = condition.follows_from in identifiers
        checked.append(condition if is_known else condition._replace(follows_from=""))
    return tuple(checked)


def shown(conditions: Iterable[Condition]) -> list[Condition]:
    """Return what people are shown, by level: without conditions that only follow from others."""
    causes = [condition for condition in conditions if not condition.follows_from]
    return sorted(causes, key=lambda condition: PROBLEM_LEVELS.index(condition.level))
