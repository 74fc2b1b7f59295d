"""A cluster of one node with our daemon: a V100 that is divided by four, and Slurm of both versions.

Tests of Ray share a cluster, so one worker of pytest-xdist runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from xdist.scheduler import LoadScopeScheduling

from engines.slurm import VERSIONS, Slurm
from integration.conftest import daemon, host, make_daemon, make_host
from integration.daemon_host import Daemon
from simhost import SimHost
from simhost.mps import StandIns

__all__ = ["daemon", "host", "make_daemon", "make_host"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait for slurmctld to find that a job has reached its limit, up to 30 s."""
    items.sort(key=lambda item: "time limit" not in item.name)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def jobs(host: SimHost) -> Iterator[StandIns]:
    """Stand-ins for MPS servers and clients; a test asks for it before the daemon, which uses them."""
    with StandIns(host) as jobs:
        yield jobs


@pytest.fixture
def mapping() -> str:
    """The gres that jobs request: `gpu:mps`, or `shard` in tests that set it as a parameter."""
    return "gpu:mps"


@pytest.fixture
def slurm(daemon: Daemon, version: str, mapping: str) -> Iterator[Slurm]:
    """An idle node with what `gres-conf` printed; two shares, or all shards of a GPU, can be one budget."""
    daemon.configure(cuda_mps_combine=4 if mapping == "shard" else 2)
    daemon.start().wait_ready()
    with Slurm(daemon.host, version) as slurm:
        slurm.install(*(["--shards"] if mapping == "shard" else []))
        yield slurm.start()


class OneWorkerForRay(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.endswith("/test_ray.py") else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return OneWorkerForRay(config, log)
