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
from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.errors import YunionError
from yunion_mps.host.proc import is_exiting
from yunion_mps.host.stderr import write_to_stderr
from yunion_mps.reasons import OVER_BUDGET_TERMINATED
from yunion_mps.service.holdings import ID_LENGTH, user_of
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.observer import Observer
from yunion_mps.service.queries import Queries
from yunion_mps.service.terminate import TERM, Terminator
from yunion_mps.settings import Config
from yunion_mps.supervisor import Supervisor
from yunion_mps.units import seconds, total_mib

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, LeaseRecord, MpsClient

log = logging.getLogger(__name__)

#: If samples are further apart than this, the job may have been within its budget in between.
MAX_GAP_S = 5.0
#: The kernel tells when a process was started in clock ticks, rounded down.
_START_PRECISION_S = 0.01
#: Once its server has disconnected it, a process that ignores SIGTERM is safe to kill.
_KILL = (signal.SIGKILL,)


class JobBudget(NamedTuple):
    """Whose memory of a GPU is counted together: one user's processes of a lease.

    An empty `lease` stands for all of the user's leases on the GPU. Each user's processes are counted
    separately: a user who names another user's lease in a process's environment endangers only that process.
    """

    lease: str
    gpu: str
    uid: int


class Excess(NamedTuple):
    """Processes that together use more memory than their budget.

    devices: those of the budget, on its GPU
    processes: those of which the newest may be terminated
    """

    budget: JobBudget
    devices: tuple[str, ...]
    budget_mib: int
    used_mib: int
    processes: tuple[MpsClient, ...]

    @property
    def text(self) -> str:
        lease, user = self.budget.lease, self.processes[0]["user"]
        whose = f"lease {lease[:ID_LENGTH]}" if lease else f"user {user}, with those that belong to no lease,"
        return (
            f"the processes of {whose} together use {self.used_mib} of {self.budget_mib} MiB "
            f"({', '.join(self.devices)})"
        )

    @property
    def newest(self) -> MpsClient:
        return max(self.processes, key=lambda client: (client["started"] or "", client["pid"]))


def find_excesses(
    leases: Iterable[LeaseRecord], clients: Iterable[MpsClient], gpus: AbstractSet[str]
) -> dict[JobBudget, Excess]:
    """Return the budgets on these GPUs (addresses) that are exceeded; pure.

    A lease's processes are those that belong to it (`service/attribution.py`). One that only names a device
    does not count: it may be left over from an earlier lease. Neither does a process outside MPS, or one that
    has ended, or one whose holder has several leases on the GPU, unless it is known which is its own.

    A process that belongs to no lease, perhaps because it has hidden to which, counts together with all
    leases of its user on the GPU, and is terminated before any process that belongs to one.
    """
    leases = list(leases)
    counted = [client for client in clients if client["mps"] is not False and client["started"]]
    found: dict[JobBudget, Excess] = {}
    for gpu in gpus:
        on_gpu = [lease for lease in leases if gpu in lease["gpus"]]
        using = [client for client in counted if _mib(client, gpu)]
        for lease in on_gpu:
            for excess in _excesses_of_lease(lease, using, gpu):
                found[excess.budget] = excess
        for excess in _excesses_of_users(on_gpu, using, gpu):
            found[excess.budget] = excess
    return found


def _excesses_of_lease(lease: LeaseRecord, clients: Iterable[MpsClient], gpu: str) -> Iterator[Excess]:
    by_uid: dict[int, list[MpsClient]] = {}
    for client in clients:
        if client["lease"] == lease["id"] and client["uid"] is not None:
            by_uid.setdefault(client["uid"], []).append(client)
    for uid, own in by_uid.items():
        budget = JobBudget(lease["id"], gpu, uid)
        yield from _excess(budget, [lease], own, own)


def _excesses_of_users(
    leases: Sequence[LeaseRecord], clients: Iterable[MpsClient], gpu: str
) -> Iterator[Excess]:
    """Yield the excesses of users with processes that belong to no lease."""
    leases_of: dict[str, list[LeaseRecord]] = {}
    for lease in leases:
        user = _only_user_of(lease)
        if user is not None:
            leases_of.setdefault(user, []).append(lease)
    clients_of: dict[tuple[int, str], list[MpsClient]] = {}
    for client in clients:
        if client["uid"] is not None and client["user"] in leases_of:
            clients_of.setdefault((client["uid"], client["user"]), []).append(client)
    for (uid, user), own in clients_of.items():
        since_s = min(seconds(lease["since"]) for lease in leases_of[user])
        ids = {lease["id"] for lease in leases_of[user]}
        leased = [client for client in own if client["lease"] in ids]
        strays = [client for client in own if client["lease"] is None and not _is_older(client, since_s)]
        if strays:
            yield from _excess(JobBudget("", gpu, uid), leases_of[user], [*leased, *strays], strays)


def _is_older(client: MpsClient, since_s: float) -> bool:
    """Whether the process was started before that time, and so is left over from an earlier lease."""
    return client["started"] is None or seconds(client["started"]) + _START_PRECISION_S < since_s


