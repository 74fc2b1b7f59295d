"""Talking to a control daemon: who it is, and one conversation with it through NVIDIA's own front-end.

The front-end exits 0 whatever the control daemon answers, so a conversation counts only by what was read
back. Nothing here waits: a conversation is polled with the time, and has a deadline.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.errors import ControlError
from yunion_mps.models import DomainPlan
from yunion_mps.planning import decimal
from yunion_mps.process import find_program, spawn

PROGRAM = "nvidia-cuda-mps-control"
PACKAGES = (
    "install it: nvidia-cuda-mps on Debian (non-free), nvidia-compute-utils-<release> on Ubuntu, "
    "nvidia-driver-cuda on RHEL and its kin (NVIDIA's repository), "
    "xorg-x11-drv-nvidia-cuda on Fedora (RPM Fusion)"
)

#: More than any answer of ours; the rest would only fill memory.
_LONGEST_ANSWER = 1 << 20
_NO_LIMITS = "no device is served without its limits; look at the end of the control daemon's log"
_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    """The process behind a socket."""

    pid: int
    uid: int


def find_control_program() -> str:
    """The path of NVIDIA's control program; raises HostError naming the packages that hold it."""
    return find_program(PROGRAM, PACKAGES)


def peer_of(pipe_directory: str) -> Peer | None:
    """The control daemon that listens in the directory, by the kernel's own word; None where none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0)
        try:
            connection.connect(f"{pipe_directory}/control")
        except BlockingIOError:
            pass  # its queue is full: it is there, and does not accept
        except OSError:
            return None
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid) if pid > 0 else None


def client_variables(pipe_directory: str) -> dict[str, str]:
    """The environment of the front-end; built from nothing, so that ours cannot lead it elsewhere."""
    return {"CUDA_MPS_PIPE_DIRECTORY": pipe_directory, "LC_ALL": "C", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class Conversation:
    """Several commands to one control daemon, in one front-end process."""

    def __init__(
        self, program: str, pipe_directory: str, commands: Sequence[str], now_s: float, timeout_s: float
    ) -> None:
        self._commands = commands
        self._deadline_s = now_s + timeout_s
        self._timeout_s = timeout_s
        self._answer = bytearray()
        commands_out, commands_in = os.pipe()
        self._output, answer_in = os.pipe()
        os.set_blocking(self._output, False)
        try:
            # All of it fits the pipe's 64 KiB, also for 64 GPUs, so this write never waits.
            os.write(commands_in, "".join(f"{command}\n" for command in commands).encode())
            variables = client_variables(pipe_directory)
            self._process = spawn(
                [program], variables, stdin=commands_out, stdout=answer_in, stderr=answer_in
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            for descriptor in (commands_out, commands_in, answer_in):
                os.close(descriptor)

    @property
    def deadline_s(self) -> float:
        """When it is given up, by the clock that `poll` is called with."""
        return self._deadline_s

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to do."""
        return self._output

    def poll(self, now_s: float) -> list[str] | None:
        """The answer's lines once it is complete, None before that.

        Raises ControlError when there is no control daemon, or no answer until the deadline.
        """
        complete = self._read()
        if complete and self._process.status() is not None:
            status = self._process.status()
            text = self._answer.decode(errors="replace")
            self.close()
            if status != 0:
                raise ControlError(f"{PROGRAM} said: {text.strip() or f'status {status}'}", "")
            return text.splitlines()
        if now_s >= self._deadline_s:
            self.close()
            raise ControlError(
                f"the control daemon did not answer {self._commands[0]!r} within {self._timeout_s:g} s",
                "look at the end of its log",
            )
        return None

    def close(self) -> None:
        """End the front-end where it still runs, and give back what was held."""
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
            self._process.kill()

    def _read(self) -> bool:
        """Read what is there; whether the end was reached."""
        while True:
            try:
                part = os.read(self._output, 65536)
            except BlockingIOError:
                return False
            if not part:
                return True
            if len(self._answer) < _LONGEST_ANSWER:
                self._answer += part


def limit_commands(plan: DomainPlan) -> list[str]:
    """The commands that set every limit of a domain, and then ask for each.

    The percentage is asked for after each memory limit, because a limit that is not set is answered by
    no line at all: so each answer stays beside its question.
    """
    percentage = decimal(plan.thread_percentage)
    commands = [f"set_default_active_thread_percentage {percentage}"]
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        commands.append(f"set_default_device_pinned_mem_limit {device} {memory_mib}M")
    for device in range(len(plan.memory_limits_mib)):
        commands.append(f"get_default_device_pinned_mem_limit {device}")
        commands.append("get_default_active_thread_percentage")
    return commands


def check_limits(plan: DomainPlan, answer: Sequence[str]) -> None:
    """Raise ControlError for the first limit that was not read back as it was set."""
    memory: list[str | None] = []
    percentages = [line for line in answer[:1] if not _is_memory(line)]
    waiting: str | None = None
    for line in answer[1:]:
        if _is_memory(line):
            waiting = line
        else:
            memory.append(waiting)
            percentages.append(line)
            waiting = None
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        got = memory[device] if device < len(memory) else None
        if got != shown_memory(memory_mib):
            raise _not_in_force(f"memory limit of device {device}", f"{memory_mib}M", got)
    wanted = f"{plan.thread_percentage:.1f}"
    if len(percentages) != len(plan.memory_limits_mib) + 1 or set(percentages) != {wanted}:
        raise _not_in_force("thread percentage", wanted, next((p for p in percentages if p != wanted), None))
    lines = 2 * len(plan.memory_limits_mib) + 1
    if len(answer) != lines:
        raise ControlError(
            f"the control daemon answers {len(answer)} lines where {lines} were asked for", _NO_LIMITS
        )


def shown_memory(memory_mib: int) -> str:
    """How the control daemon shows a memory limit: cut to whole G from 1 GiB on, so 5760M is `5G`."""
    return f"{memory_mib // 1024}G" if memory_mib >= 1024 else f"{memory_mib}M"


def _is_memory(line: str) -> bool:
    return re.fullmatch(r"\d+[GM]", line) is not None


def _not_in_force(what: str, wanted: str, got: str | None) -> ControlError:
    answered = f"{got!r}" if got else "nothing"
    return ControlError(
        f"the {what} is not in force: it was set to {wanted}, and the control daemon answers {answered}",
        _NO_LIMITS,
    )
