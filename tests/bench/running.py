"""The daemon as the tests run it, measured: until READY, until its first answer, until it has recovered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence

from yunion_mps.units import seconds

from bench.asking import Http
from bench.values import BenchError
from integration import daemon_host
from simhost import SimHost

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
