"""Containers with devices of different kinds at the same time, by engines with CDI and without it.

The engine is the real podman, which also stands in for docker.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from yunion_mps.containers import MISSING_NODES_ARGUMENT

from containers.image import IMAGE
from containers.podman_host import Podman
from integration.cdi_files import spec_of
from integration.daemon_host import Daemon, eventually
from integration.device_nodes import nodes_in, nodes_of, nodes_of_instance, publish_nodes
from integration.lease_host import leased_addresses
from simhost import SimHost
from simhost.gpu import MigDevice
from simhost.host import SHARED

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "h100", "count": 4})]

#: The options of `yunion-mps run`, and what the engine answers for itself.
ENGINES = {
    "podman": ("--podman", None),
    "podman without CDI": ("--podman", "version) echo 4.0.2"),
    "docker without CDI": ("--docker", "info) echo null"),
}


@pytest.fixture
def ready_daemon(daemon: Daemon) -> Daemon:
    daemon.host.divide(2, SHARED, "mig: [3g.40gb, 1g.10gb]", "mig: 3g.40gb")
    daemon.start().wait_ready()
    publish_nodes(daemon)
    return daemon


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, ready_daemon: Daemon, podman: Podman) -> str:
    """The option of `yunion-mps run` that selects the engine."""
    option, answers = ENGINES[request.param]
    if answers:
        programs = ready_daemon.host.root / "bin"
        real = (programs / "podman").rename(programs / "real-podman")
        (programs / "podman").symlink_to(real)
        program = programs / option.strip("-")
        program.unlink(missing_ok=True)
        program.write_text(f'#!/bin/sh\ncase "$1" in {answers}; exit;; esac\nexec {real} "$@"\n')
        program.chmod(0o755)
    return option


def start_container(host: SimHost, engine: str, name: str, *options: str) -> None:
    command = ["yunion-mps", "run", engine, "--allow-unlimited", *options, "--"]
    host.run([*command, "--detach", "--name", name, IMAGE, "sleep", "300"], check=True)


def environment_of(pid: int) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.partition("=")[::2] for variable in variables)


def instance_of(daemon: Daemon, gpu: int, profile: str) -> tuple[MigDevice, str, set[str]]:
    """The instance, its address, and the nodes that a container with it has."""
    split = daemon.host.gpus[gpu]
    (found,) = (one for one in split.mig_devices() if one.profile == profile)
    return found, f"00:0{6 + gpu}.0-g{found.gpu_instance}", nodes_of_instance(daemon.host, split, found)


def test_containers_of_each_kind_have_their_own_nodes_and_variables(
    ready_daemon: Daemon, podman: Podman, engine: str
) -> None:
    shared, sliced, *_ = ready_daemon.host.gpus
    small, instance, nodes = instance_of(ready_daemon, 2, "1g.10gb")
    expected = {
        "00:06.0-1": (nodes_of(shared), shared.uuid),
        "00:07.0-0": (nodes_of(sliced), sliced.uuid),
        instance: (nodes, small.uuid),
    }
    for address in expected:
        start_container(ready_daemon.host, engine, f"job-{address.replace(':', '-')}", "--device", address)
    eventually(lambda: leased_addresses(ready_daemon) == sorted(expected), "a lease for each")
    for address, (has, visible) in expected.items():
        pid = podman.pid_of(f"job-{address.replace(':', '-')}")
        environment = environment_of(pid)
        assert nodes_in(Path(f"/proc/{pid}/root")) == has
        assert (environment["YUNION_MPS_DEVICE"], environment["CUDA_VISIBLE_DEVICES"]) == (address, visible)
        limits = {name for name in environment if name.startswith("CUDA_MPS_")}
        assert bool(limits) == address.startswith("00:06"), "those of MPS are of no other kind"
        assert ("YUNION_MPS_MEMORY_MIB" in environment) == (address != instance)
        mounts = Path(f"/proc/{pid}/mountinfo").read_text()
        assert ("/tmp/nvidia-mps" in mounts) == bool(limits)


def test_an_option_replaces_the_jax_variable_only_if_the_device_has_none(
    ready_daemon: Daemon, podman: Podman, engine: str
) -> None:
    option = "XLA_PYTHON_CLIENT_MEM_FRACTION=.9"
    for address, is_replaced in {"00:06.0-1": True, "00:07.0-0": False}.items():
        command = ["yunion-mps", "run", engine, "--allow-unlimited", "--device", address, "--"]
        done = ready_daemon.host.run([*command, "--rm", "--env", option, IMAGE, "env"])
        assert (option in done.stdout.splitlines()) == is_replaced, done.stderr
        assert done.returncode == 0 or "would override the device's value" in done.stderr
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the leases")


def test_a_container_with_two_instances_has_the_nodes_of_both(
    ready_daemon: Daemon, podman: Podman, engine: str
) -> None:
    first, one, of_first = instance_of(ready_daemon, 2, "3g.40gb")
    second, other, of_second = instance_of(ready_daemon, 3, "3g.40gb")
    start_container(ready_daemon.host, engine, "trainer", "--device", one, "--device", other)
    pid = podman.pid_of("trainer")
    assert nodes_in(Path(f"/proc/{pid}/root")) == of_first | of_second
    environment = environment_of(pid)
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{first.uuid},{second.uuid}"
    assert environment["YUNION_MPS_DEVICE"] == f"{one},{other}"


def test_a_container_whose_instance_lacks_a_node_is_refused(
    ready_daemon: Daemon, podman: Podman, engine: str
) -> None:
    """As after the instance was created again: CUDA would find no GPU in the container."""
    host = ready_daemon.host
    _, address, nodes = instance_of(ready_daemon, 2, "1g.10gb")
    node = next(node for node in nodes if node.startswith("nvidia-caps/"))
    (host.root / "dev" / node).unlink()
    eventually(
        lambda: ready_daemon.polls() and MISSING_NODES_ARGUMENT in json.dumps(spec_of(host)), "the file"
    )
    words = ("--device", address, "--", "--rm", IMAGE, "id")
    refused = host.run(("yunion-mps", "run", engine, *words))
    assert f"MIG instance {address}: no such device node: /dev/{node}" in refused.stderr
    assert "create it: nvidia-modprobe -f " in refused.stderr
    assert refused.returncode != 0
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")
    (host.root / "dev" / node).touch()
    publish_nodes(ready_daemon)
    eventually(lambda: MISSING_NODES_ARGUMENT not in json.dumps(spec_of(host)), "the file")
    assert host.run(("yunion-mps", "run", engine, *words)).returncode == 0
