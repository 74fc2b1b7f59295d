"""GPUs that come, go, and change their places and drivers, as nvidia-smi, NVML, sysfs and udev show it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from simhost import SimHost, StateError
from unit.simhost.conftest import MakeHost, smi

FOUR = [{"kind": "a10", "pci": f"0000:0{number}:00.0"} for number in range(1, 5)]
BOARD = {"kind": "aspeed", "pci": "0000:02:00.0"}
OTHERS = [BOARD, {"kind": "amd", "pci": "0000:03:00.0"}, {"kind": "intel", "pci": "0000:80:00.0"}]


def listed(host: SimHost) -> list[str]:
    """Return the UUIDs that nvidia-smi lists."""
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", smi(host, "-L"))


def uuids(host: SimHost, *numbers: int) -> list[str]:
    return [host.gpus[number].uuid for number in numbers]


def ctl(host: SimHost, *words: object) -> None:
    host.run(["simhost-ctl", *words], check=True)


def renders(host: SimHost) -> dict[str, int]:
    """Return the numbers of render nodes by PCI address, from udev's links."""
    links = (host.root / "dev/dri/by-path").glob("pci-*-render")
    return {
        link.name[4:-7]: int(link.resolve(strict=True).name.removeprefix("renderD")) for link in sorted(links)
    }


def driver_of(host: SimHost, address: str) -> str | None:
    """Return the name of the driver to which sysfs' link leads; None without a link."""
    link = host.root / "sys/bus/pci/devices" / address / "driver"
    return link.resolve(strict=True).name if link.is_symlink() else None


def attributes(host: SimHost, address: str) -> dict[str, str]:
    folder = host.root / "sys/bus/pci/devices" / address
    names = ("vendor", "device", "class", "numa_node")
    return {name: (folder / name).read_text().strip() for name in names}


def test_each_gpu_has_a_link_to_the_nvidia_driver(make_host: MakeHost) -> None:
    host = make_host(FOUR)
    link = host.root / "sys/bus/pci/devices/0000:02:00.0/driver"
    assert os.readlink(link) == "../../../bus/pci/drivers/nvidia"
    assert (host.root / "sys/bus/pci/drivers/nvidia").is_dir()
    assert link.resolve(strict=True) == host.root / "sys/bus/pci/drivers/nvidia"


def test_a_gpu_of_vfio_leaves_nvml_and_stays_in_sysfs(make_host: MakeHost) -> None:
    host = make_host(FOUR)
    before = attributes(host, "0000:02:00.0")
    ctl(host, "bind", 1, "vfio-pci")
    assert listed(host) == uuids(host, 0, 2, 3)
    assert driver_of(host, "0000:02:00.0") == "vfio-pci"
    assert attributes(host, "0000:02:00.0") == before
    assert "0000:02:00.0" not in renders(host)
    assert not (host.root / "dev/dri/renderD129").exists()
    assert not (host.root / "dev/nvidia1").exists()
    ctl(host, "bind", 1, "none")
    assert driver_of(host, "0000:02:00.0") is None
    assert listed(host) == uuids(host, 0, 2, 3)
    ctl(host, "bind", 1, "nvidia")
    assert listed(host) == uuids(host, 0, 1, 2, 3)
    assert driver_of(host, "0000:02:00.0") == "nvidia"
    assert renders(host)["0000:02:00.0"] == 129


def test_a_removed_gpu_cannot_be_given_to_a_driver(make_host: MakeHost) -> None:
    host = make_host(FOUR)
    host.gpus[1].remove()
    with pytest.raises(StateError, match="GPU 1 is not on the bus"):
        host.gpus[1].bind("vfio-pci")
    assert "0000:02:00.0" not in os.listdir(host.root / "sys/bus/pci/devices")


def index_of(n: Any, uuid: str) -> int:
    index: int = n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(uuid))
    return index


@pytest.mark.parametrize("way", ["remove", "bind"])
def test_a_process_finds_a_gpu_again_only_after_the_last_shutdown(make_host: MakeHost, way: str) -> None:
    host = make_host(FOUR)
    with host.pynvml() as n:
        n.nvmlInit()
        n.nvmlInit()
        handles = [n.nvmlDeviceGetHandleByIndex(index) for index in range(4)]
        ctl(host, *(["remove", 1] if way == "remove" else ["bind", 1, "vfio-pci"]))
        ctl(host, *(["restore", 1] if way == "remove" else ["bind", 1, "nvidia"]))
        assert listed(host) == uuids(host, 0, 1, 2, 3)
        n.nvmlShutdown()
        n.nvmlInit()
        assert n.nvmlDeviceGetCount() == 4
        for call, argument in (
            (n.nvmlDeviceGetName, handles[1]),
            (n.nvmlDeviceGetHandleByIndex, 1),
            (n.nvmlDeviceGetHandleByUUID, host.gpus[1].uuid),
            (n.nvmlDeviceGetHandleByPciBusId, b"0000:02:00.0"),
        ):
            with pytest.raises(n.NVMLError_GpuIsLost):
                call(argument)
        assert n.nvmlDeviceGetUUID(handles[2]) == host.gpus[2].uuid
        assert index_of(n, host.gpus[2].uuid) == 2
        n.nvmlShutdown()
        n.nvmlShutdown()
        n.nvmlInit()
        assert n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1)) == host.gpus[1].uuid
        n.nvmlShutdown()


