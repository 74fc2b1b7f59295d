"""State for the next daemon if this one is killed, and the remains of an earlier daemon.

MPS servers keep their limits and outlive the daemon, so the limits in effect are recorded in the state file
by pipe directory. At a start, our running control daemons are found by their processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.models import DomainPlan
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import PROGRAM, MpsProcess, our_processes, plan_from_json
from yunion_mps.mps.states import READY

log = logging.getLogger(__name__)

RESTORED_LATER = "the next start of yunion-mps-daemon then restores its GPUs' compute modes"


class LimitRecords:
    """Records each domain's limits in effect; logs a failure to write, and retries it."""

    def __init__(self, store: Callable[[], Store]) -> None:
        """`store` opens the state file; raises HostError if it cannot."""
        self._store = store
        self._written: dict[str, LimitsInEffect] = {}

    def write(self, domains: Iterable[Domain]) -> None:
        """Record the limits in effect if they have changed.

        While limits are being set, the previous record is kept: it names the servers with the old limits.
        """
        for domain in domains:
            if domain.state == READY:
                self._write(domain.in_effect.pipe_directory, domain.limits_in_effect)

    def rewrite(self, domains: Iterable[Domain]) -> None:
        """Record the limits again; raises HostError if that fails, because then nothing may change."""
        for domain in domains:
            if domain.state == READY:
                self._store().record_limits(domain.in_effect.pipe_directory, to_json(domain.limits_in_effect))

    def write_before_change(self, domain: Domain, plan: DomainPlan) -> None:
        """Record which servers keep the present limits, before new servers get different ones.

        Otherwise, if this daemon were killed in between, the next one would assume that they have the new
        limits.
        """
        if plan != domain.desired and domain.status().pid is not None:
            servers = tuple(domain.server_pids())
            self._write(domain.in_effect.pipe_directory, LimitsInEffect(domain.in_effect, servers))

    def read(self, pipe_directory: str) -> LimitsInEffect | None:
        """Return the limits recorded last, by this or an earlier daemon."""
        try:
            return from_json(self._store().recorded_limits(pipe_directory))
        except HostError:
            return None

    def forget(self, domain: Domain) -> None:
        """Delete the record of a control daemon that has ended for good."""
        self._written.pop(domain.in_effect.pipe_directory, None)
        try:
            self._store().forget_limits(domain.in_effect.pipe_directory)
        except HostError as error:
            log.warning("domain %s: its record cannot be deleted: %s", domain.in_effect.name, error.message)

    def _write(self, pipe_directory: str, value: LimitsInEffect) -> None:
        if self._written.get(pipe_directory) == value:
            return
        try:
            self._store().record_limits(pipe_directory, to_json(value))
            self._written[pipe_directory] = value
        except HostError as error:
            log.warning("the limits in effect in %s cannot be recorded: %s", pipe_directory, error.message)


def to_json(value: LimitsInEffect) -> dict[str, object]:
    return {"plan": value.plan._asdict(), "old_servers": list(value.old_servers)}


def from_json(value: Any) -> LimitsInEffect | None:
    """Parse the result of `to_json`; None for anything else, such as another release's record."""
    try:
        plan, servers = plan_from_json(value["plan"]), tuple(int(pid) for pid in value["old_servers"])
    except (TypeError, KeyError, ValueError):
        return None
    return LimitsInEffect(plan, servers) if plan else None


class Leftovers(NamedTuple):
    """Processes of an earlier daemon that the plan does not adopt.

    `running` lists all of our processes, `known` the limits of domains to supervise until they have no jobs;
    `notice` says what the operator has to do about a control daemon without a record.
    """

    running: list[MpsProcess]
    known: list[LimitsInEffect]
    notice: str


def find_leftovers(store: Store | None, planned: Sequence[DomainPlan]) -> Leftovers:
    """Find leftovers; raise HostError if a control daemon without a record serves a GPU that the plan needs.

    It may have jobs, so it is left alone, and none of its GPUs gets a second control daemon.
    """
    gpus = {plan.pipe_directory: set(plan.gpu_uuids) for plan in planned}
    needed = {uuid for uuids in gpus.values() for uuid in uuids}
    found = Leftovers(left_running(store), [], "")
    for process in found.running:
        directory = process.pipe_directory
        if process.is_server or gpus.get(directory, set()) & set(process.gpu_uuids):
            continue
        recorded = from_json(store.recorded_limits(directory)) if store else None
        if recorded is None and process.plan:  # its daemon ended before it served
            recorded = LimitsInEffect(process.plan, ())
        if recorded and recorded.plan.gpu_uuids == process.gpu_uuids:
            found.known.append(recorded)
            continue
        what = f"a control daemon (PID {process.pid}) from an earlier run still serves {directory}"
        hint = (
            f"once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {PROGRAM}; "
            f"{RESTORED_LATER}"
        )
        if needed & set(process.gpu_uuids):
            raise HostError(what, hint)
        log.error("%s. %s", what, hint)
        found = found._replace(notice=f"{what}; {hint}")
    return found


def left_running(store: Store | None, watched: Collection[str] = ()) -> list[MpsProcess]:
    """Return our MPS processes that run in pipe directories which are not `watched`.

    Deletes records of directories without processes. Raises ShortageError if processes cannot be listed.
    """
    running = our_processes()
    used = {*watched, *(process.pipe_directory for process in running)}
    try:
        for directory in store.recorded_domains() if store else ():
            if store and directory not in used:
                store.forget_limits(directory)
    except HostError as error:
        log.warning("records of ended control daemons cannot be deleted: %s. %s", error.message, error.hint)
    return [process for process in running if process.pipe_directory not in watched]


def gpus_of(processes: Iterable[MpsProcess]) -> set[str]:
    return {uuid for process in processes for uuid in process.gpu_uuids}
