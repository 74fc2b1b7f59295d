"""The hooks that slurm.conf names: Prolog, TaskProlog, Epilog and HealthCheckProgram.

Slurm drains a node whose Prolog fails. So Prolog fails only if the node cannot run jobs, and only after it
has drained the node with a reason that the health check recognises and ends. If the job is at fault, and
not the node, TaskProlog fails instead: then only that job fails, and the user sees what TaskProlog prints.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from yunion_mps.enums import DEVICE_VARIABLES, JAX_VARIABLE, MEMORY_VARIABLE, MPS, PENDING, UNAVAILABLE
from yunion_mps.errors import InfeasibleError, NotFoundError, NothingFreeError, YunionError
from yunion_mps.host.files import write_atomically
from yunion_mps.http.transport import OnMessage, refuse_unreachable
from yunion_mps.models import LEASE_VARIABLE
from yunion_mps.paths import Paths
from yunion_mps.reasons import INFEASIBLE, OTHER_USER, SERVER_START_FAILED, Reason, hint_of
from yunion_mps.slurm.devices import Record, pending_change, read_record
from yunion_mps.slurm.instances import current_environment
from yunion_mps.slurm.job import JOB_ID, Job, is_about_to_be_killed, job_id_of, job_of
from yunion_mps.slurm.job_file import JobFile, read_job_file, write_job_file
from yunion_mps.slurm.leases import Assignment, JobLeases, held_outside, still_used
from yunion_mps.slurm.node import SlurmError, SlurmNode, counts_of
from yunion_mps.text import printable

if TYPE_CHECKING:
    from yunion_mps.answers import Device, LeaseDetails

#: Slurm ends a health check after 60 s.
_LONGEST_CHECK_S = 60.0


class Hooks:
    def __init__(self, paths: Paths, environment: Mapping[str, str], on_message: OnMessage) -> None:
        """`environment` has the variables that Slurm set for the hook."""
        self._paths = paths
        self._environment = environment
        self._on_message = on_message

    def prolog(self) -> int:
        """Lease the job's devices; returns the exit status. Raises HostError if Slurm did not call it."""
        job_id_of(self._environment)  # otherwise, a call by hand would drain the node
        try:
            record = read_record(self._paths)
            if record is None:
                return 0
            job = Job.of(self._environment)
            if not job.indices:
                return 0
            write_job_file(self._paths, job, self._prepare(job, record))
        except YunionError as error:
            self._drain(error)
            return 1
        return 0

    def task_prolog(self) -> tuple[int, list[str]]:
        """The exit status, and the lines for slurmstepd: `export NAME=VALUE`, `unset NAME` and `print TEXT`.

        A job inherits the variables of the job that submitted it, so those of its devices are removed.
        """
        try:
            if read_record(self._paths) is None:
                return 0, []
            job = Job.of(self._environment)
            # Slurm removes this variable from jobs without devices, but no indices that they have inherited.
            has_devices = bool(self._environment.get("CUDA_VISIBLE_DEVICES"))
            job_id, content = read_job_file(self._paths, job, is_required=has_devices)
            environment: Mapping[str, str] = {}
            if content:
                environment = environment_of_task(job, content)
                environment = current_environment(self._paths, job_id, environment, content["environment"])
                refuse_unreachable(environment)
        except YunionError as error:
            return 1, [f"print yunion-mps: {printable(line)}" for line in error.lines]
        inherited = [name for name in DEVICE_VARIABLES if name not in environment]
        if MEMORY_VARIABLE in inherited and MEMORY_VARIABLE in self._environment:
            inherited.append(JAX_VARIABLE)  # it is that of the other job, too
        return 0, [
            *(f"unset {name}" for name in inherited if name in self._environment),
            *(f"export {name}={value}" for name, value in environment.items()),
        ]

    def epilog(self) -> int:
        """Release the job's devices; returns 0, because the health check retries what failed.

        Raises HostError if Slurm did not call it.
        """
        job_id = job_id_of(self._environment)
        try:
            if read_record(self._paths) is not None:
                self._leases().release(job_id)
        except YunionError as error:
            self._drain(error)
        _remove(path for job, path in self._files_by_job() if job == job_id)
        return 0

    def health_check(self) -> int:
        """Drain the node while Slurm's devices cannot be used, and resume it once they can; returns 0.

        Also disconnects the processes of jobs from MPS before Slurm kills them.
        """
        node = SlurmNode()
        try:
            if reason := self._trouble(node):
                node.drain(reason)
                self._on_message(f"{node.name}: drained: {reason}")
            elif node.state().is_ours and not self._has_failed_recently():
                node.resume()
                self._on_message(f"{node.name}: resumed")
        except YunionError as error:  # if slurmctld does not answer; slurmd runs the check again later
            self._on_message(error.message)
        return 0

    def _prepare(self, job: Job, record: Record) -> JobFile:
        leases, node = self._leases(), SlurmNode()
        _require_numbers(record, node)
        addresses = _addresses(record, job.indices, leases.devices(), leases)
        everything = [addr for some in addresses.values() for addr in some]
        try:
            asks = record.is_mixed or record.shards
            number = number_of_shards(job, node.gres(job.id), [*record.numbers]) if asks else 0
            lease = leases.take(job, Assignment(everything, number), node.jobs)
        except NothingFreeError as error:
            if error.code == OTHER_USER:
                hint = "ask the administrator for ExclusiveUser=YES on the partition, or cuda_mps_multiuser"
                error = NothingFreeError(error.message, f"submit it again later; {hint}", error.code)
            elif error.code == SERVER_START_FAILED and not _is_any_unavailable(everything, leases):
                hint = f"submit it again later; the servers of other users start; {error.hint}"
                error = NothingFreeError(error.message, hint, error.code)
            elif error.code != INFEASIBLE:  # for example, if the devices are now reserved for something else
                raise
            return {"environment": {}, "devices": {}, "error": error.lines}
        several = addresses if len(addresses) > 1 and record.allows_steps(addresses) else {}
        lease_id = {LEASE_VARIABLE: lease["id"]}  # a step with one device uses the job's lease, too
        single = {str(index): {**leases.environment(addr), **lease_id} for index, (addr,) in several.items()}
        return {"environment": lease["environment"], "devices": single, "error": []}

    def _trouble(self, node: SlurmNode) -> Reason | None:
        """Why this node cannot run jobs with devices now; also ends the leases of jobs that have ended.

        Raises SlurmError if Slurm does not answer.
        """
        leases = self._leases()
        try:
            record = read_record(self._paths)
            if record is None:
                return None
            # Slurm is asked for its jobs last, and once.
            files, jobs = self._files_by_job(), lru_cache(node.jobs)
            found = leases.reconcile(jobs)
            through_mps = [lease for lease in found.live if lease["sharing"] == MPS]
            ending = [(lease, since_s) for lease in through_mps if (since_s := jobs()[job_of(lease)])]
            self._disconnect(ending, leases, node)
            _require_numbers(record, node)
            devices = leases.devices()
            indices = range(len(record.entries))
            by_index = _addresses(record, indices, devices, leases)
            addresses = [addr for some in by_index.values() for addr in some]
            _remove([path for job, path in files if job not in jobs()])  # their Epilogs did not finish
            held = held_outside(leases.all(), addresses) or still_used(found.used)
            problems = leases.problems()
        except SlurmError:  # slurmctld is at fault, not this node
            raise
        except YunionError as error:
            return error.reason
        for device in devices:
            if device["addr"] in addresses and _is_refused(device):
                return Reason(f"device {device['addr']}: {device['reason']}", device["reason_code"])
        # If a problem names devices, those that no job can have were found above.
        return pending_change(addresses, [one for one in problems if not one["devices"]]) or held

    def _disconnect(
        self, ending: Sequence[tuple[LeaseDetails, float]], leases: JobLeases, node: SlurmNode
    ) -> None:
        """Disconnect the processes of jobs from MPS that Slurm is about to kill.

        `ending` has the lease of each job that is ending, and since when. Slurm calls no hook between its
        SIGTERM and its SIGKILL.
        """
        settings = node.kill_settings_s() if ending else (0, 0)
        for lease, since_s in ending:
            if is_about_to_be_killed(time.time() - since_s, *settings):
                leases.disconnect(lease)

    def _files_by_job(self) -> list[tuple[str, str]]:
        """The ids of the jobs that have files, and the files, also unfinished ones."""
        try:
            names = os.listdir(self._paths.slurm_jobs)
        except FileNotFoundError:
            return []
        found = [(name.partition(".")[0], os.path.join(self._paths.slurm_jobs, name)) for name in names]
        return [(job, path) for job, path in found if re.fullmatch(JOB_ID, job)]

    def _drain(self, error: YunionError) -> None:
        """Drain the node because a hook of a job failed."""
        self._on_message("\n".join(error.lines))
        with contextlib.suppress(OSError):
            write_atomically(self._failure, "")
        try:
            SlurmNode().drain(error.reason)
        except YunionError as failure:
            self._on_message(f"the node was not drained: {failure.message}")

    def _has_failed_recently(self) -> bool:
        """Whether a hook of a job may have failed after a check that is still running asked the daemon.

        Also, Slurm may not have noticed yet that a Prolog has failed. It leaves our drain alone, but if we
        resume the node before that, Slurm drains it with a reason of its own, which no check may end.
        """
        try:
            age_s = time.time() - os.stat(self._failure).st_mtime
        except FileNotFoundError:
            return False
        return 0 <= age_s < _LONGEST_CHECK_S

    @property
    def _failure(self) -> str:
        """A file that is written whenever a hook of a job fails."""
        return os.path.join(self._paths.slurm_jobs, "failure")

    def _leases(self) -> JobLeases:
        return JobLeases(self._paths, self._on_message)


