"""The host's domains: which there are, which are still to come, and which are to go.

Where the configuration asks for other control daemons than run, those that run go on until their servers have
ended; whatever needs their GPUs or their directory waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from yunion_mps.errors import YunionError
from yunion_mps.host.processes import refuse_if_no_process_can_start
from yunion_mps.host.store import Store
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps.applying import InForce
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.launch import obstacle
from yunion_mps.mps.ownership import MpsProcess
from yunion_mps.mps.states import BACKOFF, FAILED, READY, STOPPED, WEDGED
from yunion_mps.supervisor.notes import Notes


class Fleet:
    """All domains of the host."""

    def __init__(
        self, store: Callable[[], Store], tell: Callable[[Event], None], changed: Callable[[], None]
    ) -> None:
        self.domains: list[Domain] = []
        self.awaited: list[DomainPlan] = []
        self._notes = Notes(store)
        self._tell = tell
        self._changed = changed
        self._program = ""
        self._stop_timeout_s = 0
        self._stopping = False
        self._wants_look = False
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

    def start(self, now_s: float, ours: Sequence[MpsProcess]) -> None:
        """Start every domain, or take over its control daemon if one is among `ours`, which run already."""
        for domain in self.domains:
            domain.start(now_s, ours)

    def aim(self, plans: Sequence[DomainPlan], program: str, stop_timeout_s: int, now_s: float) -> None:
        """Have these from now on: change what differs in its limits alone, retire and start the rest."""
        if self._stopping:
            return
        self._program, self._stop_timeout_s = program, stop_timeout_s
        left = list(plans)
        for domain in self.domains:
            domain.control.program = program or domain.control.program
            domain.stop_timeout_s = stop_timeout_s
            plan = next((plan for plan in left if _can_serve(domain, plan)), None)
            if plan is None:
                domain.retire()
            else:
                left.remove(plan)
                self._notes.write_before_change(domain, plan)
                domain.change(plan, now_s)
        self.awaited = left
        self._go_on(now_s)

    def tick(self, now_s: float) -> float | None:
        """Do what is due in every domain; return when to be called again at the latest."""
        times = [due_s for domain in self.domains if (due_s := domain.tick(now_s)) is not None]
        if self._go_on(now_s):
            return now_s
        self._notes.write(self.domains)
        return min(times, default=None)

    def stop(self, now_s: float, *, spare_found: bool) -> None:
        """Begin to stop every domain, and start none any more."""
        self._stopping = True
        self.awaited = []
        for domain in self.domains:
            domain.stop(now_s, spare_found=spare_found)

    def refuse_if_none_can_start(self, ours: Sequence[MpsProcess]) -> None:
        """Raise the first HostError where something keeps every one of them from starting."""
        obstacles = [error for domain in self.domains if (error := obstacle(domain.wanted, ours))]
        if obstacles and len(obstacles) == len(self.domains):
            raise obstacles[0]

    def refuse_if_any_cannot_start(self, plans: Iterable[DomainPlan]) -> None:
        """Raise HostError where something keeps one from starting for which there is no domain yet.

        Raises ShortageError where one is to change, and no process can be started to tell it so.
        """
        plans = list(plans)
        if plans != [domain.wanted for domain in self.domains]:
            refuse_if_no_process_can_start()
        places = {domain.plan.pipe_directory for domain in self.domains}
        for plan in plans:
            if plan.pipe_directory not in places and (error := obstacle(plan)):
                raise error

    def refuse_if_not_noted(self) -> None:
        """Raise HostError where what clients get cannot be written down: nothing may change then."""
        self._notes.write_again(self.domains)

    @property
    def started(self) -> bool:
        """Whether every domain is ready or has said why it is not, and is not just being tried again."""
        return all(
            domain.state == READY
            or (domain.error and domain.state in (WEDGED, BACKOFF, FAILED))
            or domain.control.waits_for_somebody
            for domain in self.domains
        )

    @property
    def stopped(self) -> bool:
        """Whether every domain has stopped."""
        return all(domain.state == STOPPED for domain in self.domains)

    @property
    def serving(self) -> int:
        """The number of domains that serve."""
        return sum(domain.state == READY for domain in self.domains)

    @property
    def took_over(self) -> bool:
        """Whether a control daemon is watched that ran before us, serving or not."""
        return any(domain.control.took_over for domain in self.domains)

    def first_error(self) -> YunionError | None:
        """Why a domain does not serve, None where all do."""
        return next((domain.error for domain in self.domains if domain.error), None)

    def watched(self) -> set[str]:
        """The pipe directories of the control daemons that run and are known."""
        return {domain.plan.pipe_directory for domain in self.domains if domain.status().pid is not None}

    def renew(self, now_s: float, *, force: bool) -> None:
        """Have the servers that a pending change waits for end: after their jobs, with `force` at once."""
        for domain in self.domains:
            domain.renew(now_s, force=force)

    def take_wants_look(self) -> bool:
        """Whether a look at the GPUs is wanted at once; said only once for each cause."""
        wanted = self._wants_look or any(domain.wants_look for domain in self.domains)
        self._wants_look = False
        for domain in self.domains:
            domain.wants_look = False
        return wanted

    def gpus_in_use(self) -> set[str]:
        """The UUIDs of the GPUs that an MPS server of ours has now, and so perhaps a job."""
        busy = [domain for domain in self.domains if domain.server_pids()]
        return {uuid for domain in busy for uuid in domain.plan.gpu_uuids}

    def _go_on(self, now_s: float) -> bool:
        """Let go of what has ended, and start what waited for that; returns whether anything was done."""
        for domain in self.domains:
            if not domain.retiring and not self._stopping and self._is_to_be_replaced(domain):
                domain.retire()
                self.awaited.append(domain.wanted)
        ended = [domain for domain in self.domains if domain.retiring and domain.state == STOPPED]
        for domain in ended:
            self.domains.remove(domain)
            self._notes.forget(domain)
        begun = [plan for plan in self.awaited if not self._in_the_way(plan)]
        for plan in begun:
            self.awaited.remove(plan)
            domain = self._new(plan)
            self.domains.append(domain)
            domain.start(now_s)
        self._wants_look |= bool(ended)  # nothing may need their GPUs' modes any more
        if ended or begun:
            self._changed()
        return bool(ended or begun)

    def _is_to_be_replaced(self, domain: Domain) -> bool:
        """Whether it took over a control daemon that lacks a GPU or the group, or serves a GPU too many.

        A GPU that is lost for now is none of those: it has its place, should it come back.
        """
        wanted, served = set(domain.wanted.gpu_uuids), set(domain.plan.gpu_uuids)
        has_other_gpus = bool(wanted - served or (served - wanted) & self.healthy_gpus)
        has_other_group = domain.wanted.pipe_group != domain.plan.pipe_group
        return domain.state == READY and (has_other_gpus or has_other_group)

    def _in_the_way(self, plan: DomainPlan) -> bool:
        return any(
            domain.plan.pipe_directory == plan.pipe_directory
            or set(domain.plan.gpu_uuids) & set(plan.gpu_uuids)
            for domain in self.domains
        )

    def _new(self, plan: DomainPlan) -> Domain:
        remembered = self._notes.remembered(plan.pipe_directory)
        domain = Domain(plan, self._program, self._tell, self._changed, remembered)
        domain.stop_timeout_s = self._stop_timeout_s
        return domain


def _can_serve(domain: Domain, plan: DomainPlan) -> bool:
    """Whether the domain can go on with this plan: its control daemon has just its GPUs, or is to have."""
    taken_over = domain.control.taken_over
    if taken_over and not taken_over.can_serve(plan):
        return False
    if plan.same_control_daemon(domain.wanted):
        return True
    serves = set(domain.plan.gpu_uuids) == set(plan.gpu_uuids)
    return serves and plan.for_gpus(domain.wanted.gpu_uuids).same_control_daemon(domain.wanted)
