"""The command line on a whole host, with the real daemon and control daemon, and without them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from integration.conftest import MakeHost
from integration.daemon_host import Daemon
from simhost import SimHost

UUID = "[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
GPU = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
LINK = '{"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"}'
HEADER = "ID,Dev_type,Model,Addr,Vendor_device_id,Host_id,numa_node,Device_path,PCIE_Info,Index,Device_minor"
CONFIG_HINT = "yunion-mps: fix these lines, then run: yunion-mps config check\n"


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


def test_every_cell_of_the_reference_case_is_as_cloudpods_has_it(ready: Daemon) -> None:
    *table, footer = printed(ready.host, "isolated-device-list").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line[0] == "|"]
    assert ",".join(cells[0]) == HEADER
    ids, hosts = {row[0] for row in cells[1:]}, {row[5] for row in cells[1:]}
    assert (len(ids), len(hosts)) == (4, 1)
    assert all(re.fullmatch(UUID, found) for found in ids | hosts)
    for slot, row in enumerate(cells[1:]):
        assert row[1:5] == ["NVIDIA_MPS", "Tesla P40", f"00:06.0-{slot}", "10de:1b38"]
        assert row[6:] == ["-1", GPU, LINK, "-1", "-1"]
    assert footer == "*** Total: 4 Pages: 1 Limit: 20 Offset: 0 Page: 1 ***"


def test_each_device_of_the_reference_case_has_5760_mib_and_25_percent(ready: Daemon) -> None:
    devices = json.loads(printed(ready.host, "isolated-device-list", "-o", "json"))["isolated_devices"]
    assert devices == ready.get("/v1/devices")[1]["isolated_devices"]
    cloudpods = ("mps_memory_limit", "mps_memory_total", "mps_thread_percentage")
    for names in (cloudpods, ("memory_mib", "gpu_memory_mib", "thread_percentage")):
        assert [tuple(device[name] for name in names) for device in devices] == [(5760, 23040, 25)] * 4
    assert json.loads(printed(ready.host, "list", "-o", "json"))["isolated_devices"] == devices


def test_show_gives_the_environment_that_leads_to_the_real_control_daemon(ready: Daemon) -> None:
    out = printed(ready.host, "show", "00:06.0-1")
    environment = out.split("Environment variables for processes on this device:\n")[1]
    assert environment == (
        "  CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
        "  CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\n"
        "  CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M\n"
        f"  CUDA_MPS_PIPE_DIRECTORY={ready.pipe_directory}\n"
        f"  CUDA_VISIBLE_DEVICES={GPU}\n"
        "  YUNION_MPS_DEVICE=00:06.0-1\n"
    )
    assert (ready.pipe_directory / "control").is_socket()


def test_status_names_the_processes_that_run(ready: Daemon) -> None:
    out = printed(ready.host, "status")
    assert out.startswith("State:    ready\n")
    assert re.search(rf"^Daemon:   \S+, PID {ready.pid}, up ", out, re.MULTILINE)
    domain = rf"^host +ready +{ready.control_pid()} +0 +1  5760 MiB, 25 % +"
    assert re.search(domain, out, re.MULTILINE)


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


def test_config_show_says_where_every_value_stands(make_host: MakeHost) -> None:
    host = make_host()
    (host.root / "etc/yunion/host.conf").write_text("# ours\ncuda_mps_scope: gpu\nenable_cuda_mps: true\n")
    table = rows(printed(host, "config", "show", "-o", "csv"))
    shown = {name: (value, place) for name, value, place in table}
    files = host.root / "etc/yunion"
    assert shown["enable_cuda_mps"] == ("true", f"{files}/host.conf:3")
    assert shown["cuda_mps_scope"] == ("gpu", f"{files}/host.conf:2")
    assert shown["cuda_mps_replicas"] == ("10", "default")
    assert shown["devices"] == (
        "/dev/dri/renderD128: 4 equal devices",
        f"{files}/host_container_device.yml:2",
    )


def test_config_check_tells_every_problem_of_both_files_and_exits_with_6(make_host: MakeHost) -> None:
    host = make_host()
    files = host.root / "etc/yunion"
    lines = "enable_cuda_mps: yes please\ncuda_mps_scop: gpu\ncuda_mps_replicas: 0\n"
    (files / "host.conf").write_text(lines)
    (files / "host_container_device.yml").write_text(
        "devices:\n- path: /dev/dri/renderD200\n  type: NVIDIA_MPS\n  virtual_number: '4'\n"
    )
    code, words = failed(host, "config", "check")
    *problems, hint = words.splitlines(keepends=True)
    assert (code, hint) == (6, CONFIG_HINT)
    places = [problem.split(": ")[1] for problem in problems]
    conf, devices = f"{files}/host.conf", f"{files}/host_container_device.yml"
    assert places[:4] == [f"{conf}:1", f"{conf}:2", f"{conf}:3", f"{devices}:4"]
    assert "unknown key cuda_mps_scop (did you mean cuda_mps_scope?)\n" in problems[1]
    assert [problem.endswith(" [invalid_configuration]\n") for problem in problems] == [False] * (
        len(problems) - 1
    ) + [True]


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


def test_with_mps_switched_off_the_commands_say_why_there_is_nothing(make_host: MakeHost) -> None:
    with Daemon(make_host()) as daemon:
        daemon.write_host_conf({"enable_cuda_mps": False})
        assert printed(daemon.host, "config", "check") == (
            f"The configuration is valid:\n{printed(daemon.host, 'config', 'show')}"
            "MPS is disabled: enable_cuda_mps is false.\n"
        )
        daemon.start().wait_ready()
        footer = printed(daemon.host, "isolated-device-list").splitlines()[-1]
        assert footer == "*** Total: 0 Pages: 0 Limit: 20 Offset: 0 Page: 1 ***"
        state, notice = printed(daemon.host, "status").splitlines()[:2]
        conf = Path(daemon.host.root) / "etc/yunion/host.conf"
        assert state == "State:    disabled"
        assert notice == f"Notice:   MPS is disabled: enable_cuda_mps is false in {conf}"


def test_a_stopped_daemon_is_said_to_be_stopped(make_host: MakeHost) -> None:
    with Daemon(make_host()) as daemon:
        daemon.start().wait_ready()
        assert daemon.stop() == 0
        code, words = failed(daemon.host, "list")
        assert code == 3
        why = f"the daemon is not running: {daemon.socket_path} does not exist [daemon_unreachable]"
        assert words.startswith(f"yunion-mps: {why}\n")
        daemon.start().wait_ready()
        daemon.kill()
        code, words = failed(daemon.host, "list")
        why = f"the daemon is not running: nothing is listening on {daemon.socket_path} [daemon_unreachable]"
        assert (code, words.splitlines()[0]) == (3, f"yunion-mps: {why}")
