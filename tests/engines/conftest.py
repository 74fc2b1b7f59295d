"""A cluster of one node with our daemon: a V100 that is divided by four, and Slurm of both versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.slurm import VERSIONS, Slurm
from integration.conftest import daemon, host, make_daemon, make_host
from integration.daemon_host import Daemon
from simhost import SimHost
from simhost.mps import StandIns

__all__ = ["daemon", "host", "make_daemon", "make_host"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(description, ...): the GPUs of the host, where they are others")


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def jobs(host: SimHost) -> Iterator[StandIns]:
    """Stand-ins for MPS servers and clients; a test asks for it before the daemon, which uses them."""
    with StandIns(host) as jobs:
        yield jobs


@pytest.fixture
def slurm(daemon: Daemon, version: str) -> Iterator[Slurm]:
    """A node that is idle, with what `gres-conf` printed for it; two shares can be one budget."""
    daemon.configure(cuda_mps_combine=2)
    daemon.start().wait_ready()
    with Slurm(daemon.host, version) as slurm:
        slurm.install()
        yield slurm.start()
