"""A process that uses the devices of a lease."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of
from simhost.mps import StandIns


@contextlib.contextmanager
def attach(jobs: StandIns, daemon: Daemon, lease: dict[str, Any]) -> Iterator[None]:
    """Run a client of MPS with the lease's environment, as the driver and the daemon see it."""
    environment = dict(daemon.host.env)
    daemon.host.env.update(lease["environment"])
    client = jobs.attached(daemon.pipe_directory)
    daemon.host.env.clear()
    daemon.host.env.update(environment)
    gpu = daemon.host.gpus[0]
    gpu.add_process(client.pid, 100, "M+C")
    try:
        eventually(lambda: "in use" in [one["state"] for one in leases_of(daemon)], "its use of the device")
        yield
    finally:
        client.end()
        gpu.remove_process(client.pid)
