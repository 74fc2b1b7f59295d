"""`yunion-mps run --safe-stop`: remain as the parent of COMMAND, and stop it without harming other jobs.

The parent passes signals on. After SIGTERM and the grace period, it kills COMMAND and what that has started.
Before it sends a signal, it has the daemon disconnect the MPS clients that would die of it from their server.

COMMAND stays in our process group, so the shell's job control and the terminal's signals work as without us,
and it holds its own lease, so it continues if we are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

from yunion_mps.cli.calls import call_daemon, shares_pid_namespace
from yunion_mps.core.enums import NO_SIGNAL
from yunion_mps.core.errors import (
    BusyError,
    HostError,
    NotAllowedError,
    NotFoundError,
    ShortageError,
    UnreachableError,
    YunionError,
)
from yunion_mps.core.text import printable
from yunion_mps.host.proc import all_pids, descendants_of, dies_of, job_unit_of
from yunion_mps.host.processes import find_program, output_of
from yunion_mps.http.operations import GET_CLIENTS, TERMINATE_CLIENT, TERMINATE_LEASE

#: How long the daemon has to disconnect the clients, and how soon it is asked again if it restarts.
_DAEMON_S = 5.0
_RETRY_S = 0.2
#: How long a notice may take.
_NOTICE_S = 1.0
#: How soon to kill processes that were started meanwhile, and when to give up on those that cannot be killed.
_KILL_AGAIN_S = 1.0
_GIVE_UP_S = 30.0
#: How long an engine has to end after its container.
_ENGINE_S = 10.0
#: How long the processes of a job unit have after SIGTERM, as in yunion-mps-job@.service, and how often they
#: are polled.
_UNIT_GRACE_S = 30
_POLL_S = 0.1

#: What messages call the command.
_COMMAND = "COMMAND"
#: The exit status of a shell for a command that was killed.
_KILLED = 128 + signal.SIGKILL

#: Signals that are not passed on: no process can catch them, or our own actions cause them.
_OWN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU}
#: Signals that terminate no process by default (signal(7)).
_HARMLESS = {signal.SIGWINCH, signal.SIGURG, signal.SIGTSTP, signal.SIGCONT}
_WATCHED = {*(signal.valid_signals() - _OWN), signal.SIGCHLD}
#: The code of a signal from the kernel, such as Ctrl-C, which COMMAND gets as well (sigaction(2)).
_SI_KERNEL = 0x80
#: prctl(2): orphaned descendants become our children.
_PR_SET_CHILD_SUBREAPER = 36


def remain_as_parent(grace_s: int, engine: str) -> Callable[[str], None]:
    """Fork; returns in the child, which is to become COMMAND. The parent raises click's Exit at the end.

    `engine` is the container engine that COMMAND is, or empty. The child reports its lease with the returned
    function. Raises HostError in another PID namespace than the daemon's.
    """
    with contextlib.suppress(UnreachableError, NotAllowedError, BusyError):  # COMMAND may need no daemon
        if not engine:
            _refuse_other_pid_namespace(_DAEMON_S)
    reader, writer = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        child = os.fork()
    except OSError as error:
        raise ShortageError(f"no process can be started: {error.strerror}") from None
    if not child:
        os.close(reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return partial(_report_lease, writer)
    os.close(writer)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not engine:  # an engine's containers must not become our children
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(os.devnull, "r+b") as nothing:  # so that a pipe ends once COMMAND has closed it
        for descriptor in (0, 1):
            os.dup2(nothing.fileno(), descriptor)
    raise click.exceptions.Exit(_Parent(child, grace_s, engine, reader).wait())


def _refuse_other_pid_namespace(timeout_s: float) -> None:
    """Raise HostError if the daemon's PIDs are not ours: they would name other processes."""
    if not shares_pid_namespace(timeout_s):
        message = "--safe-stop: the daemon is in another PID namespace, so COMMAND's clients are unknown here"
        raise HostError(message, "use the host's PID namespace (podman run --pid=host), or omit --safe-stop")


