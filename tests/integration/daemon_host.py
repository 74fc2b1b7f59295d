"""yunion-mps-daemon on a simulated host, as systemd would run it: started, waited for, asked and ended.

with Daemon(host) as daemon:                 # any SimHost; nothing of it is left at the end
    daemon.start().wait_ready()              # READY=1 came on a NOTIFY_SOCKET of ours
    daemon.get("/v1/devices")                # (status, JSON) from the socket
    daemon.control("get_server_list")        # lines that the real control daemon answers
    assert daemon.stop() == 0, daemon.log    # SIGTERM, and the exit status
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from control_groups import unique_name
from request_bodies import request_body
from simhost import SimHost
from simhost.host import Closes
from simhost.mps import CONTROL, PING, is_rejected
from waiting import pause

#: So long that only something that never comes is missed, on however slow a machine.
PATIENCE_S = 60.0

_DRAINED = b"everything before this was read"

T = TypeVar("T")


def eventually(
    look: Callable[[], T], what: str = "it", timeout_s: float = PATIENCE_S, trouble: Callable[[], str] = str
) -> T:
    """Return what `look` returns once that is true; fails with `what` (and `trouble()`) when it never is."""
    begun_s = time.monotonic()
    while not (found := look()):
        if time.monotonic() > begun_s + timeout_s:
            raise AssertionError(f"{what} did not come about in {timeout_s:g} s\n{trouble()}")
        pause(begun_s)
    return found


def control_daemons(root: Path) -> list[int]:
    """The PIDs of all processes, such as control daemons, whose pipe directory lies below `root`."""
    return [pid for pid in _all_pids() if b"CUDA_MPS_PIPE_DIRECTORY=" + bytes(root) in _environ(pid)]


def state_of(pid: int) -> str:
    """The state of a process, as proc(5) has it; X if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_running(pid: int) -> bool:
    return state_of(pid) not in "ZX"


