"""Taking over a control daemon that an earlier daemon of ours left running, and nobody else's."""

from __future__ import annotations

from yunion_mps.errors import HostError
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import PROGRAM, client_variables, peer_of
from yunion_mps.process import Process, environment_of, program_of

#: Marks a control daemon as ours, in the environment that it was started with.
MARK = "YUNION_MPS_DOMAIN"


def control_environment(plan: DomainPlan) -> dict[str, str]:
    """The control daemon's environment, built from nothing: just these GPUs, in NVML's order."""
    return {
        **client_variables(plan.pipe_directory),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_LOG_DIRECTORY": plan.log_directory,
        "CUDA_VISIBLE_DEVICES": ",".join(plan.gpu_uuids),
        MARK: plan.name,
    }


def adopt(plan: DomainPlan) -> Process | None:
    """The control daemon that serves the domain's directory already, None where none does.

    Raises HostError, and does nothing to it, where it is not the one that we would have started: another
    program, somebody else's, or one for other GPUs.
    """
    peer = peer_of(plan.pipe_directory)
    if peer is None:
        return None
    environment = environment_of(peer.pid)
    wanted = control_environment(plan)
    if program_of(peer.pid).rpartition("/")[2] == PROGRAM and wanted.items() <= environment.items():
        return Process.adopt(peer.pid)
    who = (
        "left by an earlier yunion-mps-daemon for other GPUs" if MARK in environment else "not started by us"
    )
    place = plan.pipe_directory
    raise HostError(
        f"a control daemon (PID {peer.pid}, uid {peer.uid}), {who}, already serves {place}",
        f"when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}",
    )
