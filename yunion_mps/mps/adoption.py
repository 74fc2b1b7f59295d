"""Taking over a control daemon that an earlier daemon of ours left running.

Somebody else's is left alone, but for one that we were told to take over (see `taken_over`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan, Pool, Slice
from yunion_mps.mps.control import PROGRAM, peer_of
from yunion_mps.mps.directories import is_member
from yunion_mps.mps.ownership import MpsProcess, could_be_ours, our_processes
from yunion_mps.mps.taken_over import TakenOver, taken_over
from yunion_mps.process import Process, started_ticks

Part = TypeVar("Part", Slice, Pool)


class Found(NamedTuple):
    """A control daemon of ours that runs already, and the domain as it serves it.

    `taken_over` is what is noted of one that somebody else has started.
    """

    process: Process
    plan: DomainPlan
    taken_over: TakenOver | None = None


def find(plan: DomainPlan, ours: Sequence[MpsProcess] | None = None) -> Found | None:
    """The control daemon that serves the domain's directory already, None if none does.

    `ours` are our processes if the caller knows them. One of ours is found whether it answers or not; it may
    serve other GPUs than are planned, if one was lost or came back since. Raises HostError, and does nothing
    to it, if it is not one that we would have started, or serves no GPU of the plan.
    """
    place = plan.pipe_directory
    known = our_processes() if ours is None else ours
    here = [one for one in known if one.pipe_directory == place and not one.is_server]
    peer = peer_of(place)
    hint = f"when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}"
    if not here and peer:
        what = f"a control daemon (PID {peer.pid}, uid {peer.uid}), not started by us, already serves {place}"
        if could_be_ours(peer.pid):
            hint += f"; or go on with it and its jobs: yunion-mps-daemon --take-over {peer.pid}"
        raise HostError(what, hint)
    if not here:
        return None
    one = next((one for one in here if peer and one.pid == peer.pid), here[0])
    taken = taken_over(one.pid)
    if taken:
        taken.refuse_other_limits(plan)
    if not set(one.gpu_uuids) & set(plan.gpu_uuids):
        what = f"the control daemon (PID {one.pid}) that an earlier yunion-mps-daemon left in {place}"
        raise HostError(f"{what} serves none of its GPUs", hint)
    process = Process.adopt(one.pid)
    if process is None:
        return None
    if started_ticks(one.pid) != one.started_ticks:  # it has ended, and its PID is another's
        process.close()
        return None
    log_directory = one.log_directory or plan.log_directory
    # Its servers have its groups (measured), so one without the group cannot serve in a closed directory.
    group = plan.pipe_group if is_member(one.pid, plan.pipe_group) else ""
    running = plan._replace(log_directory=log_directory, gpu_uuids=one.gpu_uuids, pipe_group=group)
    served = as_served(plan, running)
    return Found(process, served, taken)


def as_served(plan: DomainPlan, running: DomainPlan) -> DomainPlan:
    """The plan with the GPUs in the running control daemon's own order, by which limits are named."""
    limits = dict(zip(plan.gpu_uuids, plan.memory_limits_mib))
    numbers = dict(zip(plan.gpu_uuids, plan.numbers))
    percentages = dict(zip(plan.gpu_uuids, plan.percentages))
    serves = running.gpu_uuids
    return plan._replace(
        pipe_directory=running.pipe_directory,
        log_directory=running.log_directory,
        pipe_group=running.pipe_group,  # as the running one has it from its start
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
