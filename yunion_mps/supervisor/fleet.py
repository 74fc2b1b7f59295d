"""The host's domains: which there are, which are still to come, and which are to go.

Where the configuration asks for other control daemons than run, those that run go on until their servers have
ended; whatever needs their GPUs or their directory waits for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan, Event, Pool, Slice
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.states import READY, STOPPED
from yunion_mps.store import Store

log = logging.getLogger(__name__)


class Fleet:
    """All domains of the host."""

    def __init__(
        self, store: Callable[[], Store], tell: Callable[[Event], None], changed: Callable[[], None]
    ) -> None:
        self.domains: list[Domain] = []
        self.awaited: list[DomainPlan] = []
        self._store = store
        self._tell = tell
        self._changed = changed
        self._noted: dict[str, InForce] = {}
        self._program = ""
        self._stop_timeout_s = 0
        self._stopping = False
        #: The UUIDs of the GPUs that are there and well.
        self.healthy_gpus: set[str] = set()

    def make(
        self, plans: Sequence[DomainPlan], left: Sequence[InForce], program: str, stop_timeout_s: int
    ) -> None:
        """Have these domains, none of them started, and those that are `left` from a configuration before.

        The latter are only looked after until they have no jobs; what needs their place waits for that.
        """
        self._program, self._stop_timeout_s = program, stop_timeout_s
        self.domains = [self._new(one.plan) for one in left]
        for domain in self.domains:
            domain.retire()
        self.awaited = [plan for plan in plans if self._in_the_way(plan)]
        self.domains += [self._new(plan) for plan in plans if plan not in self.awaited]

    def start(self, now_s: float) -> None:
        """Start every domain."""
        for domain in self.domains:
            self._start(domain, now_s)

    def aim(self, plans: Sequence[DomainPlan], program: str, stop_timeout_s: int, now_s: float) -> None:
        """Have these from now on: change what differs in its limits alone, retire and start the rest."""
        if self._stopping:
            return
        self._program, self._stop_timeout_s = program, stop_timeout_s
        left = list(plans)
        for domain in self.domains:
            domain.program, domain.stop_timeout_s = program or domain.program, stop_timeout_s
            plan = next((plan for plan in left if _can_serve(domain, plan)), None)
            if plan is None:
                domain.retire()
            else:
                left.remove(plan)
                self._note_before_change(domain, plan)
                domain.change(plan, now_s)
        self.awaited = left
        self._go_on(now_s)

    def tick(self, now_s: float) -> float | None:
        """Do what is due in every domain; return when to be called again at the latest."""
        times = [due_s for domain in self.domains if (due_s := domain.tick(now_s)) is not None]
        if self._go_on(now_s):
            return now_s
        self._note()
        return min(times, default=None)

    def stop(self, now_s: float, *, spare_found: bool) -> None:
        """Begin to stop every domain, and start none any more."""
        self._stopping = True
        self.awaited = []
        for domain in self.domains:
            domain.stop(now_s, spare_found=spare_found)

    def gpus_in_use(self) -> set[str]:
        """The UUIDs of the GPUs that an MPS server of ours has now, and so perhaps a job."""
        busy = [domain for domain in self.domains if domain.server_pids()]
        return {uuid for domain in busy for uuid in domain.plan.gpu_uuids}

    def _go_on(self, now_s: float) -> bool:
        """Let go of what has ended, and start what waited for that; returns whether anything was done."""
        for domain in self.domains:
            if not domain.retiring and not self._stopping and self._has_other_gpus(domain):
                domain.retire()
                self.awaited.append(domain.wanted)
        ended = [domain for domain in self.domains if domain.retiring and domain.state == STOPPED]
        for domain in ended:
            self.domains.remove(domain)
            self._forget(domain)
        begun = [plan for plan in self.awaited if not self._in_the_way(plan)]
        for plan in begun:
            self.awaited.remove(plan)
            domain = self._new(plan)
            self.domains.append(domain)
            self._start(domain, now_s)
        if ended or begun:
            self._changed()
        return bool(ended or begun)

    def _has_other_gpus(self, domain: Domain) -> bool:
        """Whether it took over a control daemon that lacks a GPU, or serves one that it should not.

        One that is lost for now is none of those: it has its place, should it come back.
        """
        wanted, served = set(domain.wanted.gpu_uuids), set(domain.plan.gpu_uuids)
        return domain.state == READY and bool(wanted - served or (served - wanted) & self.healthy_gpus)

    def _in_the_way(self, plan: DomainPlan) -> bool:
        return any(
            domain.plan.pipe_directory == plan.pipe_directory
            or set(domain.plan.gpu_uuids) & set(plan.gpu_uuids)
            for domain in self.domains
        )

    def _new(self, plan: DomainPlan) -> Domain:
        remembered = self._remembered(plan.pipe_directory)
        domain = Domain(plan, self._program, self._tell, self._changed, remembered)
        domain.stop_timeout_s = self._stop_timeout_s
        return domain

    def _start(self, domain: Domain, now_s: float) -> None:
        """Note where a control daemon is about to run, for the next daemon, should this one not end it."""
        try:
            self._store().remember_domain(domain.wanted.pipe_directory)
        except HostError as error:
            log.warning("domain %s is not noted: %s. %s", domain.wanted.name, error.message, error.hint)
        domain.start(now_s)

    def _note(self) -> None:
        """Write down what clients get, where that is another than noted.

        While limits are being set, the note from before that holds: it names those that keep the old ones.
        """
        for domain in self.domains:
            if domain.state == READY:
                self._write(domain.plan.pipe_directory, domain.in_force)

    def note_all(self) -> None:
        """Write down again what clients get; raises HostError where it cannot be: nothing may change then."""
        for domain in self.domains:
            if domain.state == READY:
                self._store().note_in_force(domain.plan.pipe_directory, to_json(domain.in_force))

    def _note_before_change(self, domain: Domain, plan: DomainPlan) -> None:
        """Note the servers that are to keep what they have, before the next ones get something else.

        A daemon that is killed in between would otherwise take the new limits for theirs.
        """
        if plan != domain.wanted and domain.status().pid is not None:
            servers = tuple(domain.server_pids())
            self._write(domain.plan.pipe_directory, InForce(domain.plan, servers))

    def _write(self, place: str, value: InForce) -> None:
        if self._noted.get(place) == value:
            return
        try:
            self._store().note_in_force(place, to_json(value))
            self._noted[place] = value
        except HostError as error:
            log.warning("what clients in %s get is not noted: %s", place, error.message)

    def _remembered(self, place: str) -> InForce | None:
        try:
            return from_json(self._store().in_force(place))
        except HostError:
            return None

    def _forget(self, domain: Domain) -> None:
        self._noted.pop(domain.plan.pipe_directory, None)
        try:
            self._store().forget_domain(domain.plan.pipe_directory)
        except HostError as error:
            log.warning("domain %s is still noted: %s", domain.plan.name, error.message)


def _can_serve(domain: Domain, plan: DomainPlan) -> bool:
    """Whether the domain can go on with this plan: its control daemon has just its GPUs, or is to have."""
    if domain.taken_over and not domain.taken_over.can_serve(plan):
        return False
    if plan.same_control_daemon(domain.wanted):
        return True
    serves = set(domain.plan.gpu_uuids) == set(plan.gpu_uuids)
    return serves and plan._replace(gpu_uuids=domain.wanted.gpu_uuids).same_control_daemon(domain.wanted)


def to_json(value: InForce) -> dict[str, Any]:
    """As it is noted in the store."""
    return {"plan": value.plan._asdict(), "old_servers": list(value.old_servers)}


def from_json(value: Any) -> InForce | None:
    """What `to_json` made; None for anything else, such as what another release noted."""
    try:
        fields = {name: _tuple(field) for name, field in value["plan"].items()}
        fields["slices"] = tuple(Slice(*row) for row in fields.get("slices", ()))
        fields["pools"] = tuple(Pool(*row) for row in fields.get("pools", ()))
        return InForce(DomainPlan(**fields), tuple(int(pid) for pid in value["old_servers"]))
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def _tuple(field: Any) -> Any:
    return tuple(field) if isinstance(field, list) else field


def server_pids(domains: Iterable[Domain]) -> list[int]:
    """The PIDs of all MPS servers."""
    return [pid for domain in domains for pid in domain.server_pids()]
