"""The processes of a run: clients, control daemons, and the end of all of them."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_check.host import Host, has_module

_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")
#: Each command of a front-end adds four such lines to the log.
_CHATTER = ("Accepting connection...", "NEW UI", "UI closed")
#: A client whose kernels take a millisecond stands still if it has told nothing for this long.
_STILL_S = 2.0

Event = dict[str, Any]


class QuestionError(Exception):
    """A question cannot be answered further; the text says why."""


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether the condition came true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.005)  # a poll: what is waited for is in files and in processes of others
    return True


def duration(value_s: float) -> str:
    """Format a duration, below one second in milliseconds."""
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"


class Client:
    """One process that uses CUDA; its events go to a file, so that nothing has to read them meanwhile."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], files: str) -> None:
        """Start it; `files` is the beginning of the paths of its files."""
        self.name = name
        self.started_s = time.monotonic()
        self._events_file = f"{files}.events"
        self._errors_file = f"{files}.errors"
        with open(self._events_file, "wb") as events, open(self._errors_file, "wb") as errors:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=events, stderr=errors, env=environment, bufsize=0
            )
        assert self.process.stdin is not None
        self.input = self.process.stdin
        self.pid = self.process.pid

    def events(self, *kinds: str) -> list[Event]:
        """Return its events of these kinds so far."""
        with open(self._events_file, encoding="utf-8") as file:
            lines = file.readlines()
        events = []
        for line in lines:
            with contextlib.suppress(ValueError):  # it is just being written
                event = json.loads(line)
                if event["event"] in kinds:
                    events.append(event)
        return events

    def wait_event(self, kind: str, timeout_s: float = 30.0) -> Event:
        """Return its first event of this kind; raises QuestionError if it does not come."""
        wait_for(lambda: bool(self.events(kind, "error")) or self.process.poll() is not None, timeout_s)
        found = self.events(kind)
        if found:
            return found[0]
        raise QuestionError(f"{self.name} was not {kind}: {self.complaint()}")

    def complaint(self) -> str:
        """Return why it has not done what it should: its error, or how it ended, or that it hangs."""
        errors = self.events("error")
        if errors:
            return f"{errors[0]['name']} ({errors[0]['code']}) from {errors[0]['call']}"
        with open(self._errors_file, encoding="utf-8", errors="replace") as file:
            lines = file.read().strip().splitlines()
        words = f" ({lines[-1]})" if lines else ""
        status = self.process.poll()
        if status is not None:
            return f"it exited with status {status}{words}"
        return f"nothing was heard of it for {duration(time.monotonic() - self.started_s)}{words}"

    def describe_start(self, timeout_s: float) -> str:
        """Wait until it has run a kernel or has failed, and say so."""
        wait_for(lambda: bool(self.events("ready")) or self.is_over(), timeout_s)
        ready = self.events("ready")
        if not ready:
            return f"{self.name} did not run a kernel: {self.complaint()}"
        where = {0: "OUTSIDE MPS, without a limit", 1: "under MPS"}
        mps = where.get(ready[0]["mps"], "and CUDA does not say whether under MPS")
        took = duration(ready[0]["t"] - self.started_s)
        return f"{self.name} ran a kernel after {took} ({duration(ready[0]['cuda_s'])} in CUDA), {mps}"

    def tell(self) -> None:
        """Tell it to go on, as its mode understands it."""
        with contextlib.suppress(OSError):
            self.input.write(b"\n")

    def is_over(self) -> bool:
        """Return whether it has failed or ended."""
        return self.process.poll() is not None or bool(self.events("error"))

    def fate(self, since_s: float) -> str:
        """Say what it has done since `since_s` (monotonic seconds)."""
        errors = self.events("error")
        if errors:
            return f"{self.name} got {self.complaint()} {duration(errors[0]['t'] - since_s)} later"
        status = self.process.poll()
        if status is not None:
            return f"{self.name} exited with status {status} and reported no error"
        beats = self.events("beat")
        last_s = beats[-1]["t"] if beats else self.started_s
        silent_s = time.monotonic() - last_s
        if silent_s > _STILL_S:
            return f"{self.name} has stood still for {duration(silent_s)}"
        launches = 0
        longest_s = silent_s
        for beat in beats:
            if beat["t"] <= since_s:
                launches = beat["launches"]
            else:
                longest_s = max(longest_s, beat["longest_s"])
        more = beats[-1]["launches"] - launches
        return f"{self.name} continued ({more} launches, longest pause {duration(longest_s)})"

    def close(self) -> None:
        """Let it end, and end it if it does not."""
        self.input.close()
        if not wait_for(lambda: self.process.poll() is not None, 3.0):
            self.process.kill()
            wait_for(lambda: self.process.poll() is not None, 3.0)


