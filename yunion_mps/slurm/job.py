"""A Slurm job, as the environment of Slurm's hooks describes it, and the name of its lease."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from yunion_mps.core.enums import SLURM
from yunion_mps.core.errors import HostError, InfeasibleError
from yunion_mps.core.reasons import INVALID_REQUEST
from yunion_mps.core.text import parse_number

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson

L = TypeVar("L", bound="LeaseRecordJson")
#: The largest job id is below 2^32 (slurm.h).
JOB_ID = "[1-9][0-9]{0,9}"
_LEASE_NAME = re.compile(f"{SLURM}:({JOB_ID})")
#: Set by sbatch, and by an srun that starts the job itself.
_COMPONENT = re.compile(r"SLURM_JOB_ID_(HET|PACK)_GROUP_[0-9]+")
_INDICES = re.compile(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")
#: More devices than any node has: a longer list is an error, and does not fill the memory.
_MAX_INDICES = 10_000
#: How Slurm 22.05 binds the devices of --gpus-per-task=TYPE:N to tasks; 24.11 omits the type.
_PER_TASK = re.compile(r"gpu:per_task:(?![0-9]+$)(?P<type>[^:]+)(?::(?P<number>[0-9]{1,5}))?")
#: How much later than its interval a check may act, and how long a program has after SIGTERM, in s.
_CHECK_S = 10
_GRACE_S = 10
#: The largest id of a user or group; the next number means "none" (setresuid(2)).
_MAX_ID = 2**32 - 2
#: How much of a malformed variable an error shows.
_SHOWN_LENGTH = 100
_HINT_SET_BY_SLURM = (
    "set no SLURM_ variables in the job; if it sets none: only Slurm may run this hook (slurm.conf)"
)


class TaskShare(NamedTuple):
    """The devices of a task of --gpus-per-task=TYPE:N, if Slurm 22.05 has read the type as the number."""

    type: str
    #: How many devices each task has requested.
    number: int
    #: The place of the task among the step's tasks on this node.
    local_id: int
    #: How many devices all of the step's tasks have on this node.
    step_devices: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TaskShare | None:
        """Return the devices of the task whose environment this is.

        None if Slurm has assigned them correctly, or if this is the step's only task on the node. A batch
        script is always the only one, but it inherits the binding of a task that has submitted it.

        Raises HostError if a variable is missing or malformed.
        """
        match = _PER_TASK.fullmatch(environment.get("SLURMD_TRES_BIND", ""))
        if not match or "," not in environment.get("SLURM_GTIDS", ""):
            return None
        type_ = match["type"]
        number = int(match["number"] or 1)
        if re.match(f"{number}(?![0-9])", type_):
            return None
        return cls(
            type=type_,
            number=number,
            local_id=_number(environment, "SLURM_LOCALID", _MAX_INDICES),
            step_devices=_number(environment, "SLURM_GPUS_ON_NODE", _MAX_INDICES),
        )

    def indices(self, job_indices: Sequence[int]) -> Sequence[int]:
        """Return which of the job's indices are the task's; raises InfeasibleError if Slurm does not say."""
        if self.step_devices != len(job_indices):
            text = f"Slurm did not assign the task its devices: it read the type {self.type} as their number"
            separate = f"start a step for each task: srun --exact -n1 --gres=gpu:{self.type}:{self.number}"
            raise InfeasibleError(text, "add --gpu-bind=single:1 to srun" if self.number == 1 else separate)
        first = self.local_id * self.number
        return sorted(job_indices)[first : first + self.number]


class Job(NamedTuple):
    """A job, or a step or task of it.

    A batch script is not a step, but inherits the indices of a step that submitted it. Slurm sets
    CUDA_VISIBLE_DEVICES for both: if its number of devices differs, the indices are not the script's own.

    Source: Slurm: Prolog and Epilog Guide, for the variables of the hooks; Heterogeneous Job Support.
    """

    id: str
    uid: int = 0
    #: The indices in gres.conf of the job's devices.
    indices: tuple[int, ...] = ()
    #: Those of its current step.
    step_indices: tuple[int, ...] = ()
    #: The ids of the jobs that form a heterogeneous job. No two of them share a node, and the tasks of all of
    #: them have the id of the first.
    components: tuple[str, ...] = ()
    task: TaskShare | None = None
    #: The job's group; None if Slurm does not say.
    gid: int | None = None

    @property
    def lease_name(self) -> str:
        return f"{SLURM}:{self.id}"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Job:
        """Read the job from a hook's environment; raises HostError if a variable is missing or malformed."""
        job_id = job_id_of(environment)
        uid = 0
        if "SLURM_JOB_UID" in environment:
            uid = _number(environment, "SLURM_JOB_UID", _MAX_ID)
        gid = None
        if "SLURM_JOB_GID" in environment:
            gid = _number(environment, "SLURM_JOB_GID", _MAX_ID)
        indices = indices_of(environment.get("SLURM_JOB_GPUS", ""))
        step_indices = indices_of(environment.get("SLURM_STEP_GPUS", ""))
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        if visible and visible.count(",") + 1 != len(step_indices):
            step_indices = ()
        components = [value for name, value in environment.items() if _COMPONENT.fullmatch(name)]
        if job_id not in components or not all(re.fullmatch(JOB_ID, value) for value in components):
            components = []  # inherited from another job
        return cls(
            id=job_id,
            uid=uid,
            indices=indices,
            step_indices=step_indices,
            components=tuple(components),
            task=TaskShare.of(environment),
            gid=gid,
        )


