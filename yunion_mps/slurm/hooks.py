"""The hooks that slurm.conf names: Prolog, TaskProlog, Epilog and HealthCheckProgram.

Slurm drains a node whose Prolog fails. So Prolog fails only if the node cannot run jobs, and only after it
has drained the node with a reason that the health check recognises and ends. If the job is at fault, and
not the node, TaskProlog fails instead: then only that job fails, and the user sees what TaskProlog prints.

Source: Slurm: Prolog and Epilog Guide; slurm.conf(5), Prolog, TaskProlog, Epilog and HealthCheckProgram.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from yunion_mps.core.enums import DEVICE_VARIABLES, JAX_VARIABLE, MEMORY_VARIABLE, MPS, UNAVAILABLE
from yunion_mps.core.errors import InfeasibleError, NotFoundError, NothingFreeError, YunionError
from yunion_mps.core.models import LEASE_VARIABLE
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import INFEASIBLE, OTHER_USER, SERVER_START_FAILED, Reason, hint_of
from yunion_mps.core.text import printable
from yunion_mps.host.files import write_atomically
from yunion_mps.http.transport import OnMessage, refuse_unreachable
from yunion_mps.slurm.gres_conf import Record, pending_change, read_record, why_no_jobs
from yunion_mps.slurm.job import JOB_ID, Job, is_about_to_be_killed, job_id_of, job_of
from yunion_mps.slurm.job_file import JobFile, read_job_file, write_job_file
from yunion_mps.slurm.job_leases import Assignment, JobLeases, held_outside, still_used
from yunion_mps.slurm.node_state import SlurmError, SlurmNode, counts_of
from yunion_mps.slurm.recreated_instances import current_environment

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, LeaseDetailsJson

#: Slurm ends a health check after 60 s (slurm.conf(5), HealthCheckProgram).
_LONGEST_CHECK_S = 60.0


class Hooks:
    """Slurm's hooks, of which each process runs one; cli/slurm calls them."""

    def __init__(self, paths: Paths, environment: Mapping[str, str], on_message: OnMessage) -> None:
        """`environment` has the variables that Slurm set for the hook."""
        self._paths = paths
        self._environment = environment
        self._on_message = on_message

    def prolog(self) -> int:
        """Lease the job's devices; return the exit status.

        Raises HostError if Slurm did not call it.
        """
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
        """Return the exit status, and the lines for slurmstepd.

        A job inherits the variables of the job that submitted it, so those of its devices are removed.

        Source: slurm.conf(5), TaskProlog: `export NAME=VALUE`, `unset NAME` and `print TEXT`.
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
        lines = [f"unset {name}" for name in inherited if name in self._environment]
        for name, value in environment.items():
            lines.append(f"export {name}={value}")
        return 0, lines

    def epilog(self) -> int:
        """Release the job's devices; return 0, because the health check retries what failed.

        Raises HostError if Slurm did not call it.
        """
        job_id = job_id_of(self._environment)
        try:
            if read_record(self._paths) is not None:
                self._leases().release(job_id)
        except YunionError as error:
            self._drain(error)
        for job, path in self._files_by_job():
            if job == job_id:
                _remove(path)
        return 0

    def health_check(self) -> int:
        """Drain the node while Slurm's devices cannot be used, and resume it once they can; return 0.

        Also disconnects the processes of jobs from MPS before Slurm kills them.
        """
        node = SlurmNode()
        try:
            reason = self._trouble(node)
            if reason:
                node.drain(reason)
                self._on_message(f"{node.name}: drained: {reason}")
            elif node.state().is_ours and not self._has_failed_recently():
                node.resume()
                self._on_message(f"{node.name}: resumed")
        except YunionError as error:  # if slurmctld does not answer; slurmd runs the check again later
            self._on_message(error.message)
        return 0

    def _prepare(self, job: Job, record: Record) -> JobFile:
        """Lease what Slurm has assigned to the job, and return what TaskProlog needs.

        Raises YunionError if the node cannot run the job; what is the job's fault is in the result.
        """
        leases = self._leases()
        node = SlurmNode()
        _require_numbers(record, node)
        addresses = _addresses(record, job.indices, leases.devices(), leases)
        assigned = _all_addresses(addresses)
        try:
            number = 0
            if record.is_mixed or record.shards:  # otherwise, Slurm need not be asked
                number = number_of_shards(job, node.gres(job.id), list(record.numbers))
            lease = leases.take(job, Assignment(assigned, number), node.jobs)
        except NothingFreeError as error:
            if error.code == OTHER_USER:
                hint = "ask the administrator for ExclusiveUser=YES on the partition, or cuda_mps_multiuser"
                error = NothingFreeError(error.message, f"submit it again later; {hint}", error.code)
            elif error.code == SERVER_START_FAILED and not _is_any_unavailable(assigned, leases):
                hint = f"submit it again later; the servers of other users start; {error.hint}"
                error = NothingFreeError(error.message, hint, error.code)
            elif error.code != INFEASIBLE:  # for example, if the devices are now reserved for something else
                raise
            return {"environment": {}, "devices": {}, "error": error.lines}
        single: dict[str, Mapping[str, str]] = {}
        if len(addresses) > 1 and record.allows_steps(addresses):
            for index, (addr,) in addresses.items():
                # a step with one device uses the job's lease, too
                single[str(index)] = {**leases.environment(addr), LEASE_VARIABLE: lease["id"]}
        return {"environment": lease["environment"], "devices": single, "error": []}

    def _trouble(self, node: SlurmNode) -> Reason | None:
        """Return why this node cannot run jobs with devices now; also end the leases of jobs that have ended.

        Raises SlurmError if Slurm does not answer.
        """
        leases = self._leases()
        try:
            record = read_record(self._paths)
            if record is None:
                return None
            # Slurm is asked for its jobs last, and once.
            files = self._files_by_job()
            jobs = lru_cache(node.jobs)
            reconciled = leases.reconcile(jobs)
            through_mps = [lease for lease in reconciled.live if lease["sharing"] == MPS]
            self._disconnect(through_mps, jobs, leases, node)
            _require_numbers(record, node)
            devices = leases.devices()
            indices = range(len(record.entries))
            addresses = _all_addresses(_addresses(record, indices, devices, leases))
            for job, path in files:
                if job not in jobs():  # its Epilog did not finish
                    _remove(path)
            held = held_outside(leases.all(), addresses) or still_used(reconciled.used)
            problems = leases.problems()
        except SlurmError:  # slurmctld is at fault, not this node
            raise
        except YunionError as error:
            return error.reason
        return why_no_jobs(addresses, devices, problems) or held

    def _disconnect(
        self,
        live: Iterable[LeaseDetailsJson],
        jobs: Callable[[], Mapping[str, float | None]],
        leases: JobLeases,
        node: SlurmNode,
    ) -> None:
        """Disconnect the processes of jobs from MPS that Slurm is about to kill.

        `live` are the leases of Slurm's jobs, and `jobs` returns when Slurm began to end each of these.

        Source: slurm.conf(5), KillWait: Slurm calls no hook between its SIGTERM and its SIGKILL.
        """
        ending: list[tuple[LeaseDetailsJson, float]] = []
        for lease in live:
            since_s = jobs()[job_of(lease)]
            if since_s:
                ending.append((lease, since_s))
        if not ending:
            return
        kill_wait_s, interval_s = node.kill_settings_s()
        for lease, since_s in ending:
            if is_about_to_be_killed(time.time() - since_s, kill_wait_s, interval_s):
                leases.disconnect(lease)

    def _files_by_job(self) -> list[tuple[str, str]]:
        """Return the ids of the jobs that have files, and the files, also unfinished ones."""
        try:
            names = os.listdir(self._paths.slurm_jobs)
        except FileNotFoundError:
            return []
        files: list[tuple[str, str]] = []
        for name in names:
            job = name.partition(".")[0]
            if re.fullmatch(JOB_ID, job):
                files.append((job, os.path.join(self._paths.slurm_jobs, name)))
        return files

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
        """Return whether a hook of a job may have failed after a check, which still runs, asked the daemon.

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


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _all_addresses(by_index: Mapping[int, Iterable[str]]) -> list[str]:
    addresses: list[str] = []
    for of_index in by_index.values():
        addresses += of_index
    return addresses


