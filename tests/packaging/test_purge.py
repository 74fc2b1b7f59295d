"""What a purge removes, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.config import DEVICE_FILE_KEYS, KEYS
from yunion_mps.core.enums import ENTRY_TYPES
from yunion_mps.supervisor.domain_directories import OWN_DIRECTORIES

from .conftest import ROOT, Host
from .test_scriptlets import CLOUDPODS, NAMES, configuration, examples, files

__all__ = ["examples"]


def test_a_purge_removes_created_files_even_if_they_were_edited(host: Host) -> None:
    host.good("make_configuration")
    (host.root / "etc/host.conf").write_text("enable_cuda_mps: true\ncuda_mps_scope: gpu\n")
    assert host.good("purge") == []
    assert configuration(host) == {}
    assert not (host.root / "etc").exists()
    assert not (host.root / "state").exists()


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_purge_removes_the_empty_directory_that_was_made_at_boot(host: Host, is_empty: bool) -> None:
    made = host.root / "nvidia-mps"
    made.mkdir()
    if not is_empty:
        (made / "theirs").touch()
    host.good("purge")
    assert made.exists() is not is_empty


def test_the_pipe_directorys_parent_is_made_at_boot_only() -> None:
    """Before any user can log in; an installation does not make it, because the daemon does."""
    rules = (ROOT / "packaging/systemd/yunion-mps-directory.tmpfiles").read_text().splitlines()
    assert [rule for rule in rules if rule[0] != "#"] == ["d! /tmp/nvidia-mps 0755 root root -"]
    assert all(KEYS[key].default.startswith("/tmp/nvidia-mps/") for key in OWN_DIRECTORIES)


@pytest.mark.parametrize("written", ["{}: 1", "{} = 1", '"{}": 1'])
@pytest.mark.parametrize("key", KEYS)
def test_a_purge_removes_a_file_with_any_key_of_ours(host: Host, key: str, written: str) -> None:
    host.good("make_configuration")
    (host.root / "etc/host.conf").write_text(f"{written.format(key)}\n{key.replace('_', '-')}: 1\n")
    assert host.good("purge") == []


@pytest.mark.parametrize("entry", ["  type: {}\n", "- {{type: '{}', path: 0}}\n", '  "type" : "{}"\n'])
@pytest.mark.parametrize("type_", ENTRY_TYPES.values())
def test_a_purge_removes_a_file_with_any_type_of_ours(host: Host, type_: str, entry: str) -> None:
    host.good("make_configuration")
    with (host.root / "etc/host_container_device.yml").open("a") as file:
        file.write(entry.format(type_))
    assert host.good("purge") == []
    assert configuration(host) == {}


@pytest.mark.parametrize(
    ("name", "added", "foreign"),
    [
        ("host.conf", CLOUDPODS, "hypervisor"),
        ("host.conf", '"hypervisor": kvm\n', "hypervisor"),
        ("host.conf", "over_budget_of_another: 1\n", "over_budget_of_another"),
        ("host_container_device.yml", "- path: /dev/va0\n  type: VASTAITECH_GPU\n", "VASTAITECH_GPU"),
        ("host_container_device.yml", "- {path: 0, type: NVIDIA_MPS_2}\n", "NVIDIA_MPS_2"),
        ("host.conf", "log.level: 5\n", "log.level"),
        ("host.conf", "  hostname: x\n", "  hostname: x"),
        ("host.conf", "enable_cuda_mps true\n", "enable_cuda_mps true"),
        ("host.conf", "{enable_cuda_mps: true, hostname: x}\n", "{enable_cuda_mps: true, hostname: x}"),
        ("host_container_device.yml", "other_agent_key: [1]\n", "other_agent_key"),
        ("host_container_device.yml", "- path: /dev/va0\n  type:\n    GPU_HPC\n", "type"),
        ("host_container_device.yml", "- {path: 0, vendor: x, type: NVIDIA_MPS}\n", "vendor"),
    ],
)
def test_a_purge_keeps_a_file_that_other_software_uses(
    host: Host, name: str, added: str, foreign: str
) -> None:
    host.good("make_configuration")
    path = host.root / "etc" / name
    path.write_text(path.read_text() + added)
    why = f"{path} was not removed: it may have lines of other software: {foreign}"
    assert host.good("purge") == [f"yunion-mps-daemon: {why}"]
    assert list(configuration(host)) == [name]


@pytest.mark.parametrize("key", DEVICE_FILE_KEYS)
def test_a_purge_removes_a_device_file_with_any_key_of_ours(host: Host, key: str) -> None:
    host.good("make_configuration")
    value = "NVIDIA_MPS" if key == "type" else "/dev/dri/by-path/pci-0000:00:06.0-render"
    with (host.root / "etc/host_container_device.yml").open("a") as file:
        file.write(f"- {key}: {value}\n- {{'{key.replace('_', '-')}': {value}}}\n")
    assert host.good("purge") == []
    assert configuration(host) == {}


def test_a_purge_keeps_a_file_that_another_package_owns(host: Host) -> None:
    host.program("dpkg-query", "exit 0")
    host.good("make_configuration")
    host.good("purge")
    assert set(configuration(host)) == set(NAMES)


def test_a_purge_removes_our_cdi_files_only(host: Host) -> None:
    devices = host.root / "run/cdi"
    files(devices, "yunion-mps.json", "yunion-mps-lease-7c1f0e7a.json", "nvidia.yaml", "yunion-mps.json.bak")
    assert host.good("purge") == []
    assert sorted(path.name for path in devices.iterdir()) == ["nvidia.yaml", "yunion-mps.json.bak"]


def recorded(host: Host, *lines: str) -> None:
    (host.root / "state").mkdir(exist_ok=True)
    (host.root / "state/directories").write_text("".join(f"{line}\n" for line in lines))


def test_a_purge_removes_mps_files_by_name_in_recorded_directories(host: Host) -> None:
    mps = host.root / "mps"
    recorded(
        host,
        f"above {mps}",
        f"made {mps}/pipe",
        f"made {mps}/pipe/GPU-1",
        f"made {mps}/log",
        f"used {mps}/old",
    )
    files(mps / "pipe/GPU-1", "control", "control_lock")
    files(mps / "log", "control.log", "server.log.1", "mine")
    files(mps / "old", "server.log")
    assert host.good("purge") == []
    left = [str(path.relative_to(mps)) for path in sorted(mps.rglob("*"))]
    assert left == ["log", "log/mine", "old"]


@pytest.mark.parametrize("is_used", [True, False])
def test_a_purge_keeps_foreign_logs_and_a_directory_that_was_never_used(host: Host, is_used: bool) -> None:
    logs = host.root / "srv/logs"
    (host.root / "etc/host.conf").write_text(f"cuda_mps_pipe_directory: /\ncuda_mps_log_directory: {logs}\n")
    if is_used:
        recorded(host, f"theirs {logs}/server.log", f"used {logs}")
    files(logs, "server.log", "control.log")
    files(logs / "kafka", "server.log")
    host.good("purge")
    kept = [] if is_used else ["control.log"]
    assert sorted(path.name for path in logs.iterdir()) == [*kept, "kafka", "server.log"]
    assert (logs / "kafka/server.log").exists()


@pytest.mark.parametrize("mark", [{}, {"YUNION_MPS_DOMAIN": "host"}])
def test_a_purge_keeps_directories_of_running_control_daemons(host: Host, mark: dict[str, str]) -> None:
    pipe = host.root / "pipe"
    host.control_daemon(5, "-f", CUDA_MPS_PIPE_DIRECTORY=str(pipe), **mark)
    recorded(host, f"made {pipe}")
    files(pipe, "control")
    assert f"yunion-mps-daemon: {pipe} was not removed: a control daemon uses it" in host.good("purge")
    assert (pipe / "control").exists()
    assert (host.root / "state").exists() is bool(mark)


def test_a_purge_keeps_the_record_of_unrestored_compute_modes(host: Host) -> None:
    running = host.root / "run/yunion-mps"
    files(running, "daemon.lock")
    note = running / "former-compute-modes.json"
    note.write_text('{"boot_id": "1-2", "modes": {"GPU-a-1": "Default", "GPU-b-2": "Prohibited"}}')
    how = "differs from the original; restore it: nvidia-smi -i"
    assert host.good("purge") == [
        f"yunion-mps-daemon: the compute mode of GPU-a-1 {how} GPU-a-1 -c DEFAULT",
        f"yunion-mps-daemon: the compute mode of GPU-b-2 {how} GPU-b-2 -c PROHIBITED",
    ]
    assert list(running.iterdir()) == [note]


@pytest.mark.parametrize("place", ["link", "link/below"])
def test_a_purge_follows_no_symlink(host: Host, tmp_path: Path, place: str) -> None:
    for directory in (tmp_path / "precious", tmp_path / "precious/below"):
        files(directory, "log")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    recorded(host, f"made {tmp_path}/{place}")
    host.good("purge")
    assert (tmp_path / "precious/log").exists()
    assert (tmp_path / "precious/below/log").exists()


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("host.conf", "# Cloudpods: none\n--- # hostname: x\n"),
        ("host_container_device.yml", "  # its type: VASTAITECH_GPU would be Cloudpods'\n"),
    ],
)
def test_a_purge_removes_a_file_with_comments(host: Host, name: str, added: str) -> None:
    host.good("make_configuration")
    with (host.root / "etc" / name).open("a") as file:
        file.write(added)
    assert host.good("purge") == []
    assert configuration(host) == {}