def _remove(files: Iterable[str]) -> None:
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _addresses(
    record: Record, indices: Sequence[int], devices: Sequence[Device], leases: JobLeases
) -> dict[int, list[str]]:
    """The addresses of the devices of each index; raises NotFoundError if the devices have changed.

    A pending change is the reason, if there is one: gres.conf cannot be written until it is in effect.
    """
    try:
        return record.addresses(indices, devices)
    except NotFoundError:
        change = pending_change([device.addr for device in record.devices], leases.problems())
        if not change:
            raise
        raise NotFoundError(change, hint_of(change.code), change.code) from None


def _is_refused(device: Device) -> bool:
    """Whether no job can have the device: its GPU is unavailable, or changes its type after its leases."""
    return device["state"] == UNAVAILABLE or (device["state"] == PENDING and not device["lease"])


def _is_any_unavailable(addresses: Collection[str], leases: JobLeases) -> bool:
    """Whether one of these devices is unavailable to all users."""
    return any(one["addr"] in addresses and one["state"] == UNAVAILABLE for one in leases.devices())


def _require_numbers(record: Record, node: SlurmNode) -> None:
    """Raise NotFoundError if Slurm counts the types of the devices in another order than the record."""
    if record.is_mixed:
        record.require_numbers(counts_of(node.state().gres, "gpu"))


