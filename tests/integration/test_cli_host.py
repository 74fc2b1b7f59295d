"""The command line on a whole host, with the real daemon and control daemon, and without them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

import pytest
import yaml

from integration.conftest import MakeHost
from integration.daemon_host import Daemon
from simhost import SimHost


@pytest.fixture(scope="module")
def ready() -> Iterator[Daemon]:
    with SimHost.create() as host, Daemon(host) as daemon:
        yield daemon.start().wait_ready()


def printed(host: SimHost, *arguments: str) -> str:
    done = host.run(["yunion-mps", *arguments])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def failed(host: SimHost, *arguments: str) -> tuple[int, str]:
    """The exit status and the words of a command that fails."""
    done = host.run(["yunion-mps", *arguments])
    assert done.stdout == ""
    return done.returncode, done.stderr


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_gpus_says_what_nvidia_smi_says(ready: Daemon) -> None:
    fields = "pci.bus_id,gpu_name,gpu_uuid,memory.total,compute_mode"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    told = ready.host.run(command, check=True).stdout.strip().split(", ")
    row = dict(zip(*rows(printed(ready.host, "gpus", "-o", "csv"))))
    names = ("name", "uuid", "memory_mib", "compute_mode")
    assert [f"00000000:{row['addr']}", *(row[name] for name in names)] == told
    assert (row["devices"], row["budget_enforced"], row["state"]) == ("4", "false", "available")


@pytest.mark.parametrize("command", ["show", "check"])
def test_the_configuration_is_the_same_as_json_and_yaml_and_csv_too(ready: Daemon, command: str) -> None:
    answer = json.loads(printed(ready.host, "config", command, "--output", "json"))
    assert yaml.safe_load(printed(ready.host, "config", command, "-o", "yaml")) == answer
    table = rows(printed(ready.host, "config", command, "-o", "csv"))
    assert len({len(row) for row in table}) == 1
    assert len(table) > 1


def test_config_check_needs_no_daemon_and_changes_nothing(make_host: MakeHost) -> None:
    host = make_host()
    before = sorted(str(path) for path in host.root.rglob("*"))
    shown = printed(host, "config", "show")
    assert "\ncuda_mps_replicas  " in shown
    assert printed(host, "config", "check") == f"The configuration is valid:\n{shown}{PLAN}"
    assert host.gpus[0].compute_mode == "default"
    assert sorted(str(path) for path in host.root.rglob("*")) == before


PLAN = """\
The daemon would divide the GPUs as follows:
GPU      NAME       DEVICES    MEMORY  SM %  COMPUTE MODE                  DOMAIN
00:06.0  Tesla P40        4  5760 MiB    25  Default -> Exclusive_Process  host
00:06.0: budgets are not enforced: the GPU is older than Volta
Control daemon host: 1 GPU, /tmp/nvidia-mps/pipe
"""


@pytest.mark.parametrize("command", ["show", "check"])
def test_without_a_file_the_configuration_is_bad(make_host: MakeHost, command: str) -> None:
    host = make_host()
    missing = host.root / "etc/yunion/host.conf"
    missing.unlink()
    code, words = failed(host, "config", command)
    assert code == 6
    assert words == (
        f"yunion-mps: {missing}: cannot be read (No such file or directory): "
        f"copy the example: cp /usr/share/yunion-mps/host.conf {missing} [invalid_configuration]\n"
        "yunion-mps: then run: yunion-mps config check\n"
    )


def test_config_check_without_a_driver_fails_with_1_and_says_so(make_host: MakeHost) -> None:
    host = make_host()
    host.hide_library()
    assert failed(host, "config", "check") == (
        1,
        (
            "yunion-mps: no NVIDIA driver: its library libnvidia-ml.so.1 is not installed [driver_missing]\n"
            "yunion-mps: install the NVIDIA driver with its libraries, then check it with: nvidia-smi\n"
        ),
    )
