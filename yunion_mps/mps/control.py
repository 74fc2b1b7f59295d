"""Talking to a control daemon: who it is, and one conversation with it through NVIDIA's own front-end.

The front-end exits 0 whatever the control daemon answers, so a conversation counts only by what was read
back. Nothing here waits: a conversation is polled with the time, and has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.errors import ControlError, ShortageError
from yunion_mps.escaping import decoded
from yunion_mps.host.proc import all_pids, count_open, program_name, uid_of
from yunion_mps.host.processes import Process, find_program, spawn

PROGRAM = "nvidia-cuda-mps-control"
PACKAGES = (
    "install it: nvidia-cuda-mps on Debian (non-free), nvidia-compute-utils-<release> on Ubuntu, "
    "nvidia-driver-cuda on RHEL and its kin (NVIDIA's repository), "
    "xorg-x11-drv-nvidia-cuda on Fedora (RPM Fusion)"
)

#: A question that every control daemon answers with one line. Where even this is answered by none, we were
#: turned away: it serves one front-end at a time, and closes to a second one without a word (measured).
HEARD = "get_default_active_thread_percentage"

#: What the front-end says (status 1) in half of the cases where another one is connected, and always where
#: the control daemon waits for its clients after a `quit`; in the other half it says nothing, with status 0,
#: and seldom 1 (measured).
_TURNED_AWAY = "Cannot send command to MPS control daemon process"

#: More than any answer of ours; the rest would only fill memory.
_LONGEST_ANSWER = 1 << 20
_CREDENTIALS = struct.Struct("3i")
#: The flag of a listening socket in /proc/net/unix (__SO_ACCEPTCON of linux/net.h).
_ACCEPTS = 1 << 16


class SilentError(ControlError):
    """A control daemon that runs does not answer, or nobody can reach it."""


class OccupiedError(ControlError):
    """Another front-end is connected, and so ours was not heard."""

    def __init__(self, pipe_directory: str, who: str = "") -> None:
        super().__init__(
            f"it answers nothing, because another {PROGRAM} is connected to it{f': {who}' if who else ''}",
            f"end that one; who has it open: pgrep -a nvidia-cuda-mps (pipe directory {pipe_directory})",
        )


class Peer(NamedTuple):
    """The process behind a socket."""

    pid: int
    uid: int


def find_control_program() -> str:
    """The path of NVIDIA's control program; raises HostError naming the packages that hold it."""
    return find_program(PROGRAM, PACKAGES)


def peer_of(pipe_directory: str) -> Peer | None:
    """The control daemon that listens in the directory, by the kernel's own word; None if none does.

    Raises HostError if no socket can be made.
    """
    place = f"{pipe_directory}/control"
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ShortageError(f"no socket can be made: {error.strerror}") from None
    with connection:
        connection.settimeout(0)
        try:
            connection.connect(place)
        except BlockingIOError:
            return _listener(place)  # its queue is full, so the kernel made no connection that has a peer
        except OSError:
            return None
        peer = credentials_of(connection)
    return peer if peer.pid > 0 else None


def _listener(place: str) -> Peer | None:
    """NVIDIA's control program that holds the listening socket of this name (proc(5), `/proc/net/unix`)."""
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        rows = [line.rstrip(b"\n").split(b" ", 7) for line in file if line.endswith(f" {place}\n".encode())]
        inodes = {f"socket:[{int(row[6])}]" for row in rows if int(row[3], 16) & _ACCEPTS}
        for pid in all_pids() if inodes else []:
            if program_name(pid) == PROGRAM and count_open(pid, inodes):
                return Peer(pid, uid_of(pid) or 0)
    return None


def credentials_of(connection: socket.socket) -> Peer:
    """Who listens at the other end, by the kernel's own word (SO_PEERCRED, unix(7)); PID 0 where unknown."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


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
        try:
            self._output, self._process = self._open(program, pipe_directory)
        except OSError as error:
            what = f"the control daemon cannot be talked to: {error.strerror}"
            raise ShortageError(what) from None
        os.set_blocking(self._output, False)

    def _open(self, program: str, pipe_directory: str) -> tuple[int, Process]:
        """Start the front-end with the commands on its input; return the end of its output, and itself."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as unless_started:
            commands_out, commands_in = os.pipe()
            ours.callback(os.close, commands_out)
            ours.callback(os.close, commands_in)
            output, answer_in = os.pipe()
            ours.callback(os.close, answer_in)
            unless_started.callback(os.close, output)
            # All of it fits the pipe's 64 KiB, also for 64 GPUs, so this write never waits.
            os.write(commands_in, "".join(f"{command}\n" for command in self._commands).encode())
            variables = client_variables(pipe_directory)
            process = spawn([program], variables, stdin=commands_out, stdout=answer_in, stderr=answer_in)
            unless_started.pop_all()
            return output, process

    @property
    def deadline_s(self) -> float:
        """When it is given up, by the clock that `poll` is called with."""
        return self._deadline_s

    def fileno(self) -> int:
        """A descriptor that becomes readable when `poll` has something to do."""
        return self._output

    def poll(self, now_s: float) -> list[str] | None:
        """The answer's lines once it is complete, None before that; none where another front-end is served.

        Raises SilentError when there is no control daemon, or no answer until the deadline.
        """
        complete = self._read()
        if complete and self._process.status() is not None:
            status = self._process.status()
            lines = [decoded(line) for line in bytes(self._answer).splitlines()]
            text = "\n".join(lines)
            self.close()
            if status != 0 and (text.startswith(_TURNED_AWAY) or (status == 1 and not text)):
                return []
            if status != 0:
                raise SilentError(f"{PROGRAM} said: {text.strip() or f'status {status}'}", "")
            return lines
        if now_s >= self._deadline_s:
            self.close()
            raise SilentError(
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
