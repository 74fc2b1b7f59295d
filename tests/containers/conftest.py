"""Hosts with the daemon, as in tests/integration and tests/kubernetes, with podman or containerd on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from containers.containerd import Containerd
from containers.image import make_image
from containers.podman_host import Podman, Store
from integration.cdi_files import spec_of
from integration.conftest import (
    AtWork,
    MakeAtWork,
    MakeHost,
    daemon,
    host,
    make_at_work,
    make_daemon,
    make_divided,
    make_host,
    ready_daemon,
)
from integration.daemon_host import Daemon, eventually
from kubernetes.conftest import cluster, dra_kubelet, driver, kubelet, plugin, start_container

__all__ = [
    "cluster",
    "daemon",
    "dra_kubelet",
    "driver",
    "host",
    "kubelet",
    "make_at_work",
    "make_daemon",
    "make_divided",
    "make_host",
    "plugin",
    "ready_daemon",
    "start_container",
]

MakePodman = Callable[..., Podman]
MakePodmanAtWork = Callable[..., "tuple[AtWork, Podman]"]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("podman"))


@pytest.fixture
def make_podman(store: Store) -> Iterator[MakePodman]:
    """Make a Podman on a host, which starts containers by runc or by the runtime that is named."""
    with ExitStack() as stack:
        yield lambda host, runtime="runc": stack.enter_context(Podman(host, store, runtime))


@pytest.fixture
def podman(ready_daemon: Daemon, make_podman: MakePodman) -> Podman:
    """Podman on the host of a daemon that is ready, and whose devices can be found."""
    eventually(lambda: spec_of(ready_daemon.host), "the file of the devices")
    return make_podman(ready_daemon.host)


@pytest.fixture
def make_podman_at_work(
    make_host: MakeHost, make_podman: MakePodman, make_at_work: MakeAtWork
) -> MakePodmanAtWork:
    """Make what `make_at_work` makes, and podman on that host, whose devices can be found."""

    def make(**keys: object) -> tuple[AtWork, Podman]:
        make_podman(make_host())  # builds the image first, because the stand-ins must not be copied into it
        at_work = make_at_work(**keys)
        eventually(lambda: spec_of(at_work.daemon.host), "the file of the devices")
        return at_work, make_podman(at_work.daemon.host)

    return make


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image")


@pytest.fixture
def containerd(ready_daemon: Daemon, image_folder: Path) -> Iterator[Containerd]:
    with Containerd(ready_daemon.host, make_image(image_folder, ready_daemon.host)) as containerd:
        yield containerd
