"""`yunion-mps show` and `gpus`: what they print, to the letter."""

from __future__ import annotations

import csv
import io
import json

import pytest
import yaml

from unit.cli.conftest import Cli
from unit.cli.test_list import HOST, IDS, P40

DEVICE = {
    "id": IDS[1],
    "dev_type": "NVIDIA_MPS",
    "model": "Tesla P40",
    "addr": "00:06.0-1",
    "vendor_device_id": "10de:1b38",
    "host_id": HOST,
    "numa_node": "-1",
    "device_path": P40,
    "pcie_info.lane_width": "16",
    "pcie_info.throughput": "15.76 GB/s",
    "pcie_info.transfer_rate_per_lane": "8GT/s",
    "pcie_info.version": "3.0",
    "index": "-1",
    "device_minor": "-1",
    "mps_memory_limit": "5760",
    "mps_memory_total": "23040",
    "mps_thread_percentage": "25",
    "gpu_uuid": P40,
    "state": "available",
    "reason": "",
    "budget_enforced": "false",
    "lease": "",
    "free": "true",
    "slot": "1",
    "domain": "host",
    "client_environment.CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "client_environment.CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    "client_environment.CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5760M",
    "client_environment.CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps/pipe",
    "client_environment.CUDA_VISIBLE_DEVICES": P40,
    "client_environment.YUNION_MPS_DEVICE": "00:06.0-1",
}
ENVIRONMENT = f"""\
Environment of a process that uses it:
  CUDA_DEVICE_ORDER=PCI_BUS_ID
  CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25
  CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M
  CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps/pipe
  CUDA_VISIBLE_DEVICES={P40}
  YUNION_MPS_DEVICE=00:06.0-1
"""
HINT = "yunion-mps: list the devices with: yunion-mps list\n"


@pytest.mark.parametrize("name", ["00:06.0-1", IDS[1], IDS[1][:3]], ids=["address", "id", "beginning"])
def test_a_device_is_shown_by_address_id_or_a_unique_beginning(cli: Cli, name: str) -> None:
    names, values = 32, 40
    border = f"+{'-' * (names + 2)}+{'-' * (values + 2)}+\n"
    shown = [(field, value) for field, value in DEVICE.items() if "client_environment" not in field]
    lines = [f"| {field.ljust(names)} | {value.ljust(values)} |\n" for field, value in shown]
    header = f"| {'Field'.ljust(names)} | {'Value'.ljust(values)} |\n"
    table = border + header + border + "".join(lines) + border
    assert cli.good("show", name) == table + ENVIRONMENT


def test_within_a_job_its_own_device_is_shown(cli: Cli) -> None:
    env = {**cli.env, "YUNION_MPS_DEVICE": "00:06.0-1"}
    assert cli("show", env=env) == (0, cli.good("show", "00:06.0-1"), "")
    assert cli("show", "00:06.0-2", env=env) == (0, cli.good("show", "00:06.0-2"), "")


def test_a_device_s_csv_has_the_same_lines(cli: Cli) -> None:
    rows = list(csv.reader(io.StringIO(cli.good("show", "00:06.0-1", "-o", "csv"))))
    assert rows == [["Field", "Value"], *(list(pair) for pair in DEVICE.items())]


def test_a_device_s_json_and_yaml_keep_what_belongs_together(cli: Cli) -> None:
    answer = json.loads(cli.good("show", "00:06.0-1", "-o", "json"))
    assert (answer["slot"], answer["numa_node"]) == (1, -1)
    assert answer["client_environment"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=5760M"
    assert yaml.safe_load(cli.good("show", "00:06.0-1", "-o", "yaml")) == answer


def test_a_beginning_of_several_devices_names_them(cli: Cli) -> None:
    assert cli("show", "00:06.0") == (
        1,
        "",
        (
            "yunion-mps: 00:06.0 names 4 devices (00:06.0-0, 00:06.0-1, 00:06.0-2, 00:06.0-3)\n"
            "yunion-mps: give more of the id or address\n"
        ),
    )


@pytest.mark.parametrize("name", ["00:06.0-9", "nothing", "é ü", "a/b", "../../x", "?", "%41", "-"])
def test_an_unknown_device_is_said_to_be_unknown(cli: Cli, name: str) -> None:
    assert cli("show", name) == (1, "", f"yunion-mps: there is no device {name}\n{HINT}")


def test_an_empty_device_is_wrong_usage(cli: Cli) -> None:
    words = "yunion-mps: DEVICE is empty.\nyunion-mps: see: yunion-mps show --help\n"
    assert cli("show", "") == (2, "", words)


def test_the_reference_case_s_gpu_is_listed(cli: Cli) -> None:
    assert cli.good("gpus", "-o", "csv") == (
        "Addr,Name,UUID,Memory_MiB,Compute_mode,Capability,MIG,Devices,Enforced,State,Reason\n"
        f"00:06.0,Tesla P40,{P40},23040,Exclusive_Process,6.1,,4,false,available,\n"
    )
    lines = cli.good("gpus").splitlines()
    assert lines[3] == (
        f"| 00:06.0 | Tesla P40 | {P40} | 23040      | Exclusive_Process | 6.1        |     | 4       "
        "| false    | available |"
    )
    assert len({len(line) for line in lines}) == 1


def test_a_broken_gpu_is_listed_with_its_reason(troubled: Cli) -> None:
    rows = {row[0]: row for row in csv.reader(io.StringIO(troubled.good("gpus", "-o", "csv")))}
    assert rows["10000:00:07.0"][1:] == [*[""] * 6, "0", "false", "unavailable", "the GPU is lost"]
    assert rows["81:00.0"][6:10] == ["true", "0", "true", "unavailable"]
    assert "MIG mode" in rows["81:00.0"][10]


def test_the_reasons_are_whole_below_the_table_of_gpus(troubled: Cli) -> None:
    lines = troubled.good("gpus").splitlines()
    assert "Reason" not in lines[1]
    reasons = {gpu["addr"]: gpu["reason"] for gpu in json.loads(troubled.good("gpus", "-o", "json"))["gpus"]}
    assert "MIG mode" in reasons["81:00.0"]
    below = lines[next(n for n in reversed(range(len(lines))) if lines[n].startswith("+--")) + 1 :]
    assert below == [f"{addr}: {reason}" for addr, reason in reasons.items() if reason]


def test_gpus_are_printed_as_json_and_yaml_too(troubled: Cli) -> None:
    answer = json.loads(troubled.good("gpus", "-o", "json"))
    assert (answer["total"], len(answer["gpus"])) == (4, 4)
    assert yaml.safe_load(troubled.good("gpus", "-o", "yaml")) == answer