class Daemon(Closes):
    """One yunion-mps-daemon on a host; it can be started again after its end. A context manager."""

    def __init__(self, host: SimHost, *, notify: bool = True) -> None:
        """`notify`: with a NOTIFY_SOCKET, as systemd's Type=notify has it."""
        self.host = host
        self.env = dict(host.env)
        for name in ("NOTIFY_SOCKET", "JOURNAL_STREAM", "INVOCATION_ID", "YUNION_MPS_LOG_LEVEL"):
            self.env.pop(name, None)
        #: Every datagram since the last start, in order, e.g. "READY=1\nSTATUS=4 of 4 devices ...".
        self.messages: list[str] = []
        #: The limit on its open descriptors from the next start on; None to inherit ours.
        self.descriptor_limit: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_file = host.root / "var/log/yunion-mps-daemon.stderr"
        self._log_start = 0
        self._inbox: socket.socket | None = None
        self._arrived, self._drained = threading.Event(), threading.Event()
        if notify:
            address = str(host.root / "run/notify.sock")
            self.env["NOTIFY_SOCKET"] = address
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._inbox.bind(address)
            # A thread, because the kernel keeps few datagrams and then lets their sender wait.
            threading.Thread(target=self._receive, args=(self._inbox,), daemon=True).start()

    # -- its life

    def start(self, *arguments: str, **environment: str) -> Daemon:
        """Start it; does not wait. More options and variables of the environment may be given."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        self.messages.clear()
        program = shutil.which("yunion-mps-daemon", path=self.env["PATH"])
        assert program, "yunion-mps-daemon is not there: run scripts/setup"
        coverage = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        with self._log_file.open("ab") as log:
            self._log_start = log.tell()
            limit = [] if self.descriptor_limit is None else ["prlimit", f"--nofile={self.descriptor_limit}:"]
            self._process = subprocess.Popen(
                [*limit, program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**coverage, **self.env, **environment},
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> Daemon:
        """Wait until it has said READY=1; fails with its log when it ends before that."""
        self.wait_message("READY=1", timeout_s)
        return self

    def wait_message(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait for a notification that holds `text`, and return it whole; woken by each one, not by time."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._arrived.clear()
            if has_ended := not self.running:
                self._drain()
            if found := next((message for message in list(self.messages) if text in message), ""):
                return found
            assert not has_ended, f"it ended with {self.returncode} before {text!r}:\n{self.log}"
            assert time.monotonic() < end_s, f"no notification {text!r} in {timeout_s:g} s:\n{self.log}"
            self._arrived.wait(0.05)

    def wait_log(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        eventually(lambda: text in self.log, f"{text!r} in the log", timeout_s, lambda: self.log)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end, and return the exit status (negative for a signal)."""
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end in {timeout_s:g} s:\n{self.log}") from None
        self._drain()
        return self._process.returncode

    def run(self, *arguments: str, **environment: str) -> int:
        """Start it and wait for its end by itself: for what refuses to start, `--check` and the like."""
        return self.start(*arguments, **environment).wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.signal(number)
        return self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    # -- what it is at

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> str:
        """What it has written to standard output and error since its last start."""
        with self._log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode()

    @property
    def notifications(self) -> list[str]:
        """Every line of every notification since its last start: READY=1, STATUS=..., in order."""
        self._drain()
        return [line for message in self.messages for line in message.splitlines()]

    @property
    def socket_path(self) -> Path:
        return self.host.root / "run/yunion-mps/yunion-mps.sock"

    @property
    def pending_connections(self) -> int:
        """How many connections it has not accepted yet (net/unix/af_unix.c: connecting, without an inode)."""
        path = str(self.socket_path.parent)
        lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
        return sum(line[5] == "02" and line[-1].startswith(path) for line in lines)

    @property
    def pipe_directory(self) -> Path:
        """The pipe directory of the default configuration's one domain."""
        return self.host.root / "tmp/nvidia-mps/pipe"

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, words: str = "") -> tuple[int, Any]:
        """Status and answer; `words` are the body, as `posting` has it."""
        body, headers = request_body(words) if method == "POST" else (None, {})
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.closing(connection):
            connection.sock.settimeout(PATIENCE_S)
            connection.sock.connect(str(self.socket_path))
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read().decode()
            is_plain = response.headers["Content-Type"].startswith("text/plain")
            return response.status, text if is_plain else json.loads(text)

    def reload_now(self) -> tuple[int, Any]:
        """Reload with the mode `now`, and accept what the plan says that would be lost."""
        plan = self.get("/v1/plan")[1]
        return self.ask("POST", "/v1/reload", f"mode=now&confirmation={plan['confirmation']}")

    def status(self) -> dict[str, Any]:
        code, answer = self.get("/v1/status")
        assert code == 200, answer
        return dict(answer)

    def reexec(self) -> Daemon:
        self.status()  # it answers, so it has logged that it is ready
        count = self.log.count(" is ready: ")
        assert self.ask("POST", "/v1/reexec")[0] == 200
        eventually(lambda: self.log.count(" is ready: ") > count, "the new program", trouble=lambda: self.log)
        return self

    def warnings(self) -> dict[str, str]:
        """The warnings of the status, each with its reason code."""
        found = self.status()["problems"]
        return {one["text"]: one["code"] for one in found if one["level"] == "warning"}

    def control_pid(self) -> int:
        """The PID of the one domain's control daemon, as /v1/status tells it."""
        (domain,) = self.status()["domains"]
        return int(domain["pid"])

    @contextlib.contextmanager
    def open_front_end(self) -> Iterator[None]:
        """NVIDIA's front-end as an operator has it open in a terminal: the control daemon serves it alone."""
        log = self.host.root / "tmp/nvidia-mps/log/control.log"
        before = log.read_text().count("NEW UI")
        env = {**self.env, "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe_directory)}
        front_end = self.host.popen(["nvidia-cuda-mps-control"], stdin=subprocess.PIPE, env=env)
        try:
            eventually(lambda: log.read_text().count("NEW UI") > before, "the front-end's connection")
            yield
        finally:
            front_end.communicate()

    def control(self, *commands: str, pipe_directory: Path | None = None) -> list[str]:
        """What the control daemon answers to the commands, through NVIDIA's own front-end.

        It is asked again while another front-end is connected, such as the daemon's own, which reads the
        limits back every minute.
        """
        env = {**self.env, "CUDA_MPS_PIPE_DIRECTORY": str(pipe_directory or self.pipe_directory)}
        lines = "".join(f"{command}\n" for command in (PING, *commands))

        def answer() -> list[str]:
            done = self.host.run([CONTROL], input=lines, env=env)
            if is_rejected(done.stdout + done.stderr):
                return []
            assert done.returncode == 0, done.stderr
            return done.stdout.splitlines()

        return eventually(answer, "the end of another front-end's connection")[1:]

    def polls(self, xid: int = 31, gpu: int = 0) -> bool:
        """Have the driver report an Xid, at which the daemon polls all GPUs at once, and not within 10 s.

        True, for a condition: it is reported again and again, because the daemon may not listen yet.
        """
        self.host.gpus[gpu].xid(xid)
        return True

    # -- its files

    def configure(self, **keys: object) -> None:
        """Write host.conf with `enable_cuda_mps: true` and these keys."""
        self.write_host_conf({"enable_cuda_mps": True, **keys})

    def write_host_conf(self, keys: Mapping[str, object]) -> None:
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in keys.items()]
        (self.host.root / "etc/yunion/host.conf").write_text("".join(lines))

    def wrap_control_program(self, script: str) -> Path:
        """Put a script in the place of NVIDIA's control program, from the next start on; it is `$REAL`."""
        real = shutil.which(CONTROL, path=self.env["PATH"])
        program = self.host.root / "wrapper" / CONTROL
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
        program.chmod(0o755)
        self.env["PATH"] = f"{program.parent}{os.pathsep}{self.env['PATH']}"
        return program

    # -- its end

    def close(self) -> None:
        """End it and everything that it left on the host."""
        if self.running:
            self.kill()
        for pid in control_daemons(self.host.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not is_running(pid), f"the end of PID {pid}")  # type: ignore[misc]
        if self._inbox is not None:
            # Wakes the thread, which a close alone does not.
            self._inbox.shutdown(socket.SHUT_RDWR)
            self._inbox.close()
            self._inbox = None

    def _receive(self, inbox: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while message := inbox.recv(65536):
                if message == _DRAINED:
                    self._drained.set()
                else:
                    self.messages.append(message.decode())
                    self._arrived.set()

    def _drain(self) -> None:
        """Wait until the thread has read all that was sent up to now."""
        if self._inbox is not None:
            self._drained.clear()
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(_DRAINED, self._inbox.getsockname())
            assert self._drained.wait(PATIENCE_S)


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def no_more_processes(pid: int) -> Iterator[None]:
    """Let the process start no other process and no thread; skips the test if there is no such controller."""
    root = _controller()
    group = root / unique_name()
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs the pids controller of control groups: {error}")
    try:
        (group / "pids.max").write_text("1")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _controller() -> Path:
    """Where control groups with a limit of processes can be made, in either version."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        control = Path(place) / "cgroup.subtree_control"
        if (kind == "cgroup" and "pids" in options.split(",")) or (
            kind == "cgroup2" and "pids" in control.read_text().split()
        ):
            return Path(place)
    pytest.skip("needs the pids controller of control groups")