def test_a_process_does_not_see_a_gpu_that_is_added(make_host: MakeHost) -> None:
    host = make_host([{**FOUR[0], "present": False}, FOUR[1]])
    assert listed(host) == uuids(host, 1)
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        ctl(host, "restore", 0)
        assert listed(host) == uuids(host, 0, 1)
        assert n.nvmlDeviceGetCount() == 1
        assert n.nvmlDeviceGetUUID(handle) == host.gpus[1].uuid
        assert index_of(n, host.gpus[1].uuid) == 0
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetHandleByUUID(host.gpus[0].uuid)
        n.nvmlShutdown()
        n.nvmlInit()
        assert n.nvmlDeviceGetCount() == 2
        assert index_of(n, host.gpus[1].uuid) == 1
        n.nvmlShutdown()


def test_gpus_are_added_to_a_host_that_had_none(make_host: MakeHost) -> None:
    host = make_host({"gpus": [{"kind": "l40s", "pci": "0000:05:00.0", "present": False}]})
    assert "couldn't communicate with the NVIDIA driver" in smi(host)
    with pytest.raises(StateError, match="there is no GPU that no driver has"):
        host.load_driver()
    ctl(host, "restore", 0)
    assert driver_of(host, "0000:05:00.0") is None
    ctl(host, "driver", "on")
    assert listed(host) == uuids(host, 0)
    assert renders(host) == {"0000:05:00.0": 128}
    device_file = (host.root / "etc/yunion/host_container_device.yml").read_text()
    assert f"path: {host.gpus[0].uuid}\n" in device_file


def test_a_host_may_have_no_gpu(make_host: MakeHost) -> None:
    host = make_host({"gpus": []})
    assert "couldn't communicate with the NVIDIA driver" in smi(host)
    assert os.listdir(host.root / "sys/bus/pci/devices") == []
    assert (host.root / "etc/yunion/host_container_device.yml").read_text() == "devices: []\n"


def test_devices_of_other_vendors_are_in_sysfs_and_not_in_nvml(make_host: MakeHost) -> None:
    host = make_host({"gpus": FOUR[:1], "others": OTHERS})
    assert listed(host) == uuids(host, 0)
    seen = {address: attributes(host, address) for address in os.listdir(host.root / "sys/bus/pci/devices")}
    assert {address: (shown["vendor"], shown["class"]) for address, shown in seen.items()} == {
        "0000:01:00.0": ("0x10de", "0x030200"),
        "0000:02:00.0": ("0x1a03", "0x030000"),
        "0000:03:00.0": ("0x1002", "0x030000"),
        "0000:80:00.0": ("0x8086", "0x030000"),
    }
    assert [driver_of(host, address) for address in sorted(seen)] == ["nvidia", "ast", "amdgpu", "i915"]
    assert renders(host) == {"0000:01:00.0": 128, "0000:03:00.0": 129, "0000:80:00.0": 130}


def test_render_nodes_are_renumbered_in_the_order_of_all_devices(make_host: MakeHost) -> None:
    host = make_host({"gpus": [FOUR[0], FOUR[3]], "others": OTHERS})
    assert renders(host)["0000:04:00.0"] == 129
    ctl(host, "remove", 0)
    ctl(host, "renumber")
    assert renders(host) == {"0000:03:00.0": 128, "0000:04:00.0": 129, "0000:80:00.0": 130}
    ctl(host, "restore", 0)  # its number is taken: it gets the first that is free, as from the kernel
    assert renders(host)["0000:01:00.0"] == 131
    ctl(host, "renumber")
    assert [*renders(host).values()] == [128, 129, 130, 131]
    nodes = [name for name in os.listdir(host.root / "dev/dri") if name.startswith("renderD")]
    assert sorted(nodes) == ["renderD128", "renderD129", "renderD130", "renderD131"]


def test_without_nvidia_drm_only_other_vendors_have_nodes(make_host: MakeHost) -> None:
    host = make_host({"gpus": FOUR, "others": [{"kind": "amd", "pci": "0000:80:00.0"}]})
    before = renders(host)
    ctl(host, "drm", "off")
    assert renders(host) == {"0000:80:00.0": 132}
    assert not (host.root / "sys/module/nvidia_drm").exists()
    assert listed(host) == uuids(host, 0, 1, 2, 3)
    ctl(host, "drm", "on")
    assert renders(host) == before
    assert (host.root / "sys/module/nvidia_drm").is_dir()


def test_a_host_may_start_without_nvidia_drm(make_host: MakeHost) -> None:
    host = make_host({"driver": {"drm": False}, "gpus": FOUR})
    assert renders(host) == {}
    host.set_drm(loaded=True)
    assert [*renders(host).values()] == [128, 129, 130, 131]


