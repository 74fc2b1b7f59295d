"""A control daemon of our own, in fresh directories: started, asked, looked at and ended."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import socket
import struct
import subprocess
import time
from typing import NamedTuple

from gpu_check.processes import names, stat_of
from gpu_check.values import Surroundings, Trouble, seconds

_CREDENTIALS = struct.Struct("3i")
_LOG_BYTES = 40_000

# Four such lines come with every command of a front-end.
_CHATTER = ("Accepting connection...", "NEW UI", "UI closed")


class Answer(NamedTuple):
    """What the control daemon said to one command; `status` is None where it did not answer in time."""

    command: str
    text: str
    status: int | None
    seconds: float

    def words(self) -> str:
        """The answer as a person would see it."""
        if self.status is None:
            return f"{self.text}(no answer within {seconds(self.seconds)})"
        return self.text.strip() or "(nothing)"


class Control:
    """One control daemon; a context manager that ends it and the servers that it had."""

    def __init__(self, around: Surroundings, *, pipe: str = "", log: str = "") -> None:
        """Prepare its directories, each of its own unless it is given."""
        self._around = around
        host = around.host
        self.servers: set[int] = set()
        self.pipe, self.log = pipe or around.fresh("p"), log or around.fresh("l")
        os.makedirs(self.pipe, exist_ok=True)
        os.chmod(self.pipe, 0o755)
        os.makedirs(self.log, exist_ok=True)
        os.chmod(self.log, 0o1777)
        self.output = around.fresh("o")
        places = [os.path.dirname(host.server), os.path.dirname(host.control), host.environment["PATH"]]
        self._environment = {
            **host.environment,
            "PATH": os.pathsep.join(places),
            "CUDA_MPS_PIPE_DIRECTORY": self.pipe,
            "CUDA_MPS_LOG_DIRECTORY": self.log,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, timeout_s: float = 10.0) -> Control:
        """Start it in the foreground and wait until it is the one that listens; raises Trouble."""
        start_s = time.monotonic()
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [self._around.host.control, "-f", *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )
        while listener(self.pipe) != self.process.pid:
            if self.process.poll() is not None:
                raise Trouble(
                    f"the control daemon ended with {self.process.returncode}: {self._last_words()}"
                )
            if time.monotonic() > start_s + timeout_s:
                raise Trouble(f"the control daemon does not listen after {seconds(timeout_s)}")
            time.sleep(0.001)
        self.start_seconds = time.monotonic() - start_s
        return self

    @property
    def pid(self) -> int:
        """Its PID; raises Trouble before it was started."""
        if self.process is None:
            raise Trouble("the control daemon was not started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def ask(self, command: str, timeout_s: float = 5.0) -> Answer:
        """One command through NVIDIA's front-end, which exits 0 whatever the answer."""
        start_s = time.monotonic()
        with subprocess.Popen(
            [self._around.host.control],
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
        """The servers that it lists now; all of them are ended with it."""
        words = self.ask("get_server_list").text.split()
        found = [int(word) for word in words if word.isdigit()]
        self.servers.update(found)
        return found

    def the_server(self) -> int:
        """The one server that clients have; raises Trouble where there is none."""
        found = self.server_pids()
        if not found:
            raise Trouble(f"there is no MPS server with a client ready: {self._last_words()}")
        return found[0]

    def successor(self) -> Control:
        """Another one on the same directories; not started yet."""
        other = Control(self._around, pipe=self.pipe, log=self.log)
        other.servers |= self.servers
        return other

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.process is not None:
            self.process.send_signal(number)

    def logs(self, lines: int = 200) -> str:
        """The last lines of its output and of every log file, each under its name; not of our questions."""
        files = [self.output, *sorted(glob.glob(f"{self.log}/*"))]
        parts = []
        for path in files:
            told = [line for line in _tail(path).splitlines() if not line.endswith(_CHATTER)]
            text = "\n".join(told[-lines:])
            name = "control daemon's output" if path == self.output else os.path.basename(path)
            parts.append(f"--- {name}\n{text}")
        return "\n".join(parts)

    def log_lines(self, *words: str) -> list[str]:
        """The lines of all logs that hold one of the words, in any case."""
        return [
            line for line in self.logs().splitlines() if any(word.lower() in line.lower() for word in words)
        ]

    def _last_words(self) -> str:
        return " / ".join(_tail(self.output).strip().splitlines()[-3:]) or "it said nothing"

    def end(self) -> None:
        """End it, then the servers that outlive it: first asked to, then told, then killed."""
        if self.alive:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(Trouble):
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
    """The PID behind the socket in a pipe directory, by the kernel's word; 0 where nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0.5)
        try:
            connection.connect(f"{pipe}/control")
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0
    return int(_CREDENTIALS.unpack(raw)[0])


def end_servers(pids: set[int], patience_s: float = 3.0) -> None:
    """End servers that are still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in pids if stat_of(pid)]
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        end_s = time.monotonic() + patience_s
        while any(stat_of(pid) for pid in left) and time.monotonic() < end_s:
            time.sleep(0.01)


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
