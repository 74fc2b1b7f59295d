"""What clients get, written down in the state file, for the next daemon: servers keep it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.models import DomainPlan, PlannedGpu, Pool, Slice
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.states import READY

log = logging.getLogger(__name__)


class Notes:
    """Of each domain, by its pipe directory; what cannot be written is logged, and tried again."""

    def __init__(self, store: Callable[[], Store]) -> None:
        """`store` opens the state file; raises HostError where it cannot."""
        self._store = store
        self._noted: dict[str, InForce] = {}

    def write(self, domains: Iterable[Domain]) -> None:
        """Write down what clients get, where that is another than noted.

        While limits are being set, the note from before that holds: it names those that keep the old ones.
        """
        for domain in domains:
            if domain.state == READY:
                self._write(domain.plan.pipe_directory, domain.in_force)

    def write_again(self, domains: Iterable[Domain]) -> None:
        """Write it down though it is noted; raises HostError where it cannot be: nothing may change then."""
        for domain in domains:
            if domain.state == READY:
                self._store().note_in_force(domain.plan.pipe_directory, to_json(domain.in_force))

    def write_before_change(self, domain: Domain, plan: DomainPlan) -> None:
        """Note the servers that are to keep what they have, before the next ones get something else.

        A daemon that is killed in between would otherwise take the new limits for theirs.
        """
        if plan != domain.wanted and domain.status().pid is not None:
            servers = tuple(domain.server_pids())
            self._write(domain.plan.pipe_directory, InForce(domain.plan, servers))

    def remembered(self, place: str) -> InForce | None:
        """What an earlier daemon, or this one, has noted of a pipe directory."""
        try:
            return from_json(self._store().in_force(place))
        except HostError:
            return None

    def forget(self, domain: Domain) -> None:
        """It has ended for good."""
        self._noted.pop(domain.plan.pipe_directory, None)
        try:
            self._store().forget_in_force(domain.plan.pipe_directory)
        except HostError as error:
            log.warning("domain %s is still noted: %s", domain.plan.name, error.message)

    def _write(self, place: str, value: InForce) -> None:
        if self._noted.get(place) == value:
            return
        try:
            self._store().note_in_force(place, to_json(value))
            self._noted[place] = value
        except HostError as error:
            log.warning("what clients in %s get is not noted: %s", place, error.message)


def to_json(value: InForce) -> dict[str, Any]:
    """As it is noted in the store."""
    return {"plan": value.plan._asdict(), "old_servers": list(value.old_servers)}


def from_json(value: Any) -> InForce | None:
    """What `to_json` made; None for anything else, such as what another release noted."""
    try:
        gpus = tuple(_planned_gpu(*row) for row in value["plan"]["gpus"])
        plan = DomainPlan(**{**value["plan"], "gpus": gpus})
        return InForce(plan, tuple(int(pid) for pid in value["old_servers"]))
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _planned_gpu(
    uuid: str, limit_mib: Any, count: int, percentage: float, slices: Any, pool: Any
) -> PlannedGpu:
    rows = tuple(Slice(*row) for row in slices)
    return PlannedGpu(uuid, limit_mib, count, percentage, rows, Pool(*pool) if pool else None)