def test_without_its_module_the_driver_is_not_loaded(make_host: MakeHost) -> None:
    host = make_host({"driver": {"loaded": False}, "gpus": FOUR[:2]})
    files = [host.root / name for name in ("proc/driver/nvidia", "sys/module/nvidia", "dev/nvidiactl")]
    assert "couldn't communicate with the NVIDIA driver" in smi(host)
    assert not [path for path in files if path.exists()]
    assert [driver_of(host, address) for address in ("0000:01:00.0", "0000:02:00.0")] == [None, None]
    with host.pynvml() as n, pytest.raises(n.NVMLError_DriverNotLoaded):
        n.nvmlInit()
    ctl(host, "driver", "on")
    assert listed(host) == uuids(host, 0, 1)
    assert all(path.exists() for path in files)
    ctl(host, "driver", "off")
    assert not [path for path in files if path.exists()]
    assert renders(host) == {}
    assert attributes(host, "0000:01:00.0")["vendor"] == "0x10de"


def test_a_loaded_module_takes_no_gpu_from_another_driver(make_host: MakeHost) -> None:
    host = make_host(FOUR[:2])
    ctl(host, "bind", 1, "vfio-pci")
    ctl(host, "driver", "off")
    ctl(host, "driver", "on")
    assert listed(host) == uuids(host, 0)
    assert driver_of(host, "0000:02:00.0") == "vfio-pci"


def test_what_the_driver_keeps_is_gone_after_it_was_unloaded(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}, {"kind": "h100"}])
    host.create_mig_devices(0, "1g.10gb")
    host.gpus[1].compute_mode = "exclusive_process"
    host.gpus[1].time_slice = "long"
    host.unload_driver()
    host.load_driver()
    assert host.gpus[0].mig_devices() == []
    assert host.gpus[0].mig
    assert (host.gpus[1].compute_mode, host.gpus[1].time_slice) == ("default", "default")
    assert len(host.create_mig_devices(0, "1g.10gb")) == 1


#: A process that keeps the library that it has loaded first, and tries to initialise it when it is told to.
_KEEPS_LIBRARY = """
import sys
import pynvml as n
for _ in sys.stdin:
    try:
        n.nvmlInit()
        print(n.nvmlSystemGetDriverVersion(), flush=True)
        n.nvmlShutdown()
    except n.NVMLError as error:
        print(error, flush=True)
"""


def test_a_process_needs_the_library_of_the_modules_version(make_host: MakeHost) -> None:
    host = make_host({"driver": {"version": "550.163.01"}, "gpus": FOUR[:1]})
    process = host.popen([sys.executable, "-I", "-c", _KEEPS_LIBRARY], stdin=-1)

    def says() -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    with process:
        assert says() == "550.163.01"
        ctl(host, "driver", "library", "570.133.20")  # an update that waits for the reboot
        assert says() == "550.163.01"
        assert "Driver/library version mismatch" in smi(host)
        ctl(host, "driver", "version", "570.133.20")
        assert says() == "RM has detected an NVML/RM version mismatch."
        assert "570.133.20" in smi(host)
        process.stdin.close()  # type: ignore[union-attr]
    assert "570.133.20" in (host.root / "proc/driver/nvidia/version").read_text()
    assert (host.root / "sys/module/nvidia/version").read_text() == "570.133.20\n"


def test_a_named_root_keeps_the_version_of_its_driver(tmp_path: Path) -> None:
    with SimHost.create(FOUR[:1], tmp_path / "h") as host:
        host.update_driver("570.133.20")
    with SimHost.create(None, tmp_path / "h") as again:
        assert "570.133.20" in smi(again)


def test_a_replaced_card_has_another_uuid_at_the_same_address(make_host: MakeHost) -> None:
    host = make_host(FOUR)
    before = listed(host)
    host.gpus[1].compute_mode = "exclusive_process"
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(1)
        ctl(host, "replace", 1)
        with pytest.raises(n.NVMLError_GpuIsLost):
            n.nvmlDeviceGetUUID(handle)
        n.nvmlShutdown()
    after = listed(host)
    assert after[1] not in before
    assert [after[0], *after[2:]] == [before[0], *before[2:]]
    assert after[1] == host.gpus[1].uuid
    assert host.gpus[1].description.address == "0000:02:00.0"
    assert host.gpus[1].compute_mode == "default"


def test_a_moved_card_has_its_uuid_at_another_address(make_host: MakeHost) -> None:
    host = make_host(FOUR)
    before = listed(host)
    ctl(host, "move", 0, "10003:41:00.0")
    assert listed(host) == [*before[1:], before[0]]
    shown = smi(host, "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader").splitlines()
    assert shown[-1].lower() == f"{before[0]}, 00010003:41:00.0".lower()
    assert driver_of(host, "10003:41:00.0") == "nvidia"
    assert "0000:01:00.0" not in os.listdir(host.root / "sys/bus/pci/devices")
    assert renders(host)["10003:41:00.0"] == 128
    with pytest.raises(StateError, match=r"there is already a device at 0000:02:00\.0"):
        host.gpus[0].move("0000:02:00.0")
