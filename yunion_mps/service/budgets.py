"""Terminates the newest process of a lease whose processes together exceed its memory budget for too long.

MPS limits the memory of each process, so the processes of a lease may together use a multiple of its budget.
With `over_budget: terminate` they are polled. A poll is not a limit: other jobs can run out of memory before
it notices.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core.errors import YunionError
from yunion_mps.core.reasons import OVER_BUDGET_TERMINATED
from yunion_mps.core.settings import Config
from yunion_mps.core.units import total_mib
from yunion_mps.host.control_groups import ControlGroup
from yunion_mps.host.proc import is_exiting
from yunion_mps.host.stderr import write_to_stderr
from yunion_mps.observe.holdings import ID_LENGTH, start_order
from yunion_mps.observe.observer import Observer
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.permissions import attested_container
from yunion_mps.service.queries import Queries
from yunion_mps.service.terminate import TERM, Terminator, may_terminate
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps.answers import ClientListJson, LeaseRecordJson, MpsClientJson

log = logging.getLogger(__name__)

#: If samples are further apart than this, the job may have been within its budget in between.
MAX_GAP_S = 5.0
#: Once its server has disconnected it, a process that ignores SIGTERM is safe to kill.
_KILL = (signal.SIGKILL,)


class _Right(NamedTuple):
    """The right to terminate processes: of this user, and in this control group."""

    uid: int
    container: ControlGroup | None


class JobBudget(NamedTuple):
    """The memory of a GPU that the processes of one user share through a lease.

    Each user's processes are counted separately: a user who names another user's lease in a process's
    environment endangers only that process.
    """

    #: The lease's id.
    lease: str
    #: The GPU's address.
    gpu: str
    uid: int
    #: The budgets of the lease's devices on the GPU, together.
    memory_mib: int


class Excess(NamedTuple):
    """Processes that together use more memory than their budget."""

    budget: JobBudget
    #: The addresses of the lease's devices on the GPU.
    devices: tuple[str, ...]
    used_mib: int
    #: Those that use memory of the GPU.
    processes: tuple[MpsClientJson, ...]

    @property
    def text(self) -> str:
        """The excess in one clause: the lease, what its processes use, and their budget."""
        return (
            f"the processes of lease {self.budget.lease[:ID_LENGTH]} together use {self.used_mib} of "
            f"{self.budget.memory_mib} MiB ({', '.join(self.devices)})"
        )

    @property
    def newest(self) -> MpsClientJson:
        """The process that was started last."""
        return max(self.processes, key=lambda client: start_order(client["started"], client["pid"]))


def find_excesses(
    leases: Iterable[LeaseRecordJson], clients: Iterable[MpsClientJson], gpus: AbstractSet[str]
) -> dict[JobBudget, Excess]:
    """Return the budgets on these GPUs (addresses) that are exceeded; pure.

    A lease's processes are those that belong to it (`observe/attribution.py`). One that only names a device
    does not count: it may be left over from an earlier lease. Neither does a process outside MPS, or one that
    has ended, or one whose holder has several leases on the GPU, unless it is known which is its own.
    """
    counted = [client for client in clients if client["mps"] is not False and client["started"]]
    excesses: dict[JobBudget, Excess] = {}
    for lease in leases:
        own = [client for client in counted if client["lease"] == lease["id"]]
        users = {client["uid"] for client in own if client["uid"] is not None}
        for gpu in gpus & set(lease["gpus"]):
            for uid in users:
                excess = _find_excess(lease, own, gpu=gpu, uid=uid)
                if excess is not None:
                    excesses[excess.budget] = excess
    return excesses


def _find_excess(
    lease: LeaseRecordJson, clients: Iterable[MpsClientJson], *, gpu: str, uid: int
) -> Excess | None:
    """Return by what the user's processes exceed the lease's budget on the GPU; None if they do not."""
    devices: list[str] = []
    budgets_mib: list[int | None] = []
    for share in lease["budgets"]:
        if share["gpu"] == gpu:
            devices.append(share["addr"])
            budgets_mib.append(share["memory_mib"])
    budget_mib = total_mib(budgets_mib)
    if budget_mib is None:
        return None
    used_mib = 0
    processes: list[MpsClientJson] = []
    for client in clients:
        client_mib = _mib(client, gpu)
        if client["uid"] == uid and client_mib:
            used_mib += client_mib
            processes.append(client)
    if used_mib <= budget_mib:
        return None
    return Excess(
        budget=JobBudget(lease=lease["id"], gpu=gpu, uid=uid, memory_mib=budget_mib),
        devices=tuple(devices),
        used_mib=used_mib,
        processes=tuple(processes),
    )


def _mib(client: MpsClientJson, gpu: str) -> int:
    return dict(zip(client["gpus"], client["memory_by_gpu_mib"])).get(gpu) or 0


class _Span(NamedTuple):
    """The times (monotonic) of the first and the last sample that exceeded a budget, without a gap."""

    first_s: float
    last_s: float


class ExcessClock:
    """How long each budget has been exceeded without interruption."""

    def __init__(self) -> None:
        self._spans: dict[JobBudget, _Span] = {}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def note(self, exceeded: Iterable[JobBudget], unknown: Collection[str], now_s: float) -> None:
        """Record which budgets a sample exceeds; others on `unknown` GPUs (addresses) stay as they are."""
        before = self._spans
        self._spans = {budget: span for budget, span in before.items() if budget.gpu in unknown}
        for budget in exceeded:
            span = before.get(budget)
            first_s = now_s
            if span is not None and now_s - span.last_s <= MAX_GAP_S:
                first_s = span.first_s
            self._spans[budget] = _Span(first_s, now_s)

    def longest(self, grace_s: float, now_s: float) -> JobBudget | None:
        """Return the budget that has been exceeded longest, among those in the sample at `now_s`.

        None if none has been exceeded for `grace_s`.
        """
        longest: tuple[float, JobBudget] | None = None
        for budget, span in self._spans.items():
            is_due = span.last_s == now_s and now_s - span.first_s >= grace_s
            if is_due and (longest is None or (span.first_s, budget) < longest):
                longest = span.first_s, budget
        return longest[1] if longest else None

    def restart(self, lease: str | None = None) -> None:
        """Restart the time of a lease's budgets, or of all budgets."""
        for budget in list(self._spans):
            if lease in (None, budget.lease):
                del self._spans[budget]


