"""The devices that a host serves: the design's reference case to the letter, and 32 and 64 mixed GPUs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon, control_daemons
from simhost import SimGpu
from simhost.tree import MACHINE_ID

GPU = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
#: What the design says: a host id is derived from the machine id, a device's id from host, GPU and slot.
HOST_ID = uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_DNS, "yunion-mps"), MACHINE_ID)
LINK = '{"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"}'


def device_id(slot: int) -> str:
    return str(uuid.uuid5(HOST_ID, f"{GPU}/{slot}"))


def test_every_field_of_the_devices_is_as_designed(ready_daemon: Daemon) -> None:
    done = ready_daemon.host.run(["yunion-mps", "isolated-device-list", "--output", "json"], check=True)
    answer = json.loads(done.stdout)
    assert answer == {
        "isolated_devices": [
            {
                "id": device_id(slot),
                "dev_type": "NVIDIA_MPS",
                "model": "Tesla P40",
                "addr": f"00:06.0-{slot}",
                "vendor_device_id": "10de:1b38",
                "host_id": str(HOST_ID),
                "numa_node": -1,
                "device_path": GPU,
                "pcie_info": json.loads(LINK),
                "index": -1,
                "device_minor": -1,
                "mps_memory_limit": 5760,
                "mps_memory_total": 23040,
                "mps_thread_percentage": 25,
                "memory_mib": 5760,
                "gpu_memory_mib": 23040,
                "thread_percentage": 25,
                "gpu_uuid": GPU,
                "state": "free",
                "reason": "",
                "reason_code": "",
                "budget_enforced": False,
                "sharing": "mps",
                "mig_profile": None,
                "reserved_for": None,
                "free_for": None,
                "not_free_for": [],
                "lease": None,
                "holder": None,
            }
            for slot in range(4)
        ],
        "total": 4,
        "limit": 0,
        "offset": 0,
    }
    assert '"mps_thread_percentage": 25,' in done.stdout, "a whole number, not 25.0"
    assert ready_daemon.get("/v1/devices?limit=0") == (200, answer)


KINDS = (
    "tesla-p40", "a100", "h100", "v100", "t4", "tesla-p100", "l40s", "b200", "rtx-2080ti", "h200", "a10",
    "l4", "tesla-m60", "rtx-pro-6000", "rtx-5090", "tesla-k80",
)  # fmt: skip
NUMBERS = (4, 7, 3, 16, 1, 2, 10, 5, 12, 6)


def gpu_descriptions(count: int) -> list[dict[str, Any]]:
    """So many GPUs; every kind and many numbers come up, and the last lie in another PCI domain."""
    gpus: list[dict[str, Any]] = []
    for index in range(count):
        gpu: dict[str, Any] = {
            "kind": KINDS[index % len(KINDS)],
            "virtual_number": NUMBERS[index % len(NUMBERS)],
            "numa_node": index % 2,
        }
        if index >= count - 2:
            gpu["pci"] = f"10000:e{index % 10}:00.0"
        gpus.append(gpu)
    return gpus


def percentage_of_share(number: int) -> float:
    """100 / n with one decimal, rounded down."""
    return 1000 // number / 10


def address(gpu: SimGpu) -> str:
    return gpu.description.address.removeprefix("0000:")


def shown_limit(memory_mib: int) -> str:
    return f"{memory_mib // 1024}G" if memory_mib >= 1024 else f"{memory_mib}M"


def check_devices(daemon: Daemon, gpus: Sequence[SimGpu]) -> None:
    """Every device of every GPU, with its own budget, in the order of PCI addresses and slots."""
    code, answer = daemon.get("/v1/devices?limit=0")
    assert code == 200
    expected = [
        {
            "addr": f"{address(gpu)}-{slot}",
            "gpu_uuid": gpu.uuid,
            "model": gpu.description.name,
            "numa_node": gpu.description.numa_node,
            "gpu_memory_mib": gpu.description.memory_mib,
            "memory_mib": gpu.description.memory_mib // gpu.description.virtual_number,
            "thread_percentage": percentage_of_share(gpu.description.virtual_number),
            "budget_enforced": gpu.description.capability >= (7, 0),
            "state": "free",
        }
        for gpu in gpus
        for slot in range(gpu.description.virtual_number)
    ]
    devices = answer["isolated_devices"]
    assert [{key: device[key] for key in expected[0]} for device in devices] == expected
    assert answer["total"] == len(expected)
    assert len({device["id"] for device in devices}) == len(expected)


def check_modes(daemon: Daemon, gpus: Sequence[SimGpu], mode: str) -> None:
    query = ["nvidia-smi", "--query-gpu=gpu_uuid,compute_mode", "--format=csv,noheader"]
    lines = daemon.host.run(query, check=True).stdout.splitlines()
    assert sorted(lines) == sorted(f"{gpu.uuid}, {mode}" for gpu in gpus)


def limits(daemon: Daemon, count: int, pipe_directory: Path) -> list[str]:
    """What the control daemon answers for its percentage and for so many devices."""
    commands = [f"get_default_device_pinned_mem_limit {device}" for device in range(count)]
    return daemon.control("get_default_active_thread_percentage", *commands, pipe_directory=pipe_directory)


def in_pci_order(gpus: Sequence[SimGpu]) -> list[SimGpu]:
    return sorted(gpus, key=lambda gpu: gpu.description.pci)


def test_one_domain_serves_32_gpus_with_their_own_memory_limits(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host(gpu_descriptions(32))
    daemon = make_daemon(host).start().wait_ready()
    gpus = in_pci_order(host.gpus)
    check_devices(daemon, gpus)
    check_modes(daemon, gpus, "Exclusive_Process")
    memory = [gpu.description.memory_mib // gpu.description.virtual_number for gpu in gpus]
    largest = max(percentage_of_share(gpu.description.virtual_number) for gpu in gpus)
    assert limits(daemon, 32, daemon.pipe_directory) == [f"{largest:.1f}", *map(shown_limit, memory)]
    (domain,) = daemon.status()["domains"]
    assert domain["gpus"] == [gpu.uuid for gpu in gpus], "CUDA's order is that of PCI addresses"
    assert domain["memory_limits_mib"] == memory
    assert daemon.stop() == 0
    check_modes(daemon, gpus, "Default")


def test_with_a_domain_for_each_of_64_gpus_each_has_its_own_limits(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host(gpu_descriptions(64))
    daemon = make_daemon(host)
    daemon.configure(cuda_mps_scope="gpu")
    daemon.start().wait_ready()
    gpus = in_pci_order(host.gpus)
    check_devices(daemon, gpus)
    check_modes(daemon, gpus, "Exclusive_Process")
    domains = daemon.status()["domains"]
    assert [domain["name"] for domain in domains] == [address(gpu) for gpu in gpus]
    assert len({domain["pid"] for domain in domains}) == 64
    for gpu in gpus:
        number = gpu.description.virtual_number
        assert limits(daemon, 2, daemon.pipe_directory / gpu.uuid) == [
            f"{percentage_of_share(number):.1f}",
            shown_limit(gpu.description.memory_mib // number),
        ]
    assert daemon.notifications.count("READY=1") == 1
    assert daemon.stop() == 0
    assert control_daemons(host.root) == []
    check_modes(daemon, gpus, "Default")
