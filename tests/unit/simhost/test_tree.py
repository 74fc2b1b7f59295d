"""The files of a simulated host."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from simhost import SimHost, StateError
from unit.simhost.conftest import MakeHost


def attributes(host: SimHost, address: str) -> dict[str, str]:
    folder = host.root / "sys/bus/pci/devices" / address
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_reference_case_is_as_the_kernel_shows_it(make_host: MakeHost) -> None:
    host = make_host()
    shown = attributes(host, "0000:00:06.0")
    assert shown["vendor"] == "0x10de\n"
    assert shown["device"] == "0x1b38\n"
    assert shown["class"] == "0x030200\n"
    assert shown["numa_node"] == "-1\n"
    assert (shown["max_link_speed"], shown["max_link_width"]) == ("8.0 GT/s PCIe\n", "16\n")
    driver = host.root / "sys/bus/pci/devices/0000:00:06.0/driver"
    assert driver.resolve() == (host.root / "sys/bus/pci/drivers/nvidia").resolve()
    by_path = host.root / "dev/dri/by-path"
    assert {path.name: os.readlink(path) for path in by_path.iterdir()} == {
        "pci-0000:00:06.0-card": "../card0",
        "pci-0000:00:06.0-render": "../renderD128",
    }
    nodes = {path.name for path in (host.root / "dev").iterdir()}
    assert nodes == {"dri", "nvidia0", "nvidiactl", "shm", "nvidia-uvm"}
    assert (host.root / "etc/machine-id").read_text().strip().isalnum()
    assert "535.261.03" in (host.root / "proc/driver/nvidia/version").read_text()
    assert (host.root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert len(str(host.root)) < 24  # a Unix socket's path ends at 107 bytes


def test_configuration_shares_every_gpu(make_host: MakeHost) -> None:
    host = make_host(
        [{"kind": "tesla-p40", "virtual_number": 8}, {"kind": "l4", "render": None}, {"kind": "t4"}]
    )
    assert yaml.safe_load((host.root / "etc/yunion/host.conf").read_text())["enable_cuda_mps"] is True
    assert yaml.safe_load((host.root / "etc/yunion/host_container_device.yml").read_text()) == {
        "devices": [
            {"path": "/dev/dri/renderD128", "type": "NVIDIA_MPS", "virtual_number": 8},
            {"path": host.gpus[1].uuid, "type": "NVIDIA_MPS", "virtual_number": 4},
            {"path": "/dev/dri/renderD130", "type": "NVIDIA_MPS", "virtual_number": 4},
        ]
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
def test_temporary_root_is_removed_when_the_host_cannot_be_made(make_host: MakeHost) -> None:
    create = "from simhost import SimHost; SimHost.create()"
    steps = 'mount -t tmpfs -o nr_inodes=10 t /dev/shm && "$@"; find /dev/shm -mindepth 1'
    done = make_host().run(
        ["unshare", "--mount", "sh", "-c", steps, "sh", sys.executable, "-c", create],
        cwd=Path(__file__).parents[2],
    )
    assert re.search(r"OSError: .* No space left on device: '/dev/shm/sim\.\w+/", done.stderr), done.stderr
    assert done.stdout == ""


def test_named_root_keeps_its_state_and_edits(tmp_path: Path) -> None:
    root = tmp_path / "h"
    configuration = root / "etc/yunion/host.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("enable_cuda_mps: false\n")
    with SimHost.create([{"kind": "t4"}], root) as host:
        host.gpus[0].compute_mode = "prohibited"
    with SimHost.create(None, root) as again:
        assert again.gpus[0].compute_mode == "prohibited"
        assert again.gpus[0].description.name == "Tesla T4"
    assert configuration.read_text() == "enable_cuda_mps: false\n"
    with pytest.raises(StateError, match="holds a host of another description"):
        SimHost.create([{"kind": "l4"}], root)


def test_environment_is_not_the_outer_ones(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {"PYTHONPATH", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "NOTIFY_SOCKET", "YUNION_MPS_SOCKET"}
    for name in foreign:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LANG", "C")
    host = make_host()
    assert host.env["YUNION_MPS_ROOT"] == str(host.root)
    assert host.env["LANG"] == "C"
    assert not foreign & set(host.env)


def test_library_finds_its_state_without_an_environment(make_host: MakeHost) -> None:
    host = make_host()
    env = {"LD_LIBRARY_PATH": host.env["LD_LIBRARY_PATH"]}
    assert host.run(["nvidia-smi", "-L"], env=env).stdout.startswith("GPU 0: Tesla P40")
