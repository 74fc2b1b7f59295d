"""What the next daemon needs if this one is killed, and what an earlier daemon left behind.

MPS servers keep their limits and outlive the daemon, so the limits that are in effect are recorded in the
state file by pipe directory. At a start, our running control daemons are found by their processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.models import DomainPlan, PlannedGpu, Pool, Slice
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import PROGRAM, MpsProcess, our_processes
from yunion_mps.mps.states import READY

log = logging.getLogger(__name__)

RESTORED_LATER = "the next start of yunion-mps-daemon then restores its GPUs' compute modes"


class LimitRecords:
    """Records the limits in effect of each domain; a failure to write is logged, and the write is retried."""

    def __init__(self, store: Callable[[], Store]) -> None:
        """`store` opens the state file; raises HostError if it cannot."""
        self._store = store
        self._written: dict[str, LimitsInEffect] = {}

    def write(self, domains: Iterable[Domain]) -> None:
        """Record what clients get if that has changed.

        While limits are being set, the record from before holds: it names the servers that keep the old ones.
        """
        for domain in domains:
            if domain.state == READY:
                self._write(domain.plan.pipe_directory, domain.in_effect)

    def rewrite(self, domains: Iterable[Domain]) -> None:
        """Record the limits again; raises HostError if that fails, because then nothing may change."""
        for domain in domains:
            if domain.state == READY:
                self._store().record_limits(domain.plan.pipe_directory, to_json(domain.in_effect))

    def write_before_change(self, domain: Domain, plan: DomainPlan) -> None:
        """Record the servers that keep the present limits, before new servers get different ones.

        Otherwise, if this daemon were killed in between, the next would assume that they have the new limits.
        """
        if plan != domain.desired and domain.status().pid is not None:
            servers = tuple(domain.server_pids())
            self._write(domain.plan.pipe_directory, LimitsInEffect(domain.plan, servers))

    def read(self, pipe_directory: str) -> LimitsInEffect | None:
        """What an earlier daemon, or this one, has recorded."""
        try:
            return from_json(self._store().recorded_limits(pipe_directory))
        except HostError:
            return None

    def forget(self, domain: Domain) -> None:
        """Delete the record of a control daemon that has ended for good."""
        self._written.pop(domain.plan.pipe_directory, None)
        try:
            self._store().forget_limits(domain.plan.pipe_directory)
        except HostError as error:
            log.warning("domain %s: its record cannot be deleted: %s", domain.plan.name, error.message)

    def _write(self, pipe_directory: str, value: LimitsInEffect) -> None:
        if self._written.get(pipe_directory) == value:
            return
        try:
            self._store().record_limits(pipe_directory, to_json(value))
            self._written[pipe_directory] = value
        except HostError as error:
            log.warning("the limits in effect in %s cannot be recorded: %s", pipe_directory, error.message)


def to_json(value: LimitsInEffect) -> dict[str, Any]:
    """As it is recorded in the store."""
    return {"plan": value.plan._asdict(), "old_servers": list(value.old_servers)}


def from_json(value: Any) -> LimitsInEffect | None:
    """What `to_json` made; None for anything else, such as what another release recorded."""
    try:
        gpus = tuple(_planned_gpu(*row) for row in value["plan"]["gpus"])
        plan = DomainPlan(**{**value["plan"], "gpus": gpus})
        return LimitsInEffect(plan, tuple(int(pid) for pid in value["old_servers"]))
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _planned_gpu(
    uuid: str, limit_mib: Any, count: int, percentage: float, slices: Any, pool: Any
) -> PlannedGpu:
    rows = tuple(Slice(*row) for row in slices)
    return PlannedGpu(uuid, limit_mib, count, percentage, rows, Pool(*pool) if pool else None)


class Leftovers(NamedTuple):
    """What an earlier daemon left behind, and the plan does not adopt.

    `running` are all processes of ours, `known` is to be looked after until it has no jobs, and `notice` says
    what the operator has to do about a control daemon without a record.
    """

    running: list[MpsProcess]
    known: list[LimitsInEffect]
    notice: str


def find_leftovers(store: Store | None, planned: Sequence[DomainPlan]) -> Leftovers:
    """Find leftovers; raise HostError if a control daemon without a record serves a GPU that the plan needs.

    It may have jobs, so it is not touched; and none of its GPUs gets a second control daemon.
    """
    gpus = {plan.pipe_directory: set(plan.gpu_uuids) for plan in planned}
    needed = {uuid for uuids in gpus.values() for uuid in uuids}
    found = Leftovers(left_running(store), [], "")
    for one in found.running:
        place = one.pipe_directory
        if one.is_server or gpus.get(place, set()) & set(one.gpu_uuids):
            continue
        recorded = (from_json(store.recorded_limits(place)) if store else None) or from_json(
            {"plan": one.plan, "old_servers": ()}  # it was started, and its daemon ended before it served
        )
        if recorded and recorded.plan.gpu_uuids == one.gpu_uuids:
            found.known.append(recorded)
            continue
        what = f"a control daemon (PID {one.pid}) from an earlier run still serves {place}"
        hint = (
            f"once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}; "
            f"{RESTORED_LATER}"
        )
        if needed & set(one.gpu_uuids):
            raise HostError(what, hint)
        log.error("%s. %s", what, hint)
        found = found._replace(notice=f"{what}; {hint}")
    return found


def left_running(store: Store | None, watched: Collection[str] = ()) -> list[MpsProcess]:
    """The MPS processes of ours that run in pipe directories which are not `watched`.

    Records of directories without any are deleted. Raises ShortageError if processes cannot be listed.
    """
    running = our_processes()
    used = {*watched, *(one.pipe_directory for one in running)}
    try:
        for place in store.recorded_domains() if store else ():
            if store and place not in used:
                store.forget_limits(place)
    except HostError as error:
        log.warning("records of ended control daemons cannot be deleted: %s. %s", error.message, error.hint)
    return [one for one in running if one.pipe_directory not in watched]


def gpus_of(processes: Iterable[MpsProcess]) -> set[str]:
    """The UUIDs of the GPUs that they serve."""
    return {uuid for one in processes for uuid in one.gpu_uuids}
