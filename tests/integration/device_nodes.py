"""The driver's device nodes: on a simulated host, and in a container."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from integration.cdi_files import spec_of
from integration.daemon_host import Daemon, eventually
from simhost import SimHost
from simhost.gpu import MigDevice, SimGpu

#: The number of /dev/null, which stands for the driver's nodes.
NUMBER = os.makedev(1, 3)
#: What every container with a device has.
DRIVER_NODES = {"nvidiactl", "nvidia-uvm"}


def make_nodes(host: SimHost) -> None:
    """Make device nodes of the files that stand for them, because engines pass nothing else; needs root."""
    for path in _nodes(host.root):
        path.unlink()
        os.mknod(path, stat.S_IFCHR | 0o666, NUMBER)
        path.chmod(0o666)


def publish_nodes(daemon: Daemon) -> None:
    """Make device nodes also of what MIG instances have, and wait until containers get them."""
    make_nodes(daemon.host)
    eventually(lambda: daemon.polls() and "nvidia-cap" in json.dumps(spec_of(daemon.host)), "the nodes")


@pytest.fixture
def ready_daemon(daemon: Daemon) -> Daemon:
    """With device nodes that containers get."""
    daemon.start().wait_ready()
    publish_nodes(daemon)
    return daemon


def nodes_in(root: Path) -> set[str]:
    """The driver's nodes in this file system, by their paths below /dev."""
    found = _nodes(root)
    assert {path.stat().st_rdev for path in found} == {NUMBER}, "they are the host's"
    return {str(path.relative_to(root / "dev")) for path in found}


def nodes_of(gpu: SimGpu) -> set[str]:
    """Those that a container with this GPU has."""
    return {*DRIVER_NODES, f"nvidia{gpu.description.minor}"}


def nodes_of_instance(host: SimHost, gpu: SimGpu, instance: MigDevice) -> set[str]:
    """Those that a container with this MIG instance has, by NVIDIA's table of capabilities."""
    table = (host.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    minors = dict(line.split() for line in table)
    place = f"gpu{gpu.description.minor}/gi{instance.gpu_instance}"
    accesses = (f"{place}/access", f"{place}/ci{instance.compute_instance}/access")
    return {*nodes_of(gpu), *(f"nvidia-caps/nvidia-cap{minors[access]}" for access in accesses)}


def _nodes(root: Path) -> list[Path]:
    found = [*root.glob("dev/nvidia*"), *root.glob("dev/nvidia-caps/*")]
    return [path for path in found if not path.is_dir()]
