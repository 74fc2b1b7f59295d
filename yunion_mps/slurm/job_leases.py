"""The leases of Slurm's jobs: each is named after its job, does not expire, and is released by Epilog.

Slurm decides which job has which device. If Slurm no longer knows a lease's job, for example after a reboot,
the lease is stale, and is released as soon as another job needs its devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.enums import IN_USE, NO_SIGNAL, OVER_BUDGET, SLURM
from yunion_mps.core.errors import NotFoundError, NothingFreeError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import (
    NOTHING_FREE,
    OTHER_USER,
    PROCESSES_UNKNOWN,
    SERVER_START_FAILED,
    SLURM_DEVICE_HELD,
    TEMPORARY,
    Reason,
    hint_of,
)
from yunion_mps.http.client import DaemonClient
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import (
    END_LEASE,
    GET_DEVICE,
    GET_DEVICES,
    GET_LEASES,
    GET_STATUS,
    TAKE_LEASE,
    TERMINATE_LEASE,
)
from yunion_mps.http.parameters import Value
from yunion_mps.http.transport import BlockingTransport, OnMessage, Retrier, run_blocking
from yunion_mps.slurm.job import Job, job_of, stale_leases

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, LeaseDetailsJson, LeaseRecordJson, StatusProblemJson

T = TypeVar("T")

#: How long a hook waits for the daemon to restart, and for devices whose previous job has just ended, in s.
_RESTART_S = 10.0
_BUSY_S = 30.0
#: How long a request waits in the daemon before the leases that block it are checked again, in s.
_POLL_S = 2


class Assignment(NamedTuple):
    """The devices that Slurm has assigned."""

    addresses: Sequence[str]
    #: How many of them, on one GPU; 0 for all.
    number: int = 0

    def matches(self, lease: LeaseRecordJson) -> bool:
        """Return whether the lease has the devices."""
        number = self.number or len(self.addresses)
        return len(lease["devices"]) == number and set(lease["devices"]) <= set(self.addresses)

    @property
    def request(self) -> dict[str, Value]:
        """Those arguments of TAKE_LEASE that say what is leased."""
        if self.number in (0, len(self.addresses)):
            return {"devices": list(self.addresses)}
        return {"count": self.number, "gpu": gpu_of(self.addresses[0])}


class JobLeases:
    """The daemon's leases, as Slurm's hooks take and end them.

    Every method raises YunionError, for example if the daemon is still unreachable after 10 s.
    """

    def __init__(self, paths: Paths, on_message: OnMessage) -> None:
        self._retrier = Retrier(BlockingTransport(DaemonClient(paths)), _RESTART_S, on_message)
        self._on_message = on_message

    def devices(self) -> list[DeviceJson]:
        return self._call(GET_DEVICES, limit=0)["isolated_devices"]

    def environment(self, addr: str) -> dict[str, str]:
        """Return the environment of a process that uses just this device."""
        return dict(self._call(GET_DEVICE, id=addr)["client_environment"])

    def all(self) -> Sequence[LeaseDetailsJson]:
        return self._call(GET_LEASES)["leases"]

    def problems(self) -> Sequence[StatusProblemJson]:
        return self._call(GET_STATUS)["problems"]

    def take(self, job: Job, assignment: Assignment, live: Callable[[], Iterable[str]]) -> LeaseRecordJson:
        """Lease what Slurm has assigned to the job, or return the lease that it has.

        `live` returns the ids of Slurm's jobs on this node. Raises NothingFreeError with the code
        `slurm_device_held` if something other than Slurm has one of the devices, and with `other_user` if
        the control daemon still serves another user.
        """
        end_s = time.monotonic() + _BUSY_S
        while True:
            try:
                return self._take(job, assignment)
            except NothingFreeError as error:
                used = self._release_stale(assignment.addresses, live, error)
                if time.monotonic() > end_s:
                    raise _held(used) if used else error from None

    def _take(self, job: Job, assignment: Assignment) -> LeaseRecordJson:
        for lease in self.all():
            if lease["name"] == job.lease_name and not assignment.matches(lease):
                self.end(lease)  # the job was requeued, and its Epilog did not run
        # Devices of GPUs that do not enforce budgets are included, because the operator has offered them.
        return self._call(
            TAKE_LEASE,
            **assignment.request,
            holder={"kind": "name", "name": job.lease_name, "ttl_s": 0, "uid": job.uid},
            reserved_for=SLURM,
            allow_unlimited=True,
            wait_s=_POLL_S,
        )

    def _release_stale(
        self, addresses: Sequence[str], live: Callable[[], Iterable[str]], error: NothingFreeError
    ) -> Reason | None:
        """End the leases of jobs that have ended; return why one cannot be ended yet.

        Raises NothingFreeError if waiting for the devices is useless.
        """
        if error.code in TEMPORARY or error.code in (OTHER_USER, SERVER_START_FAILED):
            return None
        if error.code != NOTHING_FREE:
            raise error
        holders = [lease for lease in self.all() if set(lease["devices"]).intersection(addresses)]
        held = held_outside(holders, addresses)
        if held:
            raise _held(held) from None
        return still_used(self._end_unused(stale_leases(holders, live())))

    def release(self, job_id: str) -> None:
        """Terminate the job's leftover processes and end its lease; does nothing if it has none."""
        for lease in self.all():
            if job_of(lease) == job_id:
                self.end(lease)

    def reconcile(self, live: Callable[[], Iterable[str]]) -> ReconcileResult:
        """End the leases of all jobs that are not live, unless a process still uses their devices.

        The leases are read first, so a job that starts meanwhile keeps its lease.
        """
        leases = [lease for lease in self.all() if job_of(lease)]
        stale = stale_leases(leases, live()) if leases else []
        used = self._end_unused(stale)
        return ReconcileResult(
            ended=[lease for lease in stale if lease not in used],
            used=used,
            live=[lease for lease in leases if lease not in stale],
        )

    def disconnect(self, lease: LeaseRecordJson) -> None:
        """Have their MPS server disconnect the job's processes, which continue without MPS."""
        try:
            answer = self._call(TERMINATE_LEASE, lease=lease["id"], signals=NO_SIGNAL)
        except NotFoundError:  # its Epilog released it
            return
        for ended in answer["terminations"]:
            self._on_message(f"{lease['name']}: PID {ended['pid']}: {ended['how']}")

    def _end_unused(self, leases: Iterable[LeaseDetailsJson]) -> list[LeaseDetailsJson]:
        """End the leases whose devices no process uses; return the others.

        A leftover process would take memory of the next job, so its lease is kept until it ends.
        """
        used = []
        for lease in leases:
            if lease["state"] in (IN_USE, OVER_BUDGET):
                self._on_message(f"{lease['name']}: kept: {still_used([lease])}")
                used.append(lease)
            else:
                self.end(lease)
        return used

    def end(self, lease: LeaseRecordJson) -> None:
        """Terminate the job's leftover processes safely, then end the lease."""
        try:
            self._end(lease)
        except NotFoundError:  # another hook released it
            return
        self._on_message(f"{lease['name']}: {', '.join(lease['devices'])} released")

    def _end(self, lease: LeaseRecordJson) -> None:
        try:
            self._call(END_LEASE, lease=lease["id"], terminate=True)
        except YunionError as error:
            if error.code != PROCESSES_UNKNOWN:
                raise
            # Slurm has ended the job's processes itself, as far as they are in the job's containers.
            self._on_message(f"{lease['name']}: {error.message}")
            self._call(END_LEASE, lease=lease["id"])

    def _call(self, operation: Operation[T], **arguments: Value) -> T:
        return run_blocking(self._retrier.call(operation, None, **arguments))


