"""The host's domains and the jobs on their GPUs.

If the configuration asks for different control daemons, the running ones continue until their servers have
ended; a domain that needs their GPUs or directory waits for that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Optional, Protocol

from yunion_mps.core import reasons
from yunion_mps.core.enums import ANSWERING, BACKOFF, FAILED, STOPPED, WEDGED
from yunion_mps.core.errors import HostError, UnsafePathError, YunionError
from yunion_mps.core.models import DomainPlan, Event, Plan
from yunion_mps.gpus.blockers import blocks
from yunion_mps.host.proc import command_of, started_ticks, user_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.processes import Watchable, earliest, refuse_if_no_process_can_start
from yunion_mps.host.store import Store
from yunion_mps.mps.control_daemon import start_error
from yunion_mps.mps.directory_record import DirectoryRecord
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.forced_end import UnconfirmedClients
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import MpsProcess, is_server, our_processes
from yunion_mps.planning.division import enforces_budgets
from yunion_mps.supervisor.gpus import Gpus

log = logging.getLogger(__name__)

#: The memory in MiB that each process uses, by GPU UUID and PID; None if the driver does not report it.
Processes = Mapping[str, Mapping[int, Optional[int]]]

_JUST_BEFORE_S = 0.1


class FleetEndOrder(NamedTuple):
    """The order to end MPS servers now."""

    #: The servers (PIDs) that end whatever clients they have.
    with_all_clients: AbstractSet[int]
    #: The names of the domains whose other servers end if all of their clients may end, and otherwise after
    #: them.
    with_clients: Collection[str]
    #: Whether a client (PID) may end.
    may_end: Callable[[int], bool]


class Fleet:
    """All domains of the host: running, retiring, and blocked by others."""

    def __init__(
        self,
        store: Callable[[], Store],
        gpus: Gpus,
        emit: Callable[[Event], None],
        changed: Callable[[], None],
        directory_record: DirectoryRecord,
    ) -> None:
        """Tell `emit` of events, and call `changed` when the state of a domain has changed.

        store: opens the state file; raises HostError
        directory_record: that of the directories that are created for control daemons
        """
        self.domains: list[Domain] = []
        self.blocked: list[DomainPlan] = []
        self._records = LimitRecords(store)
        self._gpus = gpus
        self._emit = emit
        self._changed = changed
        self._directory_record = directory_record
        self._program = ""
        self._stop_timeout_s = 0
        self._stopping = False
        self._wants_poll = False
        #: Domains that could not start, until `take_refused`.
        self._refused: list[DomainPlan] = []

    def create_domains(
        self, plans: Sequence[DomainPlan], left: Sequence[LimitsInEffect], program: str, stop_timeout_s: int
    ) -> None:
        """Create the domains of `plans`, and those `left` from an earlier configuration; starts none of them.

        The latter are only supervised until they have no jobs; domains that need their place wait.
        """
        self._program, self._stop_timeout_s = program, stop_timeout_s
        self.domains = [self._create(former.plan) for former in left]
        for domain in self.domains:
            domain.retire()
        self.blocked = [plan for plan in plans if self._is_blocked(plan)]
        self.domains += [self._create(plan) for plan in plans if plan not in self.blocked]

    def start(self, now_s: float, ours: Sequence[MpsProcess]) -> None:
        """Start every domain, or adopt its control daemon if that is among `ours`, the running ones."""
        for domain in self.domains:
            self._start(domain, now_s, ours)

    def apply(
        self,
        plans: Sequence[DomainPlan],
        program: str,
        stop_timeout_s: int,
        now_s: float,
        waiting: Collection[str] = (),
    ) -> None:
        """Make `plans` the desired domains: change those that only differ in limits, replace the others.

        `waiting` has the GPUs (UUIDs) whose changes wait for leases.
        """
        if self._stopping:
            return
        self._program, self._stop_timeout_s = program, stop_timeout_s
        unassigned = list(plans)
        for domain in self.domains:
            domain.configure(program, stop_timeout_s)
            plan = next((plan for plan in unassigned if domain.can_serve(plan)), None)
            if plan is None:
                domain.retire()
            else:
                unassigned.remove(plan)
                self._records.write_before_change(domain, plan)
                waits = not set(plan.gpu_uuids).isdisjoint(waiting)
                domain.change(plan, now_s, waits_for_leases=waits)
        self.blocked = unassigned
        self._advance(now_s)

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float | None:
        """Do what is due in every domain; return when the next call is due at the latest."""
        find = functools.lru_cache(our_processes)
        due = [domain for domain in self.domains if readable is None or domain.is_due(now_s, readable)]
        for domain in due:
            domain.tick(now_s, find)
            self._note_refused(domain)
        self._records.write(due)
        if self._advance(now_s):
            return now_s
        return earliest(domain.due_s for domain in self.domains)

    def stop(self, now_s: float, *, spare_adopted: bool) -> None:
        """Begin to stop every domain, and start no others."""
        self._stopping = True
        self.blocked = []
        for domain in self.domains:
            domain.stop(now_s, spare_adopted=spare_adopted)

    def refuse_if_none_can_start(self, ours: Sequence[MpsProcess]) -> None:
        """Raise the first HostError if no domain can start."""
        plans = [domain.desired for domain in self.domains]
        errors = []
        for plan in plans:
            error = start_error(plan, ours, self._directory_record)
            if error:
                errors.append(error)
        if errors and len(errors) == len(self.domains):
            raise errors[0]

    def refuse_if_any_cannot_start(self, plans: Iterable[DomainPlan]) -> None:
        """Raise HostError if a new domain cannot start.

        Raises ShortageError if a domain is to change, and no process can be started to send it commands.
        """
        plans = list(plans)
        if plans != [domain.desired for domain in self.domains]:
            refuse_if_no_process_can_start()
        places = {domain.in_effect.pipe_directory for domain in self.domains}
        for plan in plans:
            if plan.pipe_directory in places:
                continue
            error = start_error(plan, directory_record=self._directory_record)
            if error:
                raise error

    def refuse_if_not_recorded(self) -> None:
        """Raise HostError if the limits in effect cannot be recorded, because then nothing may change."""
        self._records.rewrite(self.domains)

    @property
    def started(self) -> bool:
        """Whether every domain answers or reports why it is not, and none is being retried at the moment."""
        return all(_has_started(domain) for domain in self.domains)

    @property
    def settled(self) -> bool:
        """Whether all are `started`, and only servers delay the end of those that have to end."""
        return self.started and all(domain.server_pids() for domain in self.domains if domain.retiring)

    @property
    def stopped(self) -> bool:
        return all(domain.state == STOPPED for domain in self.domains)

    def common_error(self) -> YunionError | None:
        """Return why no domain can serve; None if one does, or if a control daemon may still become ready."""
        if any(domain.control.has_process for domain in self.domains):
            return None
        return next((domain.error for domain in self.domains if domain.error), None)

    def known_directories(self) -> set[str]:
        return {domain.in_effect.pipe_directory for domain in self.domains if domain.status().pid is not None}

    def drain(self, now_s: float) -> None:
        """End the servers that a pending change waits for after their jobs, and admit no new ones."""
        for domain in self.domains:
            domain.drain(now_s)

    def end_servers(self, now_s: float, order: FleetEndOrder) -> None:
        """End the servers that a pending change waits for now, as far as the order allows; see its members.

        What became of other clients is returned by `take_unconfirmed`.
        """
        for domain in self.domains:
            is_unlisted = not order.with_all_clients.isdisjoint(domain.server_pids())
            if is_unlisted or domain.in_effect.name in order.with_clients:
                domain.end_servers(now_s, order.may_end, order.with_all_clients)
            else:
                domain.drain(now_s)

    def is_forcing(self, now_s: float) -> bool:
        """Whether it is not yet known which servers are not ended because of `may_end`."""
        return any(domain.is_forcing(now_s) for domain in self.domains)

    def take_unconfirmed(self) -> list[UnconfirmedClients]:
        """Return the clients for which `may_end` was false, with their servers; only once."""
        unconfirmed = []
        for domain in self.domains:
            unconfirmed += domain.take_unconfirmed()
        return unconfirmed

    def take_refused(self) -> list[DomainPlan]:
        """Return the domains whose control daemon could not be started, perhaps because of other users; once.

        Clients of a domain that has served before know its directories, but nothing serves them there.
        """
        refused, self._refused = self._refused, []
        return refused

    def take_poll_request(self) -> bool:
        """Whether the GPUs should be polled now; true only once for each cause."""
        requests = [self._wants_poll, *(domain.take_poll_request() for domain in self.domains)]
        self._wants_poll = False
        return any(requests)

    @property
    def has_servers(self) -> bool:
        """Whether a domain has an MPS server, and so perhaps a job."""
        return any(domain.server_pids() for domain in self.domains)

    def _start(self, domain: Domain, now_s: float, ours: Sequence[MpsProcess] | None = None) -> None:
        domain.start(now_s, ours)
        self._note_refused(domain)

    def _note_refused(self, domain: Domain) -> None:
        # After a first failure, it is started again where its clients know it.
        is_refused = domain.state == FAILED or isinstance(domain.error, UnsafePathError)
        is_down = domain.state in (BACKOFF, FAILED) and not domain.control.has_process
        if is_refused and is_down and not domain.retiring:
            self._refused.append(domain.desired)

    def _advance(self, now_s: float) -> bool:
        """Drop ended domains and start those that waited for them; return whether there were any."""
        for domain in self.domains:
            if not domain.retiring and not self._stopping and self._is_to_be_replaced(domain):
                domain.retire()
                self.blocked.append(domain.desired)
        ended = [domain for domain in self.domains if domain.retiring and domain.state == STOPPED]
        for domain in ended:
            self.domains.remove(domain)
            self._records.forget(domain)
        begun = [plan for plan in self.blocked if not self._is_blocked(plan)]
        for plan in begun:
            self.blocked.remove(plan)
            domain = self._create(plan)
            self.domains.append(domain)
            self._start(domain, now_s)
        self._wants_poll |= bool(ended)  # their GPUs' modes may have to be restored
        if ended or begun:
            self._changed()
        return bool(ended or begun)

    def _is_to_be_replaced(self, domain: Domain) -> bool:
        """Whether its adopted control daemon lacks a GPU or the group, or serves a surplus GPU.

        A lost GPU is not surplus: it keeps its place in case it returns.
        """
        if domain.state not in ANSWERING or domain.desired == domain.in_effect:
            return False
        desired, served = set(domain.desired.gpu_uuids), set(domain.in_effect.gpu_uuids)
        surplus = served - desired
        has_other_gpus = bool(desired - served or (surplus and surplus & self._gpus.healthy))
        has_other_group = domain.desired.pipe_group != domain.in_effect.pipe_group
        return has_other_gpus or has_other_group

    def _is_blocked(self, plan: DomainPlan) -> bool:
        return any(blocks(domain.in_effect, plan) for domain in self.domains)

    def _create(self, plan: DomainPlan) -> Domain:
        recorded = self._records.read(plan.pipe_directory)
        domain = Domain(
            plan,
            self._program,
            self._emit,
            self._changed,
            recorded=recorded,
            directory_record=self._directory_record,
        )
        domain.configure(self._program, self._stop_timeout_s)
        return domain


def _has_started(domain: Domain) -> bool:
    if domain.state in ANSWERING or domain.is_occupied:
        return True
    return domain.error is not None and domain.state in (WEDGED, BACKOFF, FAILED)


class LimitRecords:
    """Records each domain's limits in effect, for the next daemon if this one is killed.

    MPS servers keep their limits and outlive the daemon. A failure to write is logged and retried.
    """

    def __init__(self, store: Callable[[], Store]) -> None:
        """`store` opens the state file; raises HostError if it cannot."""
        self._store = store
        self._written: dict[str, LimitsInEffect] = {}

    def write(self, domains: Iterable[Domain]) -> None:
        """Record the limits in effect if they have changed.

        While limits are being set, the previous record is kept: it names the servers with the old limits.
        """
        for domain in domains:
            if domain.state in ANSWERING:
                self._write(domain.in_effect.pipe_directory, domain.limits_in_effect)

    def rewrite(self, domains: Iterable[Domain]) -> None:
        """Record the limits again; raises HostError if that fails, because then nothing may change."""
        for domain in domains:
            if domain.state in ANSWERING:
                self._store().record_limits(
                    domain.in_effect.pipe_directory, domain.limits_in_effect.to_json()
                )

    def write_before_change(self, domain: Domain, plan: DomainPlan) -> None:
        """Record which servers keep the current limits, before new servers get different ones.

        Otherwise, if this daemon were killed in between, the next one would assume that they have the new
        limits.
        """
        if plan != domain.desired and domain.status().pid is not None:
            servers = tuple(domain.server_pids())
            self._write(domain.in_effect.pipe_directory, LimitsInEffect(domain.in_effect, servers))

    def read(self, pipe_directory: str) -> LimitsInEffect | None:
        """Return the limits recorded last, by this or an earlier daemon."""
        try:
            return LimitsInEffect.from_json(self._store().recorded_limits(pipe_directory))
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
            self._store().record_limits(pipe_directory, value.to_json())
            self._written[pipe_directory] = value
        except HostError as error:
            log.warning("the limits in effect in %s cannot be recorded: %s", pipe_directory, error.message)


class DesiredPlan(Protocol):
    """What knows the desired plan."""

    #: Its direct GPUs have no domains, and no stop ends their jobs.
    plan: Plan


class Jobs:
    """Processes that used our GPUs at the last poll, except the MPS servers."""

    def __init__(self, fleet: Fleet, gpus: Gpus, desired: DesiredPlan) -> None:
        self._fleet = fleet
        self._gpus = gpus
        self._desired = desired
        #: Start times in clock ticks since boot, by PID.
        self.started: Mapping[int, int] = {}
        #: The MPS servers (PIDs) whose owners have jobs on their GPUs.
        self.servers_with_jobs: frozenset[int] = frozenset()
        self._in_domains: Mapping[int, int] = {}
        self._check_s: float | None = None
        #: Descriptions of the jobs that were still running at the deadline.
        self._late: list[str] = []

    def update(self, processes: Processes, polled_s: float) -> None:
        """Apply the result of a poll that began at `polled_s`: tell each domain whether it has jobs."""
        job_pids: set[int] = set()
        servers_with_jobs: set[int] = set()
        gpus = self._gpus.inventory.gpus
        reliable = {gpu.uuid for gpu in gpus if enforces_budgets(gpu) and gpu.uuid in processes}
        for domain in self._fleet.domains:
            listed = _pids_on(domain.in_effect.gpu_uuids, processes)
            is_quiet = domain.state in ANSWERING and not (listed or domain.server_pids(at_last_tick=True))
            servers = set() if is_quiet else set(domain.server_pids())
            jobs = listed - servers
            job_pids |= jobs
            servers_with_jobs |= _with_jobs_of_their_owner(servers, jobs)
            # "No jobs" is trusted only if NVML lists the servers themselves: before Volta it lists no MPS
            # clients, and in a container without the host's PIDs no processes.
            is_certain = servers <= listed and reliable >= set(domain.in_effect.gpu_uuids)
            in_use: bool | None = None
            if jobs:
                in_use = True
            elif is_certain:
                in_use = False
            domain.note_use(in_use=in_use, polled_s=polled_s)
        self.servers_with_jobs = frozenset(servers_with_jobs)
        self._in_domains = _started(job_pids)
        without_domain = _pids_on([gpu.uuid for gpu in self._desired.plan.direct], processes)
        others = {pid for pid in without_domain - job_pids if not is_server(pid)}
        self.started = {**_started(others), **self._in_domains}

    def end_within(self, wait_s: int, now_s: float) -> None:
        """Give the jobs `wait_s` to end; those that still run just before the deadline are late."""
        jobs = self._running()
        if jobs:
            log.warning("running jobs have up to %d s to end: %s", wait_s, "; ".join(jobs))
        self._check_s = now_s + wait_s - _JUST_BEFORE_S

    def tick(self, now_s: float) -> float | None:
        """At the deadline, record which jobs are late; return the deadline."""
        if self._check_s is not None and now_s >= self._check_s:
            self._check_s, self._late = None, self._running()
        return self._check_s

    def report_late(self) -> Iterator[Event]:
        """Log each late job and yield an event for it."""
        for job in self._late:
            log.warning("%s did not end in time: ended its MPS server", job)
            yield Event(
                severity="warning",
                kind="client",
                subject="stop",
                what=f"{job} did not end in time",
                cause="the daemon was stopped",
                consequence="its MPS server was ended, so its CUDA calls fail",
                code=reasons.CLIENT_KILLED,
            )

    def _running(self) -> list[str]:
        """Describe the jobs that still run: `train.py (PID 12, alice)`."""
        return [_describe_job(pid) for pid, ticks in self._in_domains.items() if started_ticks(pid) == ticks]


def _pids_on(uuids: Iterable[str], processes: Processes) -> set[int]:
    pids: set[int] = set()
    for uuid in uuids:
        pids.update(processes.get(uuid, {}))
    return pids


def _with_jobs_of_their_owner(servers: Collection[int], jobs: Collection[int]) -> set[int]:
    """Return the servers whose owner has one of the jobs; all are PIDs."""
    if not (servers and jobs):
        return set()
    uids = {uid_of(pid) for pid in jobs} - {None}
    return {pid for pid in servers if uid_of(pid) in uids}


def _started(pids: Iterable[int]) -> dict[int, int]:
    return {pid: ticks for pid in pids if (ticks := started_ticks(pid)) is not None}


def _describe_job(pid: int) -> str:
    uid = uid_of(pid)
    user = "" if uid is None else f", {user_name(uid)}"
    return f"{command_of(pid) or 'a process'} (PID {pid}{user})"
