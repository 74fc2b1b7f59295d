"""The daemon as systemd would run it: started with a NOTIFY_SOCKET of ours, asked, watched and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from bench.asking import Http
from bench.floors import DEADLINE_S, program, spawn
from bench.values import BenchError
from simhost import SimHost

#: NVIDIA's control daemon (535 and 550) forgets memory limits for devices from the 33rd on.
MOST_GPUS_OF_A_DOMAIN = 32

_SERVING = re.compile(r"STATUS=(\d+) of (\d+) devices available, (\d+) of (\d+) control daemons serving$")


class Daemon:
    """A running yunion-mps-daemon; a context manager, that has said READY when it is entered."""

    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.pid = 0
        self.ready_ms = 0.0
        self.socket = str(host.root / "run/yunion-mps/yunion-mps.sock")
        self._began_s = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the daemon
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._path = str(host.root / f"notify.{os.getpid()}")

    def __enter__(self) -> Daemon:  # noqa: PYI034 - typing.Self is not in 3.9
        self._notify.bind(self._path)
        argv = [program(self.host, "yunion-mps-daemon")]
        environment = {**self.host.env, "NOTIFY_SOCKET": self._path}
        self._began_s = time.perf_counter()
        self.pid = spawn(argv, environment, self._log.fileno())
        try:
            self._await("READY=1")
        except BaseException:
            self._end(signal.SIGKILL)
            _end_control_daemons(self.host)
            raise
        self.ready_ms = self._passed_ms()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(signal.SIGTERM)

    def answered_ms(self) -> float:
        """How long it took from the daemon's start until /v1/devices was answered, asked from READY on."""
        with Http(self.socket) as http:
            http.ask("/v1/devices")
        return self._passed_ms()

    def recovery_ms(self, control_pids: Sequence[int]) -> float:
        """How long from the control daemons' SIGKILL until all domains are ready, by the daemon's events.

        Its notifications only say when to ask: beside load, all may be back before one is sent.
        """
        with Http(self.socket) as http:
            last = json.loads(http.ask("/v1/events?limit=1")[0])["last"]
            deadline_s = time.perf_counter() + DEADLINE_S
            self._drain()
            begin_s = time.time()
            for pid in control_pids:
                os.kill(pid, signal.SIGKILL)
            while True:
                if select.select([self._notify], [], [], 0.5)[0]:
                    found = _SERVING.search(self._notify.recv(1 << 16).decode())
                    if found is None or found[1] != found[2] or found[3] != found[4]:
                        continue
                events = json.loads(http.ask(f"/v1/events?after={last}&limit=1000&kind=domain")[0])["events"]
                ready_s = [float(event["time"]) for event in events if event["what"] == "applying -> ready"]
                if len(ready_s) == len(control_pids):
                    return (max(ready_s) - begin_s) * 1000
                if time.perf_counter() > deadline_s:
                    raise BenchError(f"the daemon does not recover; it said:\n{self._said()}")

    def _await(self, word: str) -> None:
        while word not in self._receive(self._began_s + DEADLINE_S).splitlines():
            pass

    def _receive(self, deadline_s: float) -> str:
        """The next notification; raises BenchError when the daemon ends, or sends none until the deadline."""
        while not select.select([self._notify], [], [], 0.5)[0]:
            ended = os.waitpid(self.pid, os.WNOHANG)[0]
            if ended or time.perf_counter() > deadline_s:
                self.pid = 0 if ended else self.pid
                raise BenchError(f"the daemon {'ended' if ended else 'hangs'}; it said:\n{self._said()}")
        return self._notify.recv(1 << 16).decode()

    def _drain(self) -> None:
        while select.select([self._notify], [], [], 0)[0]:
            self._notify.recv(1 << 16)

    def _passed_ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1000

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def _end(self, number: signal.Signals) -> None:
        try:
            if self.pid:
                os.kill(self.pid, number)
                self._wait(time.perf_counter() + DEADLINE_S)
        finally:
            self._notify.close()
            self._log.close()
            os.unlink(self._path)

    def _wait(self, deadline_s: float) -> None:
        while not os.waitpid(self.pid, os.WNOHANG)[0]:
            self._drain()  # a full notification socket would hold it up
            if time.perf_counter() > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                _end_control_daemons(self.host)
                raise BenchError(f"the daemon did not stop in time; it said:\n{self._said()}")
            time.sleep(0.001)
        self.pid = 0


def _end_control_daemons(host: SimHost) -> None:
    """End what a daemon of ours left behind when it failed."""
    mark = b"CUDA_MPS_PIPE_DIRECTORY=" + bytes(host.root)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def running(gpus: int, virtual_number: int = 4) -> Iterator[Daemon]:
    """A host with so many GPUs, and the daemon on it."""
    scope = "host" if gpus <= MOST_GPUS_OF_A_DOMAIN else "gpu"
    with make_host(gpus, virtual_number, scope) as host, Daemon(host) as daemon:
        yield daemon


def make_host(gpus: int, virtual_number: int = 4, scope: str = "host") -> SimHost:
    host = SimHost.create([{"kind": "h100", "count": gpus, "virtual_number": virtual_number}])
    with (host.root / "etc/yunion/host.conf").open("a") as file:
        file.write(f"cuda_mps_scope: {scope}\n")
    return host
