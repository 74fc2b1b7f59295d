"""Conversations with a control daemon: which process it is, its answers to commands, and why it gives none.

Nothing here blocks, except the diagnosis, for up to half a second of CPU time: a conversation or a probe is
polled with the time, and has a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Sequence

from yunion_mps.core.errors import ControlError, HostError, ShortageError, YunionError
from yunion_mps.core.reasons import CONTROL_DAEMON_BUSY, CONTROL_DAEMON_SILENT, NO_REASON, Reason
from yunion_mps.core.text import decode_line
from yunion_mps.host.proc import all_pids, parent_of, program_name
from yunion_mps.host.process_info import describe_process, is_stopped, uid_of
from yunion_mps.host.processes import Process, spawn
from yunion_mps.host.sockets import Peer, connected_inodes, count_open, peer_credentials, socket_holders
from yunion_mps.mps.directories import locate
from yunion_mps.mps.processes import PROGRAM, client_variables, server_pids

#: How long a control daemon has to answer.
ANSWER_TIMEOUT_S = 5.0
#: How soon commands are sent again if it did not receive them.
COMMAND_RETRY_S = 1.0

#: A command that every control daemon answers with one line. If even this has no answer, we were rejected: it
#: serves one front-end at a time, and closes the connection of a second one without a message (measured).
PING = "get_default_active_thread_percentage"

#: What the front-end prints (status 1) in half of the cases in which another one is connected, and always if
#: the control daemon waits for its clients after a `quit`; in the other half it prints nothing, with status
#: 0, and rarely 1 (measured).
_REJECTED = "Cannot send command to MPS control daemon process"
#: How its other errors begin. With status 1 and without one, the connection broke in the middle: that happens
#: if a server exits meanwhile (measured with 535 and 550: up to 3 of 150 times on a busy machine).
_ERROR = "Cannot "

#: More than any expected answer; the rest would only fill memory.
_MAX_ANSWER = 1 << 20
#: The flag of a listening socket in /proc/net/unix (__SO_ACCEPTCON of linux/net.h).
_ACCEPTS = 1 << 16
#: How many connections a control daemon's queue holds (measured); another one is refused.
_QUEUE = 128


#: The PIDs of the front-ends of this process that still run.
_own_front_ends: set[int] = set()


class UnresponsiveError(ControlError):
    """A running control daemon does not answer, or cannot be reached."""

    code = CONTROL_DAEMON_SILENT


class OccupiedError(ControlError):
    """Our front-end was rejected because another one is connected."""

    code = CONTROL_DAEMON_BUSY

    def __init__(self, pipe_directory: str, front_end: str = "") -> None:
        message = f"it does not answer, because another {PROGRAM} is connected to it"
        if front_end:
            message += f": {front_end}"
        hint = f"end that process; find it: pgrep -a nvidia-cuda-mps (pipe directory {pipe_directory})"
        super().__init__(message, hint)


class EndingError(OccupiedError):
    """The other front-end is our own, which has told the control daemon to quit."""

    def __init__(self) -> None:
        text = "it does not answer, because it was told to quit, and waits for its clients to end"
        YunionError.__init__(self, text, "wait for that; see: yunion-mps status")


def occupied_error(pipe_directory: str) -> OccupiedError:
    """Return the error with the other front-end's process; takes up to half a second of CPU time."""
    connected = _front_ends(pipe_directory)
    if _own_front_ends.intersection(connected):
        return EndingError()
    return OccupiedError(pipe_directory, _described(connected))


# -- the process behind a socket


def peer_of(pipe_directory: str) -> Peer | None:
    """Return the control daemon that listens in the directory, according to the kernel; None if none does.

    Never blocks because of another user, whatever is there. Raises ShortageError if no socket can be made.
    """
    with _new_socket() as connection:
        try:
            _connect(connection, pipe_directory)
        except BlockingIOError:
            # Its queue is full, so there is no connection with a peer.
            return _find_listener(f"{pipe_directory}/control")
        except OSError:
            return None
        peer = peer_credentials(connection)
    return peer if peer.pid > 0 else None


def _connect(connection: socket.socket, pipe_directory: str) -> None:
    """Connect to the control daemon's socket, by its descriptor: the path may lead to a hung file system.

    Raises OSError if that is impossible, ShortageError if there is no descriptor, and BlockingIOError if the
    queue of connections is full.
    """
    try:
        with locate(f"{pipe_directory}/control") as control:
            connection.connect(f"/proc/self/fd/{control}")
    except HostError as error:
        raise OSError(errno.EACCES, error.message) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ShortageError(f"cannot connect to a socket: {error.strerror}") from None
        raise


def _new_socket() -> socket.socket:
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise ShortageError(f"cannot create a socket: {error.strerror}") from None
    connection.settimeout(0)
    return connection


