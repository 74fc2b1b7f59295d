"""Containers of the real podman on a host with a GPU of each kind: MPS, time-sliced, and in MIG mode."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from containers.image import IMAGE
from containers.podman_host import Podman, mps
from integration.daemon_host import Daemon, eventually
from integration.device_nodes import nodes_in, nodes_of, nodes_of_instance, ready_daemon
from integration.lease_host import leased_addresses, leases_of
from simhost.host import EACH_KIND

__all__ = ["ready_daemon"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpus({"kind": "h100", "count": 3}),
    pytest.mark.divided(*EACH_KIND),
]


class Expected(NamedTuple):
    """What a container with a device has."""

    address: str
    nodes: set[str]
    visible: str
    is_advised: bool


def expected(daemon: Daemon, kind: str) -> Expected:
    _, sliced, split = daemon.host.gpus
    if kind == "time-sliced":
        return Expected("00:07.0-1", nodes_of(sliced), sliced.uuid, is_advised=True)
    (small,) = (one for one in split.mig_devices() if one.profile == "1g.10gb")
    nodes = nodes_of_instance(daemon.host, split, small)
    return Expected(f"00:08.0-g{small.gpu_instance}", nodes, small.uuid, is_advised=False)


def assert_has(pid: int, device: Expected) -> None:
    """The container of this process has the device's nodes and variables, and none of MPS."""
    process = Path(f"/proc/{pid}")
    variables = process.joinpath("environ").read_text().split("\0")
    environment = dict(variable.partition("=")[::2] for variable in variables)
    assert not [name for name in environment if name.startswith("CUDA_MPS_")]
    assert environment["CUDA_VISIBLE_DEVICES"] == device.visible
    assert environment["YUNION_MPS_DEVICE"] == device.address
    if device.is_advised:
        assert environment["YUNION_MPS_MEMORY_MIB"] == "27186", "nothing enforces it"
    assert nodes_in(process / "root") == device.nodes


@pytest.mark.parametrize("kind", ["time-sliced", "instance"])
def test_a_container_has_its_device_alone_and_nothing_of_the_others(
    ready_daemon: Daemon, podman: Podman, kind: str
) -> None:
    device = expected(ready_daemon, kind)
    begin = ["run", "--detach", "--name", "trainer", *mps(device.address)]
    podman.good(*begin, IMAGE, "sleep", "300")
    pid = podman.pid_of("trainer")
    assert_has(pid, device)
    mounts = Path(f"/proc/{pid}/mountinfo").read_text()
    assert f"{ready_daemon.host.root.name}/tmp" not in mounts, "the pipe directory"
    (lease,) = leases_of(ready_daemon)
    assert (lease["devices"], lease["pid"], lease["container"]) == ([device.address], pid, "trainer")
    assert "trainer: sleep 300" in ready_daemon.host.run(["yunion-mps", "who"]).stdout
    refused = podman.run(*mps(device.address), IMAGE, "true")
    assert f"device {device.address} is in use: trainer of root" in refused.stderr
    podman.good("rm", "--force", "--time", "0", "trainer")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


@pytest.mark.parametrize(("kind", "options"), [("time-sliced", ["--allow-unlimited"]), ("instance", [])])
def test_run_gives_a_container_a_device_of_each_kind(
    ready_daemon: Daemon, podman: Podman, kind: str, options: list[str]
) -> None:
    device = expected(ready_daemon, kind)
    command = ["yunion-mps", "run", "--podman", *options, "--device", device.address, "--"]
    ready_daemon.host.run([*command, "--detach", "--name", "trainer", IMAGE, "sleep", "300"], check=True)
    assert_has(podman.pid_of("trainer"), device)
    podman.good("rm", "--force", "--time", "0", "trainer")
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