class BudgetEnforcer:
    """Terminates processes of jobs that exceed their budgets for too long.

    Only samples of this daemon process count, not those of an earlier one.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        queries: Queries,
        leases: LeaseService,
        observer: Observer,
        terminator: Terminator,
    ) -> None:
        self._supervisor = supervisor
        self._queries = queries
        self._leases = leases
        self._observer = observer
        self._terminator = terminator
        self._clock = ExcessClock()
        self._config: Config | None = None
        self._taken_s = 0.0
        self._is_terminating = False
        #: Processes that still run although they were killed, by PID and start time.
        self._survivors: set[tuple[int, str | None]] = set()
        #: The number of terminated processes, by the GPU's address.
        self.terminations: Counter[str] = Counter()

    @property
    def is_watching(self) -> bool:
        """Whether a budget is exceeded, so that the next sample should be taken soon."""
        return bool(self._clock)

    async def sample(self) -> Excess | None:
        """Take a sample; return the excess that has lasted too long, for `enforce`.

        If the driver does not answer, nothing changes.
        """
        config = self._supervisor.config
        if config != self._config:
            self._config = config
            self._clock.restart()
        gpus = self._queries.terminating_gpus()
        leases = self._leases.leases() if gpus else []
        if not leases:
            self._clock.restart()
            return None
        clients, use = await self._observer.observe()
        if clients["errors"] or use is None or use.taken_s == self._taken_s:
            return None
        self._taken_s = use.taken_s
        now_s = asyncio.get_running_loop().time()
        excesses = find_excesses(leases, self._counted(clients), gpus.keys())
        unknown = {address for address, uuid in gpus.items() if uuid not in use.gpus}
        for client in _running(clients):
            for gpu, mib in zip(client["gpus"], client["memory_by_gpu_mib"]):
                if mib is None:
                    unknown.add(gpu)
        self._clock.note(excesses, unknown, now_s)
        if self._is_terminating:
            return None
        longest = self._clock.longest(config.over_budget_grace_s, now_s)
        return excesses[longest] if longest else None

    async def enforce(self, excess: Excess) -> None:
        """Terminate the newest process if the control daemons confirm that it is a client.

        Then the time starts again.
        """
        self._is_terminating = True
        try:
            await self._terminate(excess, self._supervisor.config)
        except YunionError as error:  # it is retried, unless the daemon is stopping
            log.warning("%s, but no process was terminated: %s", excess.text, error.message)
        finally:
            self._is_terminating = False
            self._clock.restart(excess.budget.lease)

    async def _terminate(self, excess: Excess, config: Config) -> None:
        budget = excess.budget
        victims: list[MpsClientJson] = []
        cause = f"{excess.text} and have exceeded the budget for at least {config.over_budget_grace_s} s"

        def choose(listed: ClientListJson) -> list[MpsClientJson]:
            if self._supervisor.config == config:  # no reload has begun meanwhile
                victims.extend(self._confirm(budget, listed))
            for client in victims:
                text = f"terminating PID {client['pid']} because {cause}"
                log.warning("%s", text)
                write_to_stderr(client["pid"], budget.uid, f"yunion-mps: {text} [{OVER_BUDGET_TERMINATED}]\n")
            return victims

        def choose_again(listed: ClientListJson) -> list[MpsClientJson]:
            return [client for client in listed["clients"] if _identity(client) in map(_identity, victims)]

        right = self._right_of(budget.lease)
        if right is None:
            return
        terminate_all = partial(
            self._terminator.terminate_all,
            uid=right.uid,
            cause=cause,
            container=right.container,
            code=OVER_BUDGET_TERMINATED,
        )
        terminations = await terminate_all(choose, signals=TERM)
        is_ignored = False  # SIGTERM, by a process that its server has disconnected
        for termination in terminations:
            if not termination["ended"] and not termination["reason_code"]:
                is_ignored = True
        if is_ignored:
            terminations = await terminate_all(choose_again, signals=_KILL)
        ended = [termination for termination in terminations if termination["ended"]]
        if is_ignored and len(ended) < len(terminations):
            self._survivors.update(map(_identity, victims))
        self.terminations[budget.gpu] += len(ended)

    def _confirm(self, budget: JobBudget, listed: ClientListJson) -> list[MpsClientJson]:
        """Return the newest process if processes that are certainly MPS clients still exceed the budget.

        Empty while a killed process of the job still runs, because its memory may be the excess.
        """
        gpus = self._queries.terminating_gpus()
        clients = [client for client in self._counted(listed) if client["mps"] and client["server"]]
        excess = find_excesses(self._leases.leases(), clients, gpus.keys()).get(budget)
        if listed["errors"] or excess is None:
            return []
        self._survivors.intersection_update(map(_identity, clients))
        if self._survivors.isdisjoint(map(_identity, excess.processes)):
            return [excess.newest]
        return []

    def _counted(self, listed: ClientListJson) -> list[MpsClientJson]:
        """Return the running clients that the budget of their lease may end: no others count with it."""
        counted: list[MpsClientJson] = []
        for client in _running(listed):
            right = self._right_of(client["lease"]) if client["lease"] else None
            if right is not None and may_terminate(client["pid"], right.uid, right.container):
                counted.append(client)
        return counted

    def _right_of(self, lease_id: str) -> _Right | None:
        """Return whose processes the budget of a lease may end: those that its user may; None if it ended.

        So no user's lease ends a process of another user, whatever the process's environment names.
        """
        lease = self._leases.ledger.leases.get(lease_id)
        if lease is None:
            return None
        container = attested_container(lease.holder, self._leases.containers)
        return _Right(lease.holder.user_uid or 0, container)


def _running(listed: ClientListJson) -> list[MpsClientJson]:
    """Return the clients, except those that are exiting: the kernel is freeing their memory."""
    return [client for client in listed["clients"] if not is_exiting(client["pid"])]


def _identity(client: MpsClientJson) -> tuple[int, str | None]:
    return client["pid"], client["started"]