def job_id_of(environment: Mapping[str, str]) -> str:
    """Return the id of the job whose hook this is; raises HostError if Slurm did not set it."""
    text = environment.get("SLURM_JOB_ID", "")
    if not re.fullmatch(JOB_ID, text):
        message = f"SLURM_JOB_ID: not set by Slurm (job id {_shown(text)})"
        raise HostError(message, _HINT_SET_BY_SLURM, INVALID_REQUEST)
    return text


def _number(environment: Mapping[str, str], name: str, highest: int) -> int:
    """Return the number in a variable that Slurm sets; raises HostError if it is none from 0 to `highest`."""
    text = environment.get(name)
    if text is None:
        raise HostError(f"{name}: not set by Slurm", _HINT_SET_BY_SLURM, INVALID_REQUEST)
    number = parse_number(text)
    if number is None or number > highest:
        message = f"{name} is {_shown(text)}, not a number from 0 to {highest}"
        raise HostError(message, _HINT_SET_BY_SLURM, INVALID_REQUEST)
    return number


def indices_of(text: str) -> tuple[int, ...]:
    """Parse a list such as `0,1` or `0-3,6`; an empty text is an empty list.

    Raises HostError if it is no list, or too long.
    """
    if not text:
        return ()
    if not _INDICES.fullmatch(text):
        message = f"{_shown(text)} is not a list of device indices"
        raise HostError(
            message, "remove AutoDetect from gres.conf: yunion-mps slurm gres-conf", INVALID_REQUEST
        )
    indices: dict[int, None] = {}  # in order, each once
    for part in text.split(","):
        first, _, last = part.partition("-")
        for index in range(int(first), int(last or first) + 1):
            indices[index] = None
        if len(indices) > _MAX_INDICES:
            message = f"{_shown(text)} has more than {_MAX_INDICES} device indices"
            raise HostError(message, _HINT_SET_BY_SLURM, INVALID_REQUEST)
    return tuple(indices)


def _shown(text: str) -> str:
    """Return the text in quotes and escaped; of a long one, the beginning."""
    return repr(text) if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]!r}…"


def job_of(lease: LeaseRecordJson) -> str:
    """Return the id of the Slurm job that has the lease; empty if something else has it, such as root."""
    match = _LEASE_NAME.fullmatch(lease["name"] or "")
    if not match or lease["binding"] != "name" or lease["expires"] is not None:
        return ""
    return match[1]


def stale_leases(leases: Iterable[L], live: Iterable[str]) -> list[L]:
    """Return the leases of Slurm's jobs whose ids are not in `live`."""
    others = {"", *live}  # what is not leased to a job has an empty id
    return [lease for lease in leases if job_of(lease) not in others]


def is_about_to_be_killed(age_s: float, kill_wait_s: int, interval_s: int) -> bool:
    """Return whether Slurm kills a job, which it began to end `age_s` ago, before the next check can act.

    `interval_s` is the time from a check to the next. Always false if it is so long that a check would have
    to act before a program had 10 s to end by itself.

    Source: slurm.conf(5), KillWait and HealthCheckInterval.
    """
    first_s = kill_wait_s - interval_s - _CHECK_S
    return interval_s > 0 and first_s >= _GRACE_S and first_s <= age_s < kill_wait_s