class ReconcileResult(NamedTuple):
    """The leases of Slurm's jobs, after those of jobs that are not live were ended."""

    #: Those that were ended.
    ended: Sequence[LeaseDetailsJson]
    #: Those that are kept because a process still uses their devices.
    used: Sequence[LeaseDetailsJson]
    #: Those of live jobs.
    live: Sequence[LeaseDetailsJson]


def _held(reason: Reason) -> NothingFreeError:
    return NothingFreeError(reason, hint_of(reason.code), reason.code)


def still_used(leases: Iterable[LeaseRecordJson]) -> Reason | None:
    """Name a device of an ended job that a process still uses; None if there are no leases."""
    lease = next(iter(leases), None)
    if lease is None:
        return None
    text = f"a process of the ended job {job_of(lease)} still uses {', '.join(lease['devices'])}"
    return Reason(text, SLURM_DEVICE_HELD)


def held_outside(leases: Iterable[LeaseRecordJson], addresses: Iterable[str]) -> Reason | None:
    """Name a device that is leased outside Slurm, and its holder; None if there is no such device."""
    requested = set(addresses)
    for lease in leases:
        held = [addr for addr in lease["devices"] if addr in requested]
        if held and not job_of(lease):
            holder = lease["id"]
            if lease["name"]:
                holder = lease["name"]
            elif lease["pid"]:
                holder = f"PID {lease['pid']}"
            text = f"device {held[0]} is leased outside Slurm: {lease['user']} ({holder})"
            return Reason(text, SLURM_DEVICE_HELD)
    return None