def _find_listener(path: str) -> Peer | None:
    """Return NVIDIA's control program that holds the listening socket of this name (proc(5), net/unix)."""
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        rows = [line.rstrip(b"\n").split(b" ", 7) for line in file if line.endswith(f" {path}\n".encode())]
        inodes = {f"socket:[{int(row[6])}]" for row in rows if int(row[3], 16) & _ACCEPTS}
        if not inodes:
            return None
        for pid in all_pids():
            if program_name(pid) == PROGRAM and count_open(pid, inodes):
                return Peer(pid, uid_of(pid) or 0)
    return None


# -- commands


class Conversation:
    """Sends commands to a control daemon, through one process of NVIDIA's own front-end.

    The front-end exits 0 whatever the control daemon answers, so success is known only from reading back.

    Source: nvidia-cuda-mps-control(1), section "OPTIONS", no arguments.
    """

    def __init__(
        self, program: str, pipe_directory: str, commands: Sequence[str], now_s: float, timeout_s: float
    ) -> None:
        """Start the front-end.

        program: the path of NVIDIA's control program.
        commands: what it sends, in this order; the first one names the conversation in errors.
        now_s: the time, by the clock that `poll` is called with.
        timeout_s: how long the answer may take from then on.

        Raises HostError if the front-end cannot be started.
        """
        self._commands = commands
        #: By the clock that `poll` is called with.
        self.deadline_s = now_s + timeout_s
        self._timeout_s = timeout_s
        self._answer = bytearray()
        try:
            self._output, self._process = self._open(program, pipe_directory)
        except OSError as error:
            message = f"cannot communicate with the control daemon: {error.strerror}"
            raise ShortageError(message) from None
        os.set_blocking(self._output, False)

    def _open(self, program: str, pipe_directory: str) -> tuple[int, Process]:
        """Start the front-end with the commands on its input; return its output's pipe, and the process."""
        with contextlib.ExitStack() as descriptors, contextlib.ExitStack() as unless_started:
            commands_out, commands_in = os.pipe()
            descriptors.callback(os.close, commands_out)
            descriptors.callback(os.close, commands_in)
            output, answer_in = os.pipe()
            descriptors.callback(os.close, answer_in)
            unless_started.callback(os.close, output)
            # The commands fit into the pipe's 64 KiB even for 64 GPUs, so this write never blocks.
            os.write(commands_in, "".join(f"{command}\n" for command in self._commands).encode())
            variables = client_variables(pipe_directory)
            process = spawn([program], variables, stdin=commands_out, stdout=answer_in, stderr=answer_in)
            unless_started.pop_all()
            _own_front_ends.add(process.pid)
            return output, process

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when `poll` has something to do."""
        return self._output

    def poll(self, now_s: float) -> list[str] | None:
        """Return the answer's lines once it is complete, None before that.

        Empty if it was rejected or broke off.

        Raises UnresponsiveError if there is no control daemon, or no answer before the deadline.
        """
        status = self._process.status() if self._read() else None
        if status is not None:
            lines = [decode_line(line) for line in bytes(self._answer).splitlines()]
            text = "\n".join(lines)
            self.close()
            is_broken = status == 1 and not text.startswith(_ERROR)
            if status != 0 and (text.startswith(_REJECTED) or is_broken):
                return []
            if status != 0:
                raise UnresponsiveError(f"{PROGRAM} reported: {text.strip() or f'status {status}'}", "")
            return lines
        if now_s >= self.deadline_s:
            self.close()
            raise UnresponsiveError(
                f"the control daemon did not answer {self._commands[0]!r} within {self._timeout_s:g} s",
                "check the end of its log",
            )
        return None

    def _read(self) -> bool:
        """Read what is available; returns whether the end was reached."""
        while True:
            try:
                part = os.read(self._output, 65536)
            except BlockingIOError:
                return False
            if not part:
                return True
            if len(self._answer) < _MAX_ANSWER:
                self._answer += part

    def close(self) -> None:
        """End the front-end if it still runs; may be called again."""
        if self._output >= 0:
            os.close(self._output)
            self._output = -1
            self._process.kill()
            _own_front_ends.discard(self._process.pid)


class Probe:
    """Connects, and waits for the control daemon's greeting: a health check that needs no process.

    A control daemon greets every connection (measured with 535 and 550) from the one loop that serves all of
    them. So a greeting shows that it serves, and a missing greeting that it does not, because it was stopped,
    hangs, or is blocked by another connection.
    """

    def __init__(self, pipe_directory: str, pid: int, now_s: float, timeout_s: float) -> None:
        """Connect; raises UnresponsiveError if the socket is gone or another process's, and ShortageError.

        pid: that of the control daemon to which the socket has to belong.
        now_s: the time, by the clock that `poll` is called with.
        timeout_s: how long the greeting may take from then on.
        """
        self.began_s = now_s
        self.deadline_s = now_s + timeout_s
        self._timeout_s = timeout_s
        #: Whether its descriptor can become readable.
        self.is_connected = True
        self._connection = _new_socket()
        try:
            self._connect(pipe_directory, pid)
        except BaseException:
            self.close()
            raise

    def _connect(self, pipe_directory: str, pid: int) -> None:
        try:
            _connect(self._connection, pipe_directory)
        except BlockingIOError:  # the queue of connections is full
            self.is_connected = False
            return
        except OSError as error:
            why = f"is gone ({error.strerror})"
            raise UnresponsiveError(
                f"its socket in {pipe_directory} {why}, so clients cannot connect"
            ) from None
        peer = peer_credentials(self._connection)
        if peer.pid != pid:
            why = f"belongs to another process (PID {peer.pid})"
            raise UnresponsiveError(f"its socket in {pipe_directory} {why}, so clients cannot connect")

    def fileno(self) -> int:
        """Return a descriptor that becomes readable with the greeting."""
        return self._connection.fileno()

    def poll(self, now_s: float) -> bool:
        """Return whether the greeting has arrived; raises UnresponsiveError after the deadline."""
        answer = self._receive() if self.is_connected else None
        if answer:
            return True
        if answer is not None:
            raise UnresponsiveError("it closes every new connection", "check the end of its log")
        if now_s >= self.deadline_s:
            raise UnresponsiveError(
                f"it has not answered for {self._timeout_s:g} s", "check the end of its log"
            )
        return False

    def _receive(self) -> bytes | None:
        """Return the received data: None if there is none yet, empty if the connection was closed."""
        try:
            return self._connection.recv(64)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        self._connection.close()


# -- why it does not answer: it serves all processes from one loop, which blocks on one connection (measured)


def diagnose(pid: int, pipe_directory: str) -> Reason:
    """Return the cause, empty if none is found. Never raises; takes up to half a second of CPU time."""
    with contextlib.suppress(Exception):
        stopped = _stopped_process(pid)
        if stopped:
            return Reason(stopped, CONTROL_DAEMON_SILENT)
        return Reason(_blocking_connection(pid, pipe_directory), CONTROL_DAEMON_BUSY)
    return NO_REASON


def front_end_at(pipe_directory: str, daemon: int = 0) -> str:
    """Return the front-ends that are connected there, as text; empty if there are none. Never raises.

    Those that a process of ours, the `daemon` (a PID), has started are left out.
    """
    return _described(pid for pid in _front_ends(pipe_directory) if parent_of(pid) != daemon)


def _front_ends(pipe_directory: str) -> list[int]:
    with contextlib.suppress(Exception):
        return [pid for pid in connections(pipe_directory) if program_name(pid) == PROGRAM]
    return []


def _described(pids: Iterable[int]) -> str:
    return ", ".join(describe_process(pid) for pid in pids)


def _stopped_process(pid: int) -> str:
    if is_stopped(pid):
        return "it was stopped by a signal (SIGSTOP) or a debugger"
    for server in server_pids(pid):
        if is_stopped(server):
            return f"the MPS server (PID {server}) was stopped by a signal (SIGSTOP) or a debugger"
    return ""


def _blocking_connection(pid: int, pipe_directory: str) -> str:
    """Return which connected process may block the control daemon, and why; empty if none does.

    Servers, front-ends and this process may be connected and idle; any other process may be the cause.
    """
    known = {pid, os.getpid(), *server_pids(pid)}
    counts = connections(pipe_directory)
    strangers: list[int] = []
    for other in counts:
        if other not in known and program_name(other) != PROGRAM:
            strangers.append(other)
    if sum(counts.values()) > _QUEUE:
        strangers.sort(key=lambda stranger: -counts[stranger])
        connected = [f"{describe_process(pid)} has {counts[pid]} connections" for pid in strangers[:5]]
        return f"its queue is full, so no other process can connect: {', '.join(connected)}"
    for stranger in strangers:
        if is_stopped(stranger):
            process = describe_process(stranger)
            return f"{process} is connected to it and was stopped, which blocks all other processes"
    if strangers:
        processes = " or ".join(map(describe_process, strangers[:5]))
        return f"{processes} is connected to it but sends nothing, which blocks all other processes"
    return ""


def connections(*pipe_directories: str) -> dict[int, int]:
    """Return the number of connections to these control daemons of each process, by PID, accepted or not.

    Raises OSError if the kernel does not support the query.
    """
    paths: list[str] = []
    for directory in pipe_directories:
        # The second is where root's front-ends connect (measured).
        paths += (f"{directory}/control", f"{directory}/control_privileged")
    return socket_holders(connected_inodes(paths))
