"""A control daemon that somebody else started, and that is ours by an operator's or the package's word.

That word (`yunion-mps-daemon --take-over PID`) is written down for one process, by its PID and start, where
only root can write, and which a reboot empties. Nothing else makes somebody else's control daemon ours.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.escaping import printable
from yunion_mps.host.files import write_atomically
from yunion_mps.host.proc import started_ticks
from yunion_mps.models import DomainPlan
from yunion_mps.paths import Paths

#: Where NVIDIA's control daemon serves without CUDA_MPS_PIPE_DIRECTORY.
_NVIDIAS_DIRECTORY = "/tmp/nvidia-mps"


class TakenOver(NamedTuple):
    """The process, the GPUs (UUIDs) that it serves, and its pipe directory.

    `in_order`: it is known that the GPUs are numbered in this order, by which limits are named.
    """

    pid: int
    started_ticks: int
    gpu_uuids: tuple[str, ...]
    in_order: bool
    pipe_directory: str

    def refuse_other_limits(self, plan: DomainPlan) -> None:
        """Raise HostError where the limits of its GPUs differ, and nobody knows which GPU is which number."""
        if not self.can_serve(plan):
            what = f"the control daemon (PID {self.pid}) that was taken over in {self.pipe_directory}"
            why = "numbers its GPUs in an order that is not certain, and their memory limits differ"
            raise HostError(f"{what} {why}", "give its GPUs equal limits, or end it when its jobs are done")

    def can_serve(self, plan: DomainPlan) -> bool:
        """Whether each limit of the plan can be set for the GPU that it is meant for."""
        return self.in_order or _alike(plan)


def taken_over(pid: int) -> TakenOver | None:
    """What was written down of this process, None where nothing was."""
    noted = _noted()
    return noted if noted and noted.pid == pid and noted.started_ticks == started_ticks(pid) else None


def taken_over_parent_of(pid: int, environment: Mapping[str, str]) -> TakenOver | None:
    """The record of the adopted control daemon that started this MPS server, which lacks our mark."""
    noted = _noted()
    if noted is None or noted.pipe_directory != _place(environment):
        return None
    return noted if (started_ticks(pid) or 0) >= noted.started_ticks else None


def write_down(value: TakenOver) -> None:
    """Make the process ours; raises HostError where that cannot be written."""
    path = _file()
    try:
        write_atomically(path, json.dumps(value._asdict()))
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}", "run as root") from None


def judge(
    pid: int, environment: Mapping[str, str], host_gpus: Sequence[str | None], plan: DomainPlan
) -> TakenOver:
    """What is to be written down of somebody's control daemon; raises HostError where it cannot be ours.

    `host_gpus` are the UUIDs of all GPUs of the host in PCI order, None where one is not told. The caller
    knows that the process is NVIDIA's control program and listens in the directory of `plan`.
    """
    place = _place(environment)
    if place != plan.pipe_directory:
        why = f"it was started for {printable(place)}"
        raise _not(pid, f"{why}, and cuda_mps_pipe_directory is {plan.pipe_directory}")
    if plan.multiuser:
        raise _not(pid, "cuda_mps_multiuser asks for one that is started otherwise")
    gpu_uuids, in_order = _served(pid, environment, host_gpus)
    if set(gpu_uuids) != set(plan.gpu_uuids):
        raise _not(pid, "the GPUs that it serves are not those that the configuration divides")
    if not in_order and not _alike(plan):
        why = "its CUDA_DEVICE_ORDER is not PCI_BUS_ID, so which GPU is which number to it is not certain"
        raise _not(pid, f"{why}, and their memory limits differ")
    began_ticks = started_ticks(pid)
    if began_ticks is None:
        raise _not(pid, "it has ended")
    return TakenOver(pid, began_ticks, gpu_uuids, in_order, plan.pipe_directory)


def _served(
    pid: int, environment: Mapping[str, str], host_gpus: Sequence[str | None]
) -> tuple[tuple[str, ...], bool]:
    """The UUIDs of its GPUs, and whether it numbers them in this order (CUDA C++ Programming Guide).

    CUDA_VISIBLE_DEVICES numbers them as it names them; without it CUDA's own order counts, which is that of
    PCI only where CUDA_DEVICE_ORDER says so.
    """
    known = tuple(uuid for uuid in host_gpus if uuid is not None)
    if len(known) < len(host_gpus):
        raise _not(pid, "a GPU of this host does not tell its UUID")
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return known, len(known) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    uuids = tuple(word.strip() for word in named.split(","))
    if not set(uuids) <= set(known):
        raise _not(pid, f"its CUDA_VISIBLE_DEVICES is {named!r}: only UUIDs tell which GPUs those are")
    return uuids, True


def _place(environment: Mapping[str, str]) -> str:
    return os.path.normpath(environment.get("CUDA_MPS_PIPE_DIRECTORY") or _NVIDIAS_DIRECTORY)


def _alike(plan: DomainPlan) -> bool:
    return len(set(plan.memory_limits_mib)) <= 1


def _not(pid: int, why: str) -> HostError:
    hint = "it goes on as it was; when its jobs are done, it can be ended, and ours starts"
    return HostError(f"the control daemon (PID {pid}) cannot be taken over: {why}", hint)


def _file() -> str:
    return Paths.from_environment().taken_over


def _noted() -> TakenOver | None:
    """What the file says, None for anything that is not root's or ours, or cannot be understood."""
    unreadable = (OSError, ValueError, TypeError, KeyError, RecursionError)
    with contextlib.suppress(*unreadable), open(_file(), encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_uid in (0, os.geteuid()):
            fields = json.load(file)
            return TakenOver(**{**fields, "gpu_uuids": tuple(fields["gpu_uuids"])})
    return None
