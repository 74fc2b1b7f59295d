"""What Cloudpods' host agent reads on a host with our daemon, and what it then gives to its containers.

The agent is not here. What it does was read in its sources (yunionio/cloudpods,
pkg/hostman/isolated_device/container_device/nvidia_mps.go and nvidia_gpu.go), and stands below as Agent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import eventually
from simhost import SimHost

QUERY = ("nvidia-smi", "--query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode", "--format=csv")
#: What the agent writes for a GPU of an AI node, and keys of its own.
SHARED = """\
devices:
- path: /dev/dri/renderD128
  type: NVIDIA_GPU_SHARE
  virtual_number: 4
"""
DIVIDED = SHARED.replace("NVIDIA_GPU_SHARE", "NVIDIA_MPS")
HOST_CONF = """\
hostname: gpu-7
networks:
- eth0/br0/10.0.0.7
enable_cuda_mps: {enabled}
container_device_config_file: /etc/yunion/host_container_device.yml
cuda_mps_replicas: 4
"""


class Seen(NamedTuple):
    """A device as the agent registers it."""

    gpu: str
    model: str
    slot: int
    memory_mib: int
    thread_percentage: int


class Agent:
    """What the host agent does, in its own order."""

    def __init__(self, host: SimHost) -> None:
        self.host = host
        self.options = yaml.safe_load((host.root / "etc/yunion/host.conf").read_text())

    def devices(self) -> list[Seen]:
        """It takes the GPUs that are exclusive to a process, and divides each by its own option."""
        replicas = self.options["cuda_mps_replicas"]
        return [
            Seen(uuid, name, slot, mib // replicas, 100 // replicas)
            for uuid, name, mib, mode in self._gpus()
            if mode == "Exclusive_Process"
            for slot in range(replicas)
        ]

    def whole_gpus(self) -> list[str]:
        """The GPUs that it offers whole or shared without limits: those of the default mode."""
        return [uuid for uuid, _, _, mode in self._gpus() if mode == "Default"]

    def environment(self, gpu: str) -> dict[str, str]:
        """What it gives a container; the pipe directory is mounted at the same path, and /dev/shm."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": self.options.get("cuda_mps_pipe_directory", "/tmp/nvidia-mps/pipe"),
            "NVIDIA_VISIBLE_DEVICES": gpu,
            "NVIDIA_DRIVER_CAPABILITIES": "all",
        }

    def _gpus(self) -> list[tuple[str, str, int, str]]:
        lines = self.host.run(QUERY, check=True).stdout.splitlines()
        rows = [[part.strip() for part in line.split(",")] for line in lines if not line.startswith("uuid")]
        assert all(len(row) == 5 for row in rows), "it passes over lines that have not five parts"
        assert all(row[3].endswith(" MiB") for row in rows), "it fails at any other unit"
        return [(uuid, name, int(memory[:-4]), mode) for uuid, name, _, memory, mode in rows]


@pytest.fixture
def node(make_host: MakeHost) -> SimHost:
    """An AI node as Cloudpods leaves it: the GPU is shared, and nothing limits its containers."""
    host = make_host()
    _write(host, enabled=False, devices=SHARED)
    return host


def _write(host: SimHost, *, enabled: bool, devices: str = DIVIDED) -> None:
    (host.root / "etc/yunion/host.conf").write_text(HOST_CONF.format(enabled=str(enabled).lower()))
    (host.root / "etc/yunion/host_container_device.yml").write_text(devices)


def _reload(host: SimHost, *, enabled: bool, devices: str = DIVIDED) -> None:
    _write(host, enabled=enabled, devices=devices)
    host.run(["yunion-mps", "reload"], check=True)


def _files(host: SimHost) -> list[bytes]:
    names = ("host.conf", "host_container_device.yml")
    return [(host.root / "etc/yunion" / name).read_bytes() for name in names]


