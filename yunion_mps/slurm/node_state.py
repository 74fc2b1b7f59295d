"""The node in Slurm: whether and why it is drained, and which jobs it has.

We change or end a drain only if its reason begins with our prefix.

Source: scontrol(1), update with State and Reason; sinfo(1) and squeue(1), --format.
"""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

from yunion_mps.core.errors import HostError
from yunion_mps.core.reasons import PROGRAM_MISSING, Reason, hint_of
from yunion_mps.core.text import parse_number, printable
from yunion_mps.host.processes import find_program, outcome_of
from yunion_mps.slurm.job import JOB_ID

#: A drain reason of ours is `yunion-mps: CODE: TEXT`.
PREFIX = "yunion-mps: "
#: How long one of Slurm's commands may take, in s: the hooks must end even if slurmctld does not answer.
_COMMAND_S = 10.0
_LONGEST_REASON = 200
_CHECK_CONTROLLER = "check slurmctld: scontrol ping"
#: Variables with which users choose what Slurm's commands list.
_FILTERS = ("SQUEUE_", "SINFO_", "SLURM_CLUSTERS")


class SlurmError(HostError):
    """One of Slurm's commands failed, as they do while slurmctld does not answer."""


def drain_reason(reason: Reason) -> str:
    """Return the reason as one argument of scontrol, without quotes or separators."""
    text = printable(str(reason)).replace('"', "'").replace("|", "/")
    return f"{PREFIX}{reason.code}: {text}"[:_LONGEST_REASON].rstrip()


#: The lines of a job's allocation, and the name, type and number in a gres: `shard:2(IDX:0)` (measured with
#: 22.05), `shard:2(2/4,0/4)` (with 24.11), or `gpu:mps:2(IDX:0-1),gpu:time-sliced:0(IDX:)`.
_ALLOCATION = re.compile(r"^ *Nodes=(\S+) .*GRES=(\S*)$", re.MULTILINE)
_GRES = re.compile(r"(?:^|,)(\w+):(?:([^:,()]+):)?([0-9]{1,9})(?=[(,]|$)")


def counts_of(gres: str, name: str) -> dict[str, int]:
    """Return the numbers by type in a gres of this name; those without a type have an empty one."""
    counts: dict[str, int] = {}
    for gres_name, type_, number in _GRES.findall(gres):
        if gres_name == name and int(number):
            counts[type_] = int(number)
    return counts


class NodeState(NamedTuple):
    """The state of a node in Slurm. A node that is down does not count as drained.

    Source: sinfo(1), section "NODE STATE CODES".
    """

    is_drained: bool
    #: Why the node is drained or down; other states may have one, too.
    reason: str
    #: As in slurm.conf.
    gres: str = ""
    #: Resuming the node would cancel the reboot that the administrator has requested.
    awaits_reboot: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether we have drained the node, and may resume it."""
        return self.is_drained and not self.awaits_reboot and self.reason[: len(PREFIX)] == PREFIX


def parse_state(text: str) -> NodeState | None:
    """Parse a line of `sinfo --format=%T|%G|%E`: `drained*|gpu:mps:4|yunion-mps: gpu_lost: …`."""
    for line in text.splitlines():
        fields = line.split("|", 2)
        if len(fields) == 3:
            state, gres, reason = fields
            return NodeState(
                is_drained=state.startswith("drain"),
                reason=reason.strip(),
                gres=gres,
                awaits_reboot="@" in state,
            )
    return None


#: Durations in the output of `scontrol show config`.
_SECONDS = re.compile(r"^(\w+) += ([0-9]{1,9}) sec$", re.MULTILINE)


def parse_jobs(text: str) -> dict[str, float | None]:
    """Parse lines of squeue: the id, the state, and when the job ended or is expected to end."""
    jobs: dict[str, float | None] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and re.fullmatch(JOB_ID, words[0]):
            job, state, end = words
            jobs[job] = parse_number(end) if state == "COMPLETING" else None
    return jobs


class SlurmNode:
    """A node, read and changed by Slurm's commands; its methods raise SlurmError if a command fails."""

    def __init__(self, name: str = "") -> None:
        self.name = name or os.environ.get("SLURMD_NODENAME") or slurm_node_name()

    def state(self) -> NodeState:
        """Return the state; raises HostError if Slurm does not know the node."""
        text = _answer("sinfo", "--noheader", f"--nodes={self.name}", "--format=%T|%G|%E")
        state = parse_state(text)
        if state is None:
            raise HostError(f"node {self.name}: not known to Slurm", "list the nodes: scontrol show node")
        return state

    def drain(self, reason: Reason) -> None:
        """Drain the node, or change the reason; does nothing if it is drained for another reason."""
        state = self.state()
        text = drain_reason(reason)
        if state.is_drained and (state.reason == text or not state.is_ours):
            return
        _answer("scontrol", "update", f"NodeName={self.name}", "State=DRAIN", f"Reason={text}")

    def resume(self) -> None:
        _answer("scontrol", "update", f"NodeName={self.name}", "State=RESUME")

    def jobs(self) -> dict[str, float | None]:
        """Return all of Slurm's jobs on this node, by id: those that are starting, running or ending.

        For a job that is ending, the value is when Slurm began to end it, in s since the epoch.
        """
        text = _answer("squeue", "--noheader", f"--nodelist={self.name}", "--format=%A %T %e", times="%s")
        return parse_jobs(text)

    def kill_settings_s(self) -> tuple[int, int]:
        """Return KillWait and HealthCheckInterval of slurm.conf, in s."""
        settings = dict(_SECONDS.findall(_answer("scontrol", "show", "config")))
        return int(settings.get("KillWait", 0)), int(settings.get("HealthCheckInterval", 0))

    def gres(self, job_id: str) -> set[str]:
        """Return what the job has on this node, for example `gpu:1(IDX:0)`; empty if the job is ending.

        There may be several: for the job that represents an array, Slurm shows all jobs of the array, and a
        user can write such lines into the job's name.
        """
        text = _answer("scontrol", "--details", "show", "job", job_id)
        lines = _ALLOCATION.findall(text)
        lists_of_nodes = {nodes for nodes, _ in lines}
        own_lists = {nodes for nodes in lists_of_nodes if self._is_in(nodes)}
        return {gres for nodes, gres in lines if gres and nodes in own_lists}

    def _is_in(self, nodes: str) -> bool:
        """Return whether the node is in a list such as `node[1-4]`."""
        return self.name == nodes or self.name in _answer("scontrol", "show", "hostnames", nodes).split()


def slurm_node_name() -> str:
    """Return the name of this node, by default: that of the host, without its domain.

    Source: slurm.conf(5), NodeName.
    """
    return socket.gethostname().partition(".")[0]


def _answer(program: str, *arguments: str, times: str = "standard") -> str:
    """Return the output of one of Slurm's commands; `times` is how it shows times, as in strftime(3).

    Raises SlurmError if it fails, or does not end in time, and HostError if there is no such program.
    """
    path = find_program(program, hint_of(PROGRAM_MISSING), ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)}
    environment["SLURM_TIME_FORMAT"] = times
    status, output = outcome_of([path, *arguments], _COMMAND_S, with_stderr=True, environment=environment)
    text = printable(output.decode(errors="replace").strip().replace("\n", "; ")) if status else ""
    if status is None:
        raise SlurmError(f"{program}: did not end within {_COMMAND_S:g} s", _CHECK_CONTROLLER)
    if status:
        raise SlurmError(f"{program}: {text or f'exit status {status}'}", _CHECK_CONTROLLER)
    return output.decode(errors="replace").strip()
