"""Taking over a control daemon that an earlier daemon of ours left running, and nobody else's."""

from __future__ import annotations

from typing import NamedTuple

from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import PROGRAM, client_variables, peer_of
from yunion_mps.process import Process, environment_of, program_of

#: Marks a control daemon as ours, in the environment that it was started with.
MARK = "YUNION_MPS_DOMAIN"


class Found(NamedTuple):
    """A control daemon of ours that runs already, and the domain as it serves it."""

    process: Process
    plan: DomainPlan


class LeftRunningError(HostError):
    """A control daemon of ours runs that cannot be taken over; its clients may be at work."""


def control_environment(plan: DomainPlan) -> dict[str, str]:
    """The control daemon's environment, built from nothing: just these GPUs, in NVML's order."""
    return {
        **client_variables(plan.pipe_directory),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_LOG_DIRECTORY": plan.log_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.gpu_uuids),
        MARK: plan.name,
    }


def find(plan: DomainPlan) -> Found | None:
    """The control daemon that serves the domain's directory already, None where none does.

    It may serve more GPUs than the plan has, where one was lost since. Raises HostError, and does nothing to
    it, where it is not one that we would have started: another program, somebody else's (HostError), or ours
    without a GPU of the plan (LeftRunningError).
    """
    peer = peer_of(plan.pipe_directory)
    if peer is None:
        return None
    place = plan.pipe_directory
    hint = f"when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}"
    environment = environment_of(peer.pid)
    if not _is_ours(peer.pid, environment, place):
        what = f"a control daemon (PID {peer.pid}, uid {peer.uid}), not started by us, already serves {place}"
        raise HostError(what, hint)
    serves = tuple(environment.get("CUDA_VISIBLE_DEVICES", "").split(","))
    missing = [uuid for uuid in plan.gpu_uuids if uuid not in serves]
    if missing:
        what = f"the control daemon (PID {peer.pid}) that an earlier yunion-mps-daemon left in {place}"
        raise LeftRunningError(f"{what} does not serve GPU {missing[0]}", hint)
    process = Process.adopt(peer.pid)
    return Found(process, _as_served(plan, serves, environment)) if process else None


def left_behind(pipe_directory: str) -> int | None:
    """The PID of a control daemon of ours that still serves the directory, None where none does."""
    peer = peer_of(pipe_directory)
    if peer and _is_ours(peer.pid, environment_of(peer.pid), pipe_directory):
        return peer.pid
    return None


def _is_ours(pid: int, environment: dict[str, str], pipe_directory: str) -> bool:
    named = environment.get("CUDA_MPS_PIPE_DIRECTORY") == pipe_directory
    return program_of(pid).rpartition("/")[2] == PROGRAM and MARK in environment and named


def _as_served(plan: DomainPlan, serves: tuple[str, ...], environment: dict[str, str]) -> DomainPlan:
    """The plan with the GPUs in the running control daemon's own order, by which limits are named."""
    limits = dict(zip(plan.gpu_uuids, plan.memory_limits_mib))
    return plan._replace(
        log_directory=environment.get("CUDA_MPS_LOG_DIRECTORY", plan.log_directory),
        gpu_uuids=serves,
        memory_limits_mib=tuple(limits.get(uuid) for uuid in serves),
    )