def number_of_shards(job: Job, gres: Collection[str], types: Sequence[str]) -> int:
    """How many of a GPU's devices the job has, according to Slurm; 0 if it has devices of one of the `types`.

    Raises InfeasibleError if the job is ending, its shards are of several GPUs, its devices are of different
    types, or Slurm's answers differ. Prolog's environment has only the devices of one of the job's types.
    """
    if not gres:
        raise InfeasibleError("the job ended while its Prolog was running", "submit it again")
    number, *others = {sum(counts_of(one, "shard").values()) for one in gres}
    if others:
        what = (
            f"Slurm gives contradictory answers to what the job has on this node: {', '.join(sorted(gres))}"
        )
        raise InfeasibleError(what, "give the job a name and a comment of one line each")
    if number and len(job.indices) > 1:
        what = f"the job has shards of {len(job.indices)} GPUs: only shards of one GPU can be leased"
        raise InfeasibleError(what, "remove MULTIPLE_SHARING_GRES_PJ from SelectTypeParameters")
    counts = [counts_of(one, "gpu") for one in gres]
    if not number and [len(job.indices)] not in [[*one.values()] for one in counts]:
        found = ", ".join(f"{count} of {type_}" for type_, count in counts[0].items())
        what = (
            f"Slurm has given the job devices of several types, but a process can use only one type: {found}"
        )
        hint = f"request one type ({', '.join(types)}) without --exclusive: --gres=gpu:{types[0]}:1"
        raise InfeasibleError(what, hint)
    return number


def environment_of_task(job: Job, content: JobFile) -> Mapping[str, str]:
    """The environment of a task: of all of the job's devices, or of the single device of its step.

    Raises YunionError if Prolog refused the job, or if the step has several of the devices, but not all.
    """
    if content["error"]:
        message, *hints = content["error"]
        raise YunionError(message, "\n".join(hints))
    devices = content["devices"]
    indices = job.task.indices([*map(int, devices)]) if job.task and devices else job.step_indices
    step = [*map(str, indices)]
    if not devices or not set(step) <= set(devices) or len(step) in (0, len(devices)):
        return content["environment"]  # others are inherited: see Job
    if len(step) == 1:
        return devices[step[0]]
    what = (
        f"the step has {len(step)} of the job's {len(devices)} devices: only one or all of them have a budget"
    )
    raise InfeasibleError(what, "start the step with one device or with all: srun --exact --gres=gpu:TYPE:1")
