"""The daemon as the tests run it, measured: until READY, until its first answer, until it has recovered."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from yunion_mps.core.units import seconds

from bench.values import BenchError
from integration import daemon_host
from simhost import SimHost
from simhost.host import Closes

#: NVIDIA's control daemon (535 and 550) forgets memory limits for devices from the 33rd on.
MAX_GPUS_PER_DOMAIN = 32


class Daemon(daemon_host.Daemon):
    """A running yunion-mps-daemon; a context manager, that has said READY when it is entered."""

    def __enter__(self) -> Daemon:  # noqa: PYI034 - typing.Self is not in 3.9
        self._began_s = time.perf_counter()
        try:
            self.start().wait_ready()
        except BaseException:
            super().close()
            raise
        self.ready_ms = self._passed_ms()
        self.socket = str(self.socket_path)
        return self

    def close(self) -> None:
        """Stop it as systemd does, so that the next one finds nothing that it would adopt or restore."""
        if self.running:
            self.stop()
        super().close()

    def answered_ms(self) -> float:
        """How long it took from the daemon's start until /v1/devices was answered, asked from READY on."""
        with Http(self.socket) as http:
            http.ask("/v1/devices")
        return self._passed_ms()

    def recovery_ms(self, control_pids: Sequence[int]) -> float:
        """How long from the control daemons' SIGKILL until all domains are ready, by the daemon's events."""
        ready_s: list[float] = []
        with Http(self.socket) as http:
            last = json.loads(http.ask("/v1/events?limit=1")[0])["last"]
            begin_s = time.time()
            for pid in control_pids:
                os.kill(pid, signal.SIGKILL)
            while len(ready_s) < len(control_pids):
                answer = http.ask(f"/v1/events?after={last}&limit=1000&kind=domain&wait_s=60")[0]
                events = json.loads(answer)["events"]
                if not events:
                    raise BenchError(f"the daemon does not recover; it said:\n{self.log}")
                last = events[-1]["id"]
                ready_s += [
                    seconds(event["time"]) for event in events if event["what"] == "applying -> ready"
                ]
        return (max(ready_s) - begin_s) * 1000

    def _passed_ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1000


@contextlib.contextmanager
def running(gpus: int, virtual_number: int = 4) -> Iterator[Daemon]:
    """A host with so many GPUs, and the daemon on it."""
    scope = "host" if gpus <= MAX_GPUS_PER_DOMAIN else "gpu"
    with make_host(gpus, virtual_number, scope) as host, Daemon(host) as daemon:
        yield daemon


def make_host(gpus: int, virtual_number: int = 4, scope: str = "host") -> SimHost:
    host = SimHost.create([{"kind": "h100", "count": gpus, "virtual_number": virtual_number}])
    with (host.root / "etc/yunion/host.conf").open("a") as file:
        file.write(f"cuda_mps_scope: {scope}\n")
    return host


#: The interpreter that the virtual environment was made with: what `python3` is there, without its packages.
PYTHON = str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
DEADLINE_S = 60.0
_LOOK_S = 0.0001


def program(host: SimHost, name: str) -> str:
    """The path of a program on the host; raises BenchError where it is not there."""
    path = shutil.which(name, path=host.env["PATH"])
    if path is None:
        raise BenchError(f"{name} is not there: run scripts/setup")
    return path


def spawn(argv: list[str], environment: Mapping[str, str]) -> int:
    """Start a program with nothing to read and its output thrown away; return its PID.

    Floors and the commands that are compared with them are started alike, and by the cheapest way there is.
    """
    null = [(os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in range(3)]
    return os.posix_spawn(argv[0], argv, environment, file_actions=null)


def run_ms(argv: list[str], environment: Mapping[str, str]) -> float:
    """How long a program takes from its start to its end; raises BenchError where it fails."""
    begin_s = time.perf_counter()
    _, status = os.waitpid(spawn(argv, environment), 0)
    taken_ms = (time.perf_counter() - begin_s) * 1000
    if status != 0:
        raise BenchError(f"{' '.join(argv)} failed ({os.waitstatus_to_exitcode(status)})")
    return taken_ms


def python_ms(host: SimHost, statement: str = "pass", python: str = PYTHON) -> float:
    return run_ms([python, "-I", "-c", statement], host.env)


def control_ms(host: SimHost) -> float:
    """How long a bare control daemon takes from its start until it accepts on its `control` socket."""
    folder = tempfile.mkdtemp(prefix="bench.", dir=host.root)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder, "LC_ALL": "C"}
    argv = [program(host, "nvidia-cuda-mps-control"), "-f"]
    begin_s = time.perf_counter()
    pid = spawn(argv, environment)
    try:
        while not _accepts(f"{folder}/control"):
            if time.perf_counter() - begin_s > DEADLINE_S or os.waitpid(pid, os.WNOHANG)[0]:
                raise BenchError(f"{argv[0]} does not serve: try it with CUDA_MPS_PIPE_DIRECTORY={folder}")
            time.sleep(_LOOK_S)
        return (time.perf_counter() - begin_s) * 1000
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(path)
        except OSError:
            return False
        return True


def request_for(target: str, method: str = "GET") -> bytes:
    """A request without a body, as curl sends it."""
    length = "Content-Length: 0\r\n" if method == "POST" else ""
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n{length}\r\n".encode()


class Http(Closes):
    """One connection, kept."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(60)
        self._socket.connect(path)

    def close(self) -> None:
        self._socket.close()

    def ask(self, target: str, method: str = "GET") -> tuple[bytes, int]:
        """The answer's body, and the size of the whole answer; raises BenchError unless it is 200 or 201."""
        self.send(request_for(target, method))
        return self.answer(target)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def answer(self, target: str) -> tuple[bytes, int]:
        """What `ask` returns, once that was sent."""
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._more()
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
        while len(body) < length:
            body += self._more()
        if not lines[0].startswith((b"http/1.1 200", b"http/1.1 201")):
            raise BenchError(f"{target} was answered by {answer[:300]!r}")
        return body, len(head) + 4 + length

    def exchange(self, request: bytes, size: int) -> bytes:
        """Send a request and take an answer of a known size."""
        self._socket.sendall(request)
        parts = [self._socket.recv(size)]
        left = size - len(parts[0])
        while left:
            parts.append(self._more())
            left -= len(parts[-1])
        return b"".join(parts)

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise BenchError("the connection was closed within an answer")
        return data
