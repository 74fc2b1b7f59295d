"""Processes: only this module spawns, signals, watches and reaps them.

It uses `posix_spawn` instead of `subprocess`, which costs ten times as much at the daemon's start; redirected
descriptors are all that is needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from yunion_mps.core import reasons
from yunion_mps.core.errors import HostError, ShortageError
from yunion_mps.host.proc import parent_of

#: Directories of NVIDIA's programs that may be missing from PATH: driver mounts in containers, Debian's
#: versioned directories.
PROGRAM_DIRECTORIES = (
    "/usr/bin",
    "/usr/local/bin",
    "/usr/local/nvidia/bin",
    "/usr/lib/nvidia/current",
    "/run/nvidia/driver/usr/bin",
    "/opt/nvidia/bin",
)


def find_program(name: str, hint: str, besides: Sequence[str] = PROGRAM_DIRECTORIES) -> str:
    """Return the path of the program on PATH or where drivers install it.

    Raises HostError with the `hint` if it is missing.
    """
    directories = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part.startswith("/")]
    for directory in (*directories, *besides):
        path = os.path.join(directory, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise HostError(f"{name} is not installed", hint, reasons.PROGRAM_MISSING)


class Process:
    """A process held by a pidfd (pidfd_open(2)), so that no signal can reach a later one with the same PID.

    child: whether it is ours, so that its exit status can be read.
    """

    def __init__(self, pid: int, *, child: bool) -> None:
        self.pid = pid
        self.is_child = child
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    @classmethod
    def adopt(cls, pid: int) -> Process | None:
        """Watch a running process; return None if it is gone.

        It can be our child: one started by the program that this process executed before the current one.

        Raises ShortageError if it cannot be watched.
        """
        try:
            return cls(pid, child=parent_of(pid) == os.getpid())
        except ProcessLookupError:
            return None
        except OSError as error:
            raise ShortageError(f"PID {pid} cannot be watched: {error.strerror}") from None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""
        return self._pidfd

    def status(self) -> int | None:
        """Return None while it runs, then its exit status: negative for a signal, -1000 if not our child."""
        if self._status is None and readable(self._pidfd):
            self._status = -1000
            if self.is_child:
                with contextlib.suppress(ChildProcessError):  # it was reaped elsewhere
                    _, raw = os.waitpid(self.pid, os.WNOHANG)
                    self._status = os.waitstatus_to_exitcode(raw)
        return self._status

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Kill and reap our child, and close the descriptor."""
        if self.status() is None:
            self.signal(signal.SIGKILL)
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
            self.status()
        self.close()

    def close(self) -> None:
        """Close the descriptor; the process continues."""
        os.close(self._pidfd)


def readable(descriptor: int, timeout_s: float | None = 0.0) -> bool:
    """Return whether the descriptor is readable within `timeout_s`; None waits without end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def describe_exit(status: int) -> str:
    """Return `exited with status 1` or `was killed by signal 9`, for a status of `Process`."""
    if status == -1000:
        return "ended"
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"


def spawn(
    argv: Sequence[str], environment: Mapping[str, str], *, stdin: int | None, stdout: int, stderr: int
) -> Process:
    """Start a program in its own session, with exactly this environment and these descriptors.

    In its own session it does not get the terminal's Ctrl-C.

    stdin: None lets it read /dev/null.

    Raises HostError if it cannot be started.
    """
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    if stdin is None:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    else:
        actions.append((os.POSIX_SPAWN_DUP2, stdin, 0))
    actions.append((os.POSIX_SPAWN_DUP2, stdout, 1))
    actions.append((os.POSIX_SPAWN_DUP2, stderr, 2))
    try:
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            environment,
            file_actions=actions,
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )
    except OSError as error:
        message = f"{argv[0]} cannot be started: {error.strerror}"
        if error.errno in (errno.ENOENT, errno.ENOEXEC, errno.EACCES):
            raise HostError(message, "reinstall it") from None
        raise ShortageError(message) from None
    try:
        return Process(pid, child=True)
    except OSError as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise ShortageError(f"{argv[0]} cannot be watched: {error.strerror}") from None


def refuse_if_no_file_can_be_opened(message: str) -> None:
    """Raise ShortageError, which begins with `message`, if no descriptor is left."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise ShortageError(f"{message}: {error.strerror}") from None