def _only_user_of(lease: LeaseRecord) -> str | None:
    """Return the user whose processes use the lease; None if any user's may, as in root's containers."""
    if lease["for_user"] is None and lease["uid"] == 0 and lease["binding"] in ("name", "container"):
        return None
    return user_of(lease)


def _excess(
    budget: JobBudget,
    leases: Iterable[LeaseRecord],
    counted: Iterable[MpsClient],
    processes: Iterable[MpsClient],
) -> Iterator[Excess]:
    """Yield the excess if the counted processes use more than the leases' devices on the GPU have.

    None if a budget is unknown.
    """
    shares = []
    for lease in leases:
        shares += [share for share in lease["budgets"] if share["gpu"] == budget.gpu]
    budget_mib = total_mib(share["memory_mib"] for share in shares)
    used_mib = sum(_mib(client, budget.gpu) for client in counted)
    if budget_mib is not None and used_mib > budget_mib:
        devices = tuple(share["addr"] for share in shares)
        yield Excess(budget, devices, budget_mib, used_mib, tuple(processes))


def _mib(client: MpsClient, gpu: str) -> int:
    return dict(zip(client["gpus"], client["memory_by_gpu_mib"])).get(gpu) or 0


class _Span(NamedTuple):
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
            is_continued = span and now_s - span.last_s <= MAX_GAP_S
            self._spans[budget] = _Span(span.first_s if span and is_continued else now_s, now_s)

    def longest(self, grace_s: float, now_s: float) -> JobBudget | None:
        """Return the budget that has been exceeded longest, among those in the sample at `now_s`.

        None if none has been exceeded for `grace_s`.
        """
        due = [
            (span.first_s, budget)
            for budget, span in self._spans.items()
            if span.last_s == now_s and now_s - span.first_s >= grace_s
        ]
        return min(due)[1] if due else None

    def restart(self, job: JobBudget | None = None) -> None:
        """Restart the time of a user's budgets of the same lease, on all GPUs; or of all budgets."""
        if job is None:
            self._spans = {}
            return
        for budget in list(self._spans):
            if (budget.lease, budget.uid) == (job.lease, job.uid):
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
        self._taken_s, now_s = use.taken_s, asyncio.get_running_loop().time()
        running = _running(clients)
        excesses = find_excesses(leases, running, gpus.keys())
        unknown = {address for address, uuid in gpus.items() if uuid not in use.gpus}
        for client in running:
            amounts = zip(client["gpus"], client["memory_by_gpu_mib"])
            unknown.update(gpu for gpu, mib in amounts if mib is None)
        self._clock.note(excesses, unknown, now_s)
        longest = None if self._is_terminating else self._clock.longest(config.over_budget_grace_s, now_s)
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
            self._clock.restart(excess.budget)

    async def _terminate(self, excess: Excess, config: Config) -> None:
        budget = excess.budget
        victims: list[MpsClient] = []
        cause = f"{excess.text} and have exceeded the budget for at least {config.over_budget_grace_s} s"

        def choose(listed: ClientList) -> list[MpsClient]:
            if self._supervisor.config == config:  # no reload has begun meanwhile
                victims.extend(self._confirm(budget, listed))
            for client in victims:
                what = f"terminating PID {client['pid']} because {cause}"
                log.warning("%s", what)
                write_to_stderr(client["pid"], budget.uid, f"yunion-mps: {what} [{OVER_BUDGET_TERMINATED}]\n")
            return victims

        def choose_again(listed: ClientList) -> list[MpsClient]:
            return [client for client in listed["clients"] if _identity(client) in map(_identity, victims)]

        terminate_all = self._terminator.terminate_all
        ended = await terminate_all(choose, 0, cause, signals=TERM, code=OVER_BUDGET_TERMINATED)
        if any(not one["ended"] and not one["reason_code"] for one in ended):
            ended = await terminate_all(choose_again, 0, cause, signals=_KILL, code=OVER_BUDGET_TERMINATED)
            if not all(one["ended"] for one in ended):
                self._survivors.update(map(_identity, victims))
        self.terminations[budget.gpu] += sum(one["ended"] for one in ended)

    def _confirm(self, budget: JobBudget, listed: ClientList) -> list[MpsClient]:
        """Return the newest process if processes that are certainly MPS clients still exceed the budget.

        None while a killed process of the job still runs, because its memory may be the excess.
        """
        gpus = self._queries.terminating_gpus()
        clients = [client for client in _running(listed) if client["mps"] and client["server"]]
        excess = find_excesses(self._leases.leases(), clients, gpus.keys()).get(budget)
        if listed["errors"] or excess is None:
            return []
        self._survivors &= set(map(_identity, clients))
        return [] if self._survivors.intersection(map(_identity, excess.processes)) else [excess.newest]


def _running(listed: ClientList) -> list[MpsClient]:
    """The clients, except those that are exiting: the kernel is freeing their memory."""
    return [client for client in listed["clients"] if not is_exiting(client["pid"])]


def _identity(client: MpsClient) -> tuple[int, str | None]:
    return client["pid"], client["started"]
