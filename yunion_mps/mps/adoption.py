"""Taking over a control daemon that an earlier daemon of ours left running.

Somebody else's is left alone, but for one that we were told to take over (see `taken_over`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.processes import Process
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import PROGRAM, peer_of
from yunion_mps.mps.directories import is_member
from yunion_mps.mps.ownership import MpsProcess, could_be_ours, our_processes
from yunion_mps.mps.taken_over import TakenOver, taken_over


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
    served = plan._replace(log_directory=log_directory, pipe_group=group).for_gpus(one.gpu_uuids)
    return Found(process, served, taken)


def as_served(plan: DomainPlan, running: DomainPlan) -> DomainPlan:
    """The plan with the GPUs in the running control daemon's own order, by which limits are named."""
    return plan._replace(
        pipe_directory=running.pipe_directory,
        log_directory=running.log_directory,
        pipe_group=running.pipe_group,  # as the running one has it from its start
    ).for_gpus(running.gpu_uuids)


def with_remembered(plan: DomainPlan, remembered: DomainPlan) -> DomainPlan:
    """The plan, with what is remembered of GPUs that it has no limit for: of one that is lost for now."""
    before = remembered.for_gpus(plan.gpu_uuids).gpus
    gpus = (was if now.memory_limit_mib is None else now for now, was in zip(plan.gpus, before))
    return plan._replace(gpus=tuple(gpus))
