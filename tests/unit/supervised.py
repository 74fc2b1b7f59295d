"""A supervisor on a simulated host, for the tests of what it does and of what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from yunion_mps.daemon.run import drive
from yunion_mps.examination import examine
from yunion_mps.inventory import Nvml, scan
from yunion_mps.models import Snapshot
from yunion_mps.paths import Paths
from yunion_mps.service import devices_json
from yunion_mps.supervisor import Supervisor

from simhost import Description, SimHost

MakeHost = Callable[..., SimHost]


class Supervised:
    """A Supervisor on a host, driven by the real clock."""

    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.paths = Paths(str(host.root))
        self.examined = examine(self.paths)
        self.examined.check()
        self.supervisor = Supervisor(self.paths, self.examined)

    @property
    def snapshot(self) -> Snapshot:
        return self.supervisor.snapshot()

    @property
    def available(self) -> int:
        return sum(device["state"] == "available" for device in devices_json(self.snapshot))

    def start(self) -> Supervised:
        self.supervisor.start(time.monotonic())
        drive(self.supervisor, lambda: self.supervisor.started)
        return self

    def rescan(self) -> Snapshot:
        assert isinstance(self.examined.nvml, Nvml)
        self.supervisor.rescan(scan(self.examined.nvml, self.paths))
        return self.snapshot

    def stop(self, *, put_back: bool = True) -> None:
        self.supervisor.stop(time.monotonic())
        drive(self.supervisor, lambda: self.supervisor.stopped)
        if put_back:
            self.supervisor.close()


@pytest.fixture
def make_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeHost]:
    """Make a host that NVML in this process, and PATH, belong to."""
    with ExitStack() as stack:

        def make(description: Description, **keys: str) -> SimHost:
            host = stack.enter_context(SimHost.create(description))
            configure(host, **keys)
            stack.enter_context(host.pynvml())
            monkeypatch.setenv("PATH", host.env["PATH"])
            return host

        yield make


@pytest.fixture
def supervise() -> Iterator[Callable[[SimHost], Supervised]]:
    """Make a Supervised; it is stopped at the end."""
    with ExitStack() as stack:

        def make(host: SimHost) -> Supervised:
            made = Supervised(host)
            stack.callback(made.examined.close)
            stack.callback(made.stop)
            return made

        yield make


def configure(host: SimHost, **keys: str) -> None:
    """Write host.conf with these keys."""
    lines = [f"{name}: {value}" for name, value in {"enable_cuda_mps": "true", **keys}.items()]
    (host.root / "etc/yunion/host.conf").write_text("\n".join(lines) + "\n")


def modes(host: SimHost) -> list[str]:
    return [gpu.compute_mode for gpu in host.gpus]


Supervise = Callable[[SimHost], Supervised]
