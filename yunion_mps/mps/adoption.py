"""Taking over a control daemon that an earlier daemon of ours left running.

Somebody else's is left alone, but for one that we were told to take over (see `taken_over`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan, Pool, Slice
from yunion_mps.mps.control import PROGRAM, Peer, client_variables, peer_of
from yunion_mps.mps.taken_over import TakenOver, taken_over
from yunion_mps.process import Process, all_pids, environment_of, name_of, program_of, uid_of

#: Marks a control daemon as ours, in the environment that it was started with.
MARK = "YUNION_MPS_DOMAIN"

Part = TypeVar("Part", Slice, Pool)


class Found(NamedTuple):
    """A control daemon of ours that runs already, and the domain as it serves it.

    `taken_over` is what is noted of one that somebody else has started.
    """

    process: Process
    plan: DomainPlan
    taken_over: TakenOver | None = None


class Left(NamedTuple):
    """A control daemon of ours that runs where nobody watches it, and the GPUs (UUIDs) that it serves."""

    pid: int
    gpu_uuids: tuple[str, ...]


def control_environment(plan: DomainPlan, program: str = "") -> dict[str, str]:
    """The control daemon's environment, built from nothing: just these GPUs, in NVML's order."""
    return {
        **client_variables(plan.pipe_directory),
        "PATH": server_path(program),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_LOG_DIRECTORY": plan.log_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.gpu_uuids),
        MARK: plan.name,
    }


def server_path(program: str) -> str:
    """The control daemon's PATH: it looks for NVIDIA's server there alone, so its own place comes first."""
    usual = client_variables("")["PATH"]
    beside = os.path.dirname(program)
    return usual if not beside or beside in usual.split(os.pathsep) else f"{beside}{os.pathsep}{usual}"


def find(plan: DomainPlan) -> Found | None:
    """The control daemon that serves the domain's directory already, None where none does.

    It may serve other GPUs than are planned, where one was lost or came back since. Raises HostError, and
    does nothing to it, where it is not one that we would have started, or serves no GPU of the plan.
    """
    peer = _serving(plan.pipe_directory)
    if peer is None:
        return None
    place = plan.pipe_directory
    hint = f"when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}"
    environment = environment_of(peer.pid)
    if not _is_ours(peer, environment, place):
        what = f"a control daemon (PID {peer.pid}, uid {peer.uid}), not started by us, already serves {place}"
        if could_be_ours(peer):
            hint += f"; or go on with it and its jobs: yunion-mps-daemon --take-over {peer.pid}"
        raise HostError(what, hint)
    taken = taken_over(peer.pid)
    if taken:
        taken.refuse_other_limits(plan)
    serves = _served(peer.pid, environment)
    if not set(serves) & set(plan.gpu_uuids):
        what = f"the control daemon (PID {peer.pid}) that an earlier yunion-mps-daemon left in {place}"
        raise HostError(f"{what} serves none of its GPUs", hint)
    process = Process.adopt(peer.pid)
    log_directory = environment.get("CUDA_MPS_LOG_DIRECTORY", plan.log_directory)
    served = as_served(plan, plan._replace(log_directory=log_directory, gpu_uuids=serves))
    return Found(process, served, taken) if process else None


def left_behind(pipe_directory: str) -> Left | None:
    """The control daemon of ours that still serves the directory, None where none does."""
    peer = _serving(pipe_directory)
    environment = environment_of(peer.pid) if peer else {}
    if peer and _is_ours(peer, environment, pipe_directory):
        return Left(peer.pid, _served(peer.pid, environment))
    return None


def _serving(pipe_directory: str) -> Peer | None:
    """The control daemon on the directory, also one whose sockets somebody has removed.

    Such a one cannot be reached any more, but goes on with its jobs, and another would start beside it.
    Where a socket is left, its own control daemon was the last one there, so processes are searched without.
    """
    peer = peer_of(pipe_directory)
    if peer or os.path.lexists(f"{pipe_directory}/control"):
        return peer
    for pid in reversed(all_pids()):
        one = Peer(pid, uid_of(pid) or 0)
        if name_of(pid) == PROGRAM[:15] and _is_ours(one, environment_of(pid), pipe_directory):
            return one
    return None


def _served(pid: int, environment: dict[str, str]) -> tuple[str, ...]:
    taken = taken_over(pid)
    return taken.gpu_uuids if taken else tuple(environment.get("CUDA_VISIBLE_DEVICES", "").split(","))


def _is_ours(peer: Peer, environment: dict[str, str], pipe_directory: str) -> bool:
    if not could_be_ours(peer):
        return False
    if MARK in environment:
        return environment.get("CUDA_MPS_PIPE_DIRECTORY") == pipe_directory
    taken = taken_over(peer.pid)
    return taken is not None and taken.pipe_directory == pipe_directory


def could_be_ours(peer: Peer) -> bool:
    """Whether it is NVIDIA's control program, and root's or of our user."""
    return peer.uid in (0, os.geteuid()) and program_of(peer.pid).rpartition("/")[2] == PROGRAM


def as_served(plan: DomainPlan, running: DomainPlan) -> DomainPlan:
    """The plan with the GPUs in the running control daemon's own order, by which limits are named."""
    limits = dict(zip(plan.gpu_uuids, plan.memory_limits_mib))
    numbers = dict(zip(plan.gpu_uuids, plan.numbers))
    percentages = dict(zip(plan.gpu_uuids, plan.percentages))
    serves = running.gpu_uuids
    return plan._replace(
        pipe_directory=running.pipe_directory,
        log_directory=running.log_directory,
        gpu_uuids=serves,
        memory_limits_mib=tuple(limits.get(uuid) for uuid in serves),
        numbers=tuple(numbers.get(uuid, 0) for uuid in serves),
        percentages=tuple(percentages.get(uuid, 0.0) for uuid in serves),
        slices=_of(serves, plan.slices),
        pools=_of(serves, plan.pools),
    )


def with_remembered(plan: DomainPlan, remembered: DomainPlan) -> DomainPlan:
    """The plan, with what is remembered of GPUs that it has no limit for: of one that is lost for now."""
    before = as_served(remembered, plan)
    rows = [
        was if limit is None else now
        for limit, now, was in zip(plan.memory_limits_mib, _rows(plan), _rows(before))
    ]
    limits, numbers, percentages = zip(*rows)
    known = zip(plan.gpu_uuids, plan.memory_limits_mib)
    lost = [uuid for uuid, limit in known if limit is None]
    return plan._replace(
        memory_limits_mib=limits,
        numbers=numbers,
        percentages=percentages,
        slices=_of(plan.gpu_uuids, (*plan.slices, *_of(lost, before.slices))),
        pools=_of(plan.gpu_uuids, (*plan.pools, *_of(lost, before.pools))),
    )


def _of(gpu_uuids: Iterable[str], parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts of these GPUs, in their order."""
    return tuple(part for uuid in gpu_uuids for part in parts if part.gpu_uuid == uuid)


def _rows(plan: DomainPlan) -> list[tuple[int | None, int, float]]:
    """By GPU: limit, number of devices and percentage; the latter may be unknown."""
    count = len(plan.gpu_uuids)
    numbers = plan.numbers or (0,) * count
    percentages = plan.percentages or (0.0,) * count
    return list(zip(plan.memory_limits_mib, numbers, percentages))
