"""The processes of a run: control daemons, and which processes to end after the run.

A process belongs to the run if it descends from it, or if its environment names the run's directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
import socket
import struct
import subprocess
import time
from typing import NamedTuple

from gpu_check.values import StepContext, StepError, seconds

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Reap children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Stat(NamedTuple):
    """A process that exists."""

    parent: int
    state: str
    uid: int


def stat_of(pid: int) -> Stat | None:
    """Return its entry in /proc; None if it has ended or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().decode(errors="replace").rpartition(")")[2].split()
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    return None if words[0] in "ZX" else Stat(int(words[1]), words[0], uid)


def name_of(pid: int) -> str:
    """Return the name of the process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def all_pids() -> list[int]:
    """Every process that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def of_run(directory: str) -> list[int]:
    """The running processes of the run, except this process and its parents; `directory` is the run's."""
    parents = {pid: stat.parent for pid in all_pids() if (stat := stat_of(pid))}
    above = {os.getpid()}
    pid = os.getpid()
    while (pid := parents.get(pid, 0)) > 0:
        above.add(pid)
    return [
        pid
        for pid in parents
        if pid not in above and (_descends(pid, os.getpid(), parents) or names(pid, directory))
    ]


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    for _ in range(100):
        pid = parents.get(pid, 0)
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
    return False


def names(pid: int, directory: str) -> bool:
    """Whether the process was started with an environment that names the directory."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return directory.encode() in file.read()
    except OSError:
        return False


def end_all(directory: str, patience_s: float = 6.0) -> list[str]:
    """End the remaining processes of the run; returns a line for each."""
    left = of_run(directory)
    said = [f"{name_of(pid)} (PID {pid}) was still running and was ended" for pid in left]
    for number, share in ((signal.SIGCONT, 0.0), (signal.SIGTERM, 0.3), (signal.SIGKILL, 0.7)):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        end_s = time.monotonic() + share * patience_s
        while left and time.monotonic() < end_s:
            reap()
            left = of_run(directory)
            time.sleep(0.02)  # a poll: most are not our children, and cannot be waited for
    return said + [f"{name_of(pid)} (PID {pid}) did not end after SIGKILL" for pid in left]


_CREDENTIALS = struct.Struct("3i")
_LOG_BYTES = 40_000

# Each command of a front-end adds four such lines.
_CHATTER = ("Accepting connection...", "NEW UI", "UI closed")


class Answer(NamedTuple):
    """The control daemon's answer to one command; `status` is None if there was none in time."""

    command: str
    text: str
    status: int | None
    seconds: float

    def words(self) -> str:
        """The answer as a user would see it."""
        if self.status is None:
            return f"{self.text}(no answer within {seconds(self.seconds)})"
        return self.text.strip() or "(nothing)"