def test_from_shared_to_mps_and_back_the_agent_sees_what_we_serve(
    node: SimHost, make_daemon: MakeDaemon
) -> None:
    before = _files(node)
    daemon = make_daemon(node).start().wait_ready()
    assert daemon.status()["state"] == "disabled"
    assert (Agent(node).devices(), len(Agent(node).whole_gpus()), _files(node)) == ([], 1, before)
    _write(node, enabled=True)
    before = _files(node)
    node.run(["yunion-mps", "reload"], check=True)
    agent = Agent(node)
    code, ours = daemon.get("/v1/devices")
    assert code == 200
    assert agent.devices() == [
        Seen(
            one["gpu_uuid"],
            one["model"],
            int(one["addr"].rpartition("-")[2]),
            one["memory_mib"],
            one["thread_percentage"],
        )
        for one in ours["isolated_devices"]
    ]
    assert (len(agent.devices()), agent.whole_gpus()) == (4, [])
    assert _files(node) == before

    _reload(node, enabled=False, devices=SHARED)
    eventually(lambda: len(Agent(node).whole_gpus()) == 1, "the compute mode of before")
    assert Agent(node).devices() == []


def test_the_agent_s_environment_leads_a_container_to_the_control_daemon(
    node: SimHost, make_daemon: MakeDaemon
) -> None:
    """It gets no limits from the agent: those of the control daemon are one device's, for every client."""
    _write(node, enabled=True)
    daemon = make_daemon(node).start().wait_ready()
    agent = Agent(node)
    given = agent.environment(agent.devices()[0].gpu)
    inside = Path(node.root / given["CUDA_MPS_PIPE_DIRECTORY"].lstrip("/"))
    assert inside == daemon.pipe_directory
    for place in (inside.parent, inside):
        assert place.stat().st_mode & 0o005 == 0o005, f"{place}: a container's user could not go in"
    commands = ("get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage")
    assert daemon.control(*commands, pipe_directory=inside) == ["5G", "25.0"]


def test_the_agents_gpus_of_other_types_are_none_of_ours(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    """One GPU is divided, the other shared by Cloudpods: neither is offered twice."""
    host = make_host([{"kind": "tesla-p40", "count": 2}])
    second = SHARED.replace("128", "129").partition("\n")[2]
    _write(host, enabled=True, devices=DIVIDED + second)
    make_daemon(host).start().wait_ready()
    agent = Agent(host)
    assert {one.gpu for one in agent.devices()}.isdisjoint(agent.whole_gpus())
    assert (len(agent.devices()), len(agent.whole_gpus())) == (4, 1)


def test_the_checks_after_each_step_say_what_the_manual_says(node: SimHost, make_daemon: MakeDaemon) -> None:
    """docs/cloudpods.md, there and back, without Cloudpods' own commands."""
    manual = (Path(__file__).parents[2] / "docs/cloudpods.md").read_text()
    mode = "nvidia-smi --query-gpu=gpu_name,compute_mode --format=csv,noheader"

    def check(command: str, told: str) -> str:
        for words in (command, told):
            assert words in manual
        return node.run(["bash", "-c", command], check=True).stdout

    shared, mps = "Tesla P40, Default", "Tesla P40, Exclusive_Process"
    assert check(mode, shared) == f"{shared}\n"
    assert check("nvidia-smi --query-compute-apps=pid,name --format=csv,noheader", "") == ""
    _write(node, enabled=True)
    (row,) = [line for line in check("yunion-mps config check", "").splitlines() if "  Tesla P40" in line]
    changes = "Default -> Exclusive_Process"
    assert changes in manual
    assert re.split("  +", row)[-2] == changes, "the last column but one"
    assert node.run(["bash", "-c", mode]).stdout == f"{shared}\n", "it has touched nothing"
    daemon = make_daemon(node).start().wait_ready()
    assert check(mode, mps) == f"{mps}\n"
    listed = check("yunion-mps isolated-device-list", "")
    assert [f"00:06.0-{slot}" in listed for slot in range(5)] == [True] * 4 + [False]
    there = "control  control_lock  control_privileged  log"
    assert there in manual
    names = set(os.listdir(daemon.pipe_directory)) - {"nvidia-cuda-mps-control.pid"}  # of 550 and later
    assert "  ".join(sorted(names)) == there
    _reload(node, enabled=False, devices=SHARED)
    eventually(lambda: check(mode, shared) == f"{shared}\n", "the compute mode of before")
    assert "*** Total: 0 " in check("yunion-mps isolated-device-list", "")
    _reload(node, enabled=True)
    eventually(lambda: check(mode, mps) == f"{mps}\n", "that it is for MPS again")
    assert daemon.stop() == 0
    assert check(mode, shared) == f"{shared}\n", "or stopped for good"