def _addresses(
    record: Record, indices: Sequence[int], devices: Sequence[DeviceJson], leases: JobLeases
) -> dict[int, list[str]]:
    """Return the addresses of the devices of each index.

    Raises NotFoundError if the devices have changed. A pending change is the reason, if there is one:
    gres.conf cannot be written until it is in effect.
    """
    try:
        return record.addresses(indices, devices)
    except NotFoundError:
        change = pending_change([device.addr for device in record.devices], leases.problems())
        if not change:
            raise
        raise NotFoundError(change, hint_of(change.code), change.code) from None


def _is_any_unavailable(addresses: Collection[str], leases: JobLeases) -> bool:
    """Return whether one of these devices is unavailable to all users."""
    unavailable = {device["addr"] for device in leases.devices() if device["state"] == UNAVAILABLE}
    return not unavailable.isdisjoint(addresses)


def _require_numbers(record: Record, node: SlurmNode) -> None:
    """Raise NotFoundError if Slurm counts the types of the devices in another order than the record."""
    if record.is_mixed:
        record.require_numbers(counts_of(node.state().gres, "gpu"))


def number_of_shards(job: Job, gres: Collection[str], types: Sequence[str]) -> int:
    """Return how many of a GPU's devices the job has, according to Slurm.

    It is 0 if the job has devices of one of the `types`. `gres` are Slurm's answers, which is asked because
    Prolog's environment has only the devices of one of the job's types.

    Raises InfeasibleError if the job is ending, its shards are of several GPUs, its devices are of different
    types, or Slurm's answers differ.

    Source: Slurm: Generic Resource (GRES) Scheduling, section "Sharding"; slurm.conf(5),
    SelectTypeParameters, MULTIPLE_SHARING_GRES_PJ.
    """
    if not gres:
        raise InfeasibleError("the job ended while its Prolog was running", "submit it again")
    numbers = {sum(counts_of(answer, "shard").values()) for answer in gres}
    number = numbers.pop()
    if numbers:
        text = (
            f"Slurm gives contradictory answers to what the job has on this node: {', '.join(sorted(gres))}"
        )
        raise InfeasibleError(text, "give the job a name and a comment of one line each")
    if number and len(job.indices) > 1:
        text = f"the job has shards of {len(job.indices)} GPUs: only shards of one GPU can be leased"
        raise InfeasibleError(text, "remove MULTIPLE_SHARING_GRES_PJ from SelectTypeParameters")
    if number:
        return number
    counts = [counts_of(answer, "gpu") for answer in gres]
    all_of_one_type = [len(job.indices)]
    if not any(list(of_type.values()) == all_of_one_type for of_type in counts):
        given = ", ".join(f"{count} of {type_}" for type_, count in counts[0].items())
        text = (
            f"Slurm has given the job devices of several types, but a process can use only one type: {given}"
        )
        hint = f"request one type ({', '.join(types)}) without --exclusive: --gres=gpu:{types[0]}:1"
        raise InfeasibleError(text, hint)
    return 0


def environment_of_task(job: Job, content: JobFile) -> Mapping[str, str]:
    """Return the environment of a task: of all of the job's devices, or of the single device of its step.

    Raises YunionError if Prolog refused the job, or if the step has several of the devices, but not all.
    """
    if content["error"]:
        message = content["error"][0]
        raise YunionError(message, "\n".join(content["error"][1:]))
    devices = content["devices"]
    indices: Sequence[int] = job.step_indices
    if job.task and devices:
        indices = job.task.indices([int(index) for index in devices])
    step = [str(index) for index in indices]
    # Indices of other devices are inherited: see Job.
    is_inherited = not set(step) <= set(devices)
    if is_inherited or len(step) in (0, len(devices)):
        return content["environment"]
    if len(step) == 1:
        return devices[step[0]]
    text = (
        f"the step has {len(step)} of the job's {len(devices)} devices: only one or all of them have a budget"
    )
    raise InfeasibleError(text, "start the step with one device or with all: srun --exact --gres=gpu:TYPE:1")