class Control:
    """One of NVIDIA's control daemons, in directories of its own."""

    def __init__(self, host: Host, directory: str) -> None:
        self.pipe = f"{directory}/pipe"
        self._log = f"{directory}/log"
        self._program = host.control
        os.makedirs(self.pipe)
        os.makedirs(self._log)
        self._environment = dict(host.environment)
        self._environment["CUDA_MPS_PIPE_DIRECTORY"] = self.pipe
        self._environment["CUDA_MPS_LOG_DIRECTORY"] = self._log

    def start(self) -> float:
        """Start it, or its successor, and return after how many seconds it listens; raises QuestionError."""
        begun_s = time.monotonic()
        with open(f"{self._log}/output", "ab") as output:
            self._process = subprocess.Popen(
                [self._program, "-f"], stdout=output, stderr=output, env=self._environment
            )
        self.pid = self._process.pid
        wait_for(lambda: listener(self.pipe) == self.pid or self.state() != "runs", 10.0)
        if listener(self.pipe) != self.pid:
            raise QuestionError(f"the control daemon {self.state()} and does not listen: {self.logs(3)}")
        return time.monotonic() - begun_s

    def state(self) -> str:
        """Say whether it runs."""
        status = self._process.poll()
        return "runs" if status is None else f"has exited with status {status}"

    def ask(self, command: str, timeout_s: float = 5.0) -> str:
        """Return what NVIDIA's front-end prints for a command, without spaces around."""
        try:
            result = subprocess.run(
                [self._program],
                input=f"{command}\n",
                capture_output=True,
                text=True,
                env=self._environment,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return f"(no answer within {duration(timeout_s)})"
        return f"{result.stdout}{result.stderr}".strip()

    def transcript(self, commands: Sequence[str]) -> str:
        """Ask each command, and return them with their answers."""
        return "\n".join(f"> {command}\n{self.ask(command) or '(nothing)'}" for command in commands)

    def servers(self) -> list[int]:
        """Return the PIDs of the servers that it lists."""
        return [int(word) for word in self.ask("get_server_list").split() if word.isdigit()]

    def server(self) -> int:
        """Return its server's PID; raises QuestionError if it lists none."""
        found = self.servers()
        if not found:
            raise QuestionError(f"no MPS server is listed, although a client is ready: {self.logs(3)}")
        return found[0]

    def logs(self, lines: int = 60) -> str:
        """Return the last lines of each log (its own is in its output) without those that we caused."""
        parts = []
        for path in sorted(glob.glob(f"{self._log}/*")):
            with open(path, encoding="utf-8", errors="replace") as file:
                told = [line for line in file.read().splitlines() if not line.endswith(_CHATTER)]
            parts.append("\n".join([f"--- {os.path.basename(path)}", *told[-lines:]]))
        return "\n".join(parts)

    def close(self) -> None:
        """Let it end with its servers, if it still runs; what is left is ended after the question."""
        if self.state() == "runs":
            self.ask("quit -t 1", timeout_s=3)
            wait_for(lambda: self.state() != "runs", 2.0)


def listener(pipe: str) -> int:
    """Return the PID that listens on the socket in a pipe directory; 0 if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(0.5)
        try:
            connection.connect(f"{pipe}/control")
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0
    return int(_CREDENTIALS.unpack(raw)[0])


def process_state(pid: int) -> str:
    """Say whether a process, which may be no child of ours, runs."""
    return "runs" if os.path.exists(f"/proc/{pid}/exe") else "has exited"


def become_subreaper() -> None:
    """Make this process the parent of descendants whose own parent ends, so that it finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(question: int) -> None:
    """Reap ended processes that became our children, but not the process of the question."""
    with contextlib.suppress(ChildProcessError):
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == question:
                return
            os.waitpid(found.si_pid, 0)


def end_descendants() -> None:
    """End everything below this process."""
    if not has_module("psutil"):
        return
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