class Control:
    """One control daemon; a context manager that ends it and its servers."""

    def __init__(self, context: StepContext, *, pipe: str = "", log: str = "") -> None:
        """Prepare its directories: new ones unless they are given."""
        self._context = context
        host = context.host
        self.servers: set[int] = set()
        self.pipe, self.log = pipe or context.fresh("p"), log or context.fresh("l")
        os.makedirs(self.pipe, exist_ok=True)
        os.chmod(self.pipe, 0o755)
        os.makedirs(self.log, exist_ok=True)
        os.chmod(self.log, 0o1777)
        self.output = context.fresh("o")
        places = [os.path.dirname(host.server), os.path.dirname(host.control), host.environment["PATH"]]
        self._environment = {
            **host.environment,
            "PATH": os.pathsep.join(places),
            "CUDA_MPS_PIPE_DIRECTORY": self.pipe,
            "CUDA_MPS_LOG_DIRECTORY": self.log,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, timeout_s: float = 10.0) -> Control:
        """Start it in the foreground and wait until it listens on its socket; raises StepError."""
        start_s = time.monotonic()
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [self._context.host.control, "-f", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )
        while listener(self.pipe) != self.process.pid:
            if self.process.poll() is not None:
                raise StepError(
                    f"the control daemon exited with status {self.process.returncode}: {self._last_words()}"
                )
            if time.monotonic() > start_s + timeout_s:
                raise StepError(f"the control daemon was not listening after {seconds(timeout_s)}")
            time.sleep(0.001)  # a poll: nothing tells that its socket listens
        self.start_seconds = time.monotonic() - start_s
        return self

    @property
    def pid(self) -> int:
        """Its PID; raises StepError if it has not been started."""
        if self.process is None:
            raise StepError("the control daemon was not started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ask(self, command: str, timeout_s: float = 5.0) -> Answer:
        """Send one command through NVIDIA's front-end, which exits with 0 whatever the answer is."""
        start_s = time.monotonic()
        with subprocess.Popen(
            [self._context.host.control],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
        ) as front_end:
            try:
                output, _ = front_end.communicate(command.encode() + b"\n", timeout=timeout_s)
                status: int | None = front_end.returncode
            except subprocess.TimeoutExpired:
                front_end.kill()
                output, _ = front_end.communicate()
                status = None
        text = output.decode(errors="replace")
        return Answer(command, text, status, round(time.monotonic() - start_s, 4))

    def server_pids(self) -> list[int]:
        """The servers that it lists; all of them are ended with it."""
        words = self.ask("get_server_list").text.split()
        found = [int(word) for word in words if word.isdigit()]
        self.servers.update(found)
        return found

    def the_server(self) -> int:
        """The PID of its server; raises StepError if there is none."""
        found = self.server_pids()
        if not found:
            raise StepError(f"no MPS server is running, although a client is ready: {self._last_words()}")
        return found[0]

    def successor(self) -> Control:
        """Return another control daemon with the same directories, not yet started."""
        other = Control(self._context, pipe=self.pipe, log=self.log)
        other.servers |= self.servers
        return other

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.process is not None:
            self.process.send_signal(number)

    def logs(self, lines: int = 200) -> str:
        """The last lines of its output and of each log file, without those that our commands caused."""
        files = [self.output, *sorted(glob.glob(f"{self.log}/*"))]
        parts = []
        for path in files:
            told = [line for line in _tail(path).splitlines() if not line.endswith(_CHATTER)]
            text = "\n".join(told[-lines:])
            name = "control daemon's output" if path == self.output else os.path.basename(path)
            parts.append(f"--- {name}\n{text}")
        return "\n".join(parts)

    def log_lines(self, *words: str) -> list[str]:
        """The lines of all logs that contain one of the words, ignoring case."""
        return [
            line for line in self.logs().splitlines() if any(word.lower() in line.lower() for word in words)
        ]

    def _last_words(self) -> str:
        return " / ".join(_tail(self.output).strip().splitlines()[-3:]) or "no output"

    def end(self) -> None:
        """End it with quit, SIGTERM or SIGKILL, then the servers that outlive it."""
        if self.alive:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(StepError):
                self.server_pids()
            self.ask("quit -t 1", timeout_s=4)
            self._wait(1.0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.alive:
                self.signal(number)
                self._wait(2.0)
        end_servers({pid for pid in self.servers if names(pid, self.pipe)})

    def _wait(self, timeout_s: float) -> None:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)

    def __enter__(self) -> Control:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def listener(pipe: str) -> int:
    """The PID that listens on the socket in a pipe directory, according to the kernel; 0 if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0.5)
        try:
            connection.connect(f"{pipe}/control")
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0
    return int(_CREDENTIALS.unpack(raw)[0])


def end_servers(pids: set[int], patience_s: float = 3.0) -> None:
    """End servers that are still running."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in pids if stat_of(pid)]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        end_s = time.monotonic() + patience_s
        while any(stat_of(pid) for pid in left) and time.monotonic() < end_s:
            time.sleep(0.01)  # a poll: they are not our children, and cannot be waited for


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
