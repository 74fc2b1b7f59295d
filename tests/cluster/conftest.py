"""A cluster for all tests, and a node of it for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.control_plane import ASSETS, ControlPlane
from cluster.node import Node
from containers.image import make_image
from integration.conftest import daemon, host, make_daemon, make_host, ready_daemon
from integration.daemon_host import Daemon
from simhost.environment import CHECKOUT

__all__ = ["daemon", "host", "make_daemon", "make_host", "ready_daemon"]

_MANIFESTS = CHECKOUT / "etc/kubernetes"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A cluster with the objects of etc/kubernetes."""
    if ASSETS not in os.environ:
        pytest.skip(f"{ASSETS} is not set: see scripts/test-kubernetes")
    with ControlPlane(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.kubectl("apply", "-k", _MANIFESTS)
        cluster.kubectl("apply", "-k", _MANIFESTS / "dra")
        yield cluster


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image")


@pytest.fixture
def node(cluster: ControlPlane, ready_daemon: Daemon, image_folder: Path) -> Iterator[Node]:
    """A node whose daemon and kubelet are ready; its plugin has not been started."""
    with Node(cluster, ready_daemon, make_image(image_folder, ready_daemon.host)) as node:
        yield node