def _report_lease(writer: int, lease_id: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent was killed
        os.write(writer, lease_id.encode())


class _Parent:
    def __init__(self, child: int, grace_s: int, engine: str, lease_ids: int) -> None:
        self._child = child
        self._grace_s = grace_s
        self._engine = engine
        self._lease_ids = lease_ids
        self._status: int | None = None
        self._due_s: float | None = None  # when to kill
        self._killed_s: float | None = None  # when that was first done
        self._is_stopping = False
        self._has_handled_exit = False  # of COMMAND
        self._is_alone = False  # without the daemon
        self._is_unread = False  # standard error
        self._undisconnected: set[str] = set()  # those of which this was told

    def wait(self) -> int:
        """Wait for the end of COMMAND and, during a stop, of its descendants; return the exit status."""
        while self._status is None or (self._is_stopping and self._descendants()):
            left_s = None if self._due_s is None else self._due_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                if self._killed_s and time.monotonic() > self._killed_s + _GIVE_UP_S:
                    self._notify("some processes cannot be killed and are still running")
                    break
                self._kill()
            else:
                self._await_change(left_s)
        return _KILLED if self._status is None else self._status

    def _await_change(self, timeout_s: float | None) -> None:
        """Handle the next signal, if there is one within `timeout_s`."""
        if received := _next_signal(timeout_s):
            self._handle(received)

    def _handle(self, received: signal.struct_siginfo) -> None:
        number = received.si_signo
        if number == signal.SIGCHLD:
            self._reap()
            return
        # COMMAND gets the terminal's signals itself, and what its own processes send us is not for it.
        is_for_us = received.si_code != _SI_KERNEL and received.si_pid not in self._descendants()
        if is_for_us and number == signal.SIGTERM:
            self._begin_stop()
        if is_for_us and self._status is None:
            self._send(number, [self._child])
        if number == signal.SIGTSTP:  # COMMAND stops too: the shell's job control expects both
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def _begin_stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._due_s = time.monotonic() + self._grace_s

    def _reap(self) -> None:
        """Reap COMMAND and orphans that have ended.

        What outlives COMMAND gets SIGTERM during a stop and in a job unit, where systemd would kill it.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, raw = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid == self._child:
                    status = os.waitstatus_to_exitcode(raw)
                    self._status = status if status >= 0 else 128 - status
        if self._status is not None and not self._has_handled_exit:
            self._has_handled_exit = True
            if job_unit_of(os.getpid()):
                self._begin_stop()
            if self._is_stopping:
                self._send(signal.SIGTERM, self._descendants())

    def _descendants(self) -> list[int]:
        """COMMAND and the processes that it has started; of an engine, only itself."""
        command = [self._child] if self._status is None else []
        with contextlib.suppress(ShortageError):
            if not self._engine:
                # One whose parent ends meanwhile may be listed twice.
                return list(dict.fromkeys([*command, *descendants_of(os.getpid())]))
        return command

    def _kill(self) -> None:
        """Kill all processes; an engine is killed only if it has no container that it could end with."""
        self._due_s = time.monotonic() + _KILL_AGAIN_S
        if self._killed_s is None:
            self._killed_s = time.monotonic()
            self._is_alone = False  # the daemon may be back
            if self._engine and (lease_id := self._lease_id()):
                self._try(_COMMAND, partial(_disconnect_container, lease_id))
                if self._kill_container(lease_id):
                    self._due_s = time.monotonic() + _ENGINE_S
                    return
        self._send(signal.SIGKILL, self._descendants())

    def _send(self, number: int, pids: Sequence[int]) -> None:
        """Send a signal; the MPS clients that would die of it are disconnected from their server first."""
        dying = [] if number in _HARMLESS else [pid for pid in pids if dies_of(pid, number)]
        if dying and not self._engine:
            self._try(_COMMAND, partial(self._disconnect, set(dying)))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, or another user's
                os.kill(pid, number)

    def _try(self, process: str, disconnect: Callable[[float], object]) -> None:
        """Call `disconnect` with a timeout; if the daemon does not answer by then, go on without it."""
        end_s = time.monotonic() + _DAEMON_S
        while not self._is_alone:
            try:
                with contextlib.suppress(NotFoundError):  # it has ended
                    disconnect(max(0.1, end_s - time.monotonic()))
            except YunionError as error:
                is_silent = isinstance(error, (UnreachableError, BusyError))
                if is_silent and time.monotonic() + _RETRY_S < end_s:
                    time.sleep(_RETRY_S)
                    continue
                self._is_alone = is_silent
                self._tell_undisconnected(process, error)
            return

    def _tell_undisconnected(self, process: str, error: YunionError) -> None:
        """Tell it once of each process, or once of COMMAND as a whole: each signal asks the daemon again."""
        if process in self._undisconnected or _COMMAND in self._undisconnected:
            return
        if process == _COMMAND and self._undisconnected:
            return
        self._undisconnected.add(process)
        self._notify(f"{process} was not disconnected from MPS before its signal: {error.message}")

    def _disconnect(self, pids: set[int], timeout_s: float) -> None:
        """Disconnect the clients among the processes, each of which is then removed from `pids`."""
        _refuse_other_pid_namespace(timeout_s)
        listed = call_daemon(GET_CLIENTS, timeout_s)
        for pid in [client["pid"] for client in listed["clients"] if client["server"]]:
            if pid in pids:
                pids.remove(pid)
                self._try(f"PID {pid}", partial(call_daemon, TERMINATE_CLIENT, pid=pid, signals=NO_SIGNAL))
        if listed["errors"]:
            raise UnreachableError(f"not all clients are known: {listed['errors'][0]}")

    def _notify(self, text: str) -> None:
        """Print a notice; once one takes too long, none is printed. Standard error may be a full pipe."""
        if sys.stderr is None or self._is_unread:
            return
        # Not print, because Python aborts at its end if a thread still uses the stream.
        line = f"yunion-mps: {printable(text)}\n".encode()
        thread = threading.Thread(target=_write, args=(sys.stderr.fileno(), line), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of processes is reached; killing matters more than the notice
            return
        thread.join(_NOTICE_S)
        self._is_unread = thread.is_alive()

    def _lease_id(self) -> str:
        """Return the id of the container's lease; empty if there is none yet."""
        os.set_blocking(self._lease_ids, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self._lease_ids, 1 << 16).decode() if self._engine else ""
        return ""

    def _kill_container(self, lease_id: str) -> bool:
        """Have the engine kill the lease's container; returns whether there is one."""
        from yunion_mps.cli.engines import ENGINE_TIMEOUT_S, container_of  # 6 ms, for containers only

        with contextlib.suppress(HostError):
            program = find_program(self._engine, "", besides=())
            if container := container_of(program, lease_id):
                output_of([program, "kill", container], ENGINE_TIMEOUT_S)
                return True
        return False


class _JobUnit(_Parent):
    """Stops the processes of our job unit, whose `run` was killed, as that would have done."""

    def __init__(self, grace_s: int) -> None:
        super().__init__(0, grace_s, "", -1)
        self._status = _KILLED
        self._unit = job_unit_of(os.getpid())
        self._notify("run was killed: stopping the other processes of the unit")
        self._begin_stop()
        self._send(signal.SIGTERM, self._descendants())

    def _descendants(self) -> list[int]:
        if not self._unit:
            return []
        others = [pid for pid in all_pids() if pid != os.getpid()]
        return [pid for pid in others if job_unit_of(pid) == self._unit]

    def _await_change(self, timeout_s: float | None) -> None:
        del timeout_s  # they are not our children, whose ends are signalled
        time.sleep(_POLL_S)


@click.command("stop-job-unit", hidden=True)
def stop_job_unit() -> None:
    """Stop the processes of this job unit safely if its main process was killed.

    ExecStop= of yunion-mps-job@.service calls this command. systemd says in EXIT_STATUS how the main process
    ended. If it was killed, the exit status is 137, so that the unit fails.

    \b
    Examples:
      yunion-mps stop-job-unit
    """
    if os.environ.get("EXIT_STATUS") == "KILL":
        raise click.exceptions.Exit(_JobUnit(_UNIT_GRACE_S).wait())


def _write(descriptor: int, line: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, line)


def _next_signal(timeout_s: float | None) -> signal.struct_siginfo | None:
    if timeout_s is None:
        return signal.sigwaitinfo(_WATCHED)
    return signal.sigtimedwait(_WATCHED, timeout_s)


def _disconnect_container(lease_id: str, timeout_s: float) -> None:
    call_daemon(TERMINATE_LEASE, timeout_s, lease=lease_id, signals=NO_SIGNAL)