def refuse_if_no_process_can_start() -> None:
    """Raise ShortageError if the kernel does not allow another process now."""
    with open(os.devnull, "r+b") as null:
        spawn(["/bin/sh", "-c", ":"], {}, stdin=None, stdout=null.fileno(), stderr=null.fileno()).kill()


def output_of(argv: Sequence[str], timeout_s: float | None = None) -> str:
    """Return a program's standard output; "" if it fails or takes longer than `timeout_s`."""
    try:
        status, output = outcome_of(argv, timeout_s)
    except HostError:
        return ""
    return output.decode(errors="replace").strip() if status == 0 else ""


def outcome_of(
    argv: Sequence[str],
    timeout_s: float | None = None,
    *,
    with_stderr: bool = False,
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, bytes]:
    """Run a program; return its exit status (None if it takes longer than `timeout_s`) and its output.

    It inherits this process's environment unless one is given. An interruption of this function kills it,
    because Ctrl-C does not reach it in its own session. Raises HostError as `spawn` does.
    """
    output, answer_in = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `process` can be killed
    try:
        with open(os.devnull, "r+b") as null:
            stderr = answer_in if with_stderr else null.fileno()
            process = spawn(
                argv,
                os.environ if environment is None else environment,
                stdin=None,
                stdout=answer_in,
                stderr=stderr,
            )
    except BaseException:
        os.close(output)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    finally:
        os.close(answer_in)
    try:
        with open(output, "rb", buffering=0) as file:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            answer = _read_all(file.fileno(), timeout_s)
        if answer is not None:  # it has closed its output and is about to end
            readable(process.fileno(), timeout_s)
        status = process.status()
    finally:
        process.kill()
    return (None, b"") if answer is None else (status, answer)


def _read_all(descriptor: int, timeout_s: float | None) -> bytes | None:
    """Read until end of file; None if that takes longer than `timeout_s`."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    output = b""
    while readable(descriptor, _left_s(end_s)):
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return output
        output += piece
    return None


def _left_s(end_s: float | None) -> float | None:
    """Return the time until `end_s`, 0 if that has passed; None without an end."""
    return None if end_s is None else max(0.0, end_s - time.monotonic())


def reap_inherited_children() -> None:
    """Reap the ended children of the program that this process executed before the current one."""
    with contextlib.suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass


def wake(pids: Iterable[int]) -> None:
    """Resume processes that were stopped by a signal."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


class Watchable(Protocol):
    """Something with a descriptor, such as a process, that becomes readable when there is something to do."""

    def fileno(self) -> int: ...


class Tickable(Protocol):
    """A state machine that never blocks."""

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float | None:
        """Do what is due; return when the next call is due at the latest.

        `readable` are those of `watched()` that have become readable, None if that is unknown.
        """

    def watched(self) -> list[Watchable]:
        """Return what to watch for reading; it may change with every tick."""


def earliest(times_s: Iterable[float | None]) -> float | None:
    """Return the first of these times; None if there is none."""
    return min((time_s for time_s in times_s if time_s is not None), default=None)


class Wakeup(Watchable, Protocol):
    """A descriptor that interrupts a wait, for example for a signal."""

    def clear(self) -> None: ...


def drive(driven: Tickable, is_done: Callable[[], bool], wakeup: Wakeup | None = None) -> None:
    """Tick until `is_done`; used before asyncio is loaded, and by programs that do without it."""
    readable: set[Watchable] | None = None
    while True:
        if wakeup:
            wakeup.clear()
        due_s = driven.tick(time.monotonic(), readable)
        if is_done():
            return
        watched = {watchable.fileno(): watchable for watchable in driven.watched()}
        if wakeup:
            watched[wakeup.fileno()] = wakeup
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        left_s = _left_s(due_s)
        events = poll.poll(None if left_s is None else left_s * 1000)
        readable = {watched[descriptor] for descriptor, _ in events}
