"""The files of a simulated host: /sys, /dev, /proc and /etc under one root, as a real host has them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .catalog import VENDOR
from .description import GpuDescription, HostDescription, OtherDescription, Pci, address_of

MACHINE_ID = "5c3f2b1de4a94f60b7c8d9e0f1a2b3c4"

_FOLDERS = (
    "bin", "dev/dri/by-path", "dev/shm", "etc/yunion", "lib", "proc/driver", "run",
    "sys/bus/pci/devices", "sys/bus/pci/drivers", "sys/module", "tmp", "var/lib", "var/log",
)  # fmt: skip
_DRIVER_NODES = ("nvidiactl", "nvidia-uvm")
_DRM_MODULE = "sys/module/nvidia_drm"
_DRIVER = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Fri Jun 13 09:12:41 UTC 2025
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""
#: PCI Express: GT/s a lane of each generation, as the kernel prints it.
_LINK_SPEEDS = {3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}
_HOST_CONF = """\
# The simulated host's; Cloudpods' host agent owns most keys of the real one.
enable_cuda_mps: true
container_device_config_file: /etc/yunion/host_container_device.yml
"""


def write_tree(root: Path, host: HostDescription) -> None:
    """Make the tree of a host without devices; configuration files that are there stay as they are."""
    for folder in _FOLDERS:
        os.makedirs(root / folder, exist_ok=True)
    os.chmod(root / "tmp", 0o1777)
    divided = ((_path_of(gpu), gpu.virtual_number) for gpu in host.gpus)
    _write(root / "etc/machine-id", f"{MACHINE_ID}\n")
    _write(root / "etc/yunion/host.conf", _HOST_CONF)
    _write(root / "etc/yunion/host_container_device.yml", device_file(divided))
    (root / "dev/shm").chmod(0o1777)


def load_driver(root: Path, version: str, minors: int) -> None:
    """Make the files of the kernel module nvidia, for GPUs whose minor numbers are below `minors`."""
    os.makedirs(root / "sys/bus/pci/drivers/nvidia", exist_ok=True)
    os.makedirs(root / "proc/driver/nvidia/capabilities/mig", exist_ok=True)
    for folder in ("sys/module/nvidia", "proc/driver/nvidia-caps", "dev/nvidia-caps"):
        os.makedirs(root / folder, exist_ok=True)
    _write(root / "sys/module/nvidia/version", f"{version}\n")
    _write(root / "proc/driver/nvidia/version", _DRIVER.format(version=version))
    for node in _DRIVER_NODES:
        _node(root / "dev" / node)
    _write(root / "proc/driver/nvidia-caps/mig-minors", _mig_minors(minors))
    for name, minor, mode in (("config", 1, 0o400), ("monitor", 2, 0o444)):
        access = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        _write(root / "proc/driver/nvidia/capabilities/mig" / name, access)
        _write(root / f"dev/nvidia-caps/nvidia-cap{minor}", "")


def unload_driver(root: Path) -> None:
    """Take away what `load_driver` has made, as if the module had not been loaded since the boot."""
    for folder in ("sys/module/nvidia", "sys/bus/pci/drivers/nvidia", "dev/nvidia-caps"):
        shutil.rmtree(root / folder, ignore_errors=True)
    for folder in ("proc/driver/nvidia", "proc/driver/nvidia-caps"):
        shutil.rmtree(root / folder, ignore_errors=True)
    for node in _DRIVER_NODES:
        (root / "dev" / node).unlink(missing_ok=True)


def load_drm(root: Path) -> None:
    """Make the file of the kernel module nvidia-drm."""
    os.makedirs(root / _DRM_MODULE, exist_ok=True)


def unload_drm(root: Path) -> None:
    shutil.rmtree(root / _DRM_MODULE, ignore_errors=True)


def _mig_minors(minors: int) -> str:
    """Return the table of the minors of /dev/nvidia-caps/*; libnvidia-ml/access.c counts the same way."""
    names = ["config", "monitor"]
    for gpu in range(minors):
        for instance in range(15):
            place = f"gpu{gpu}/gi{instance}"
            names += [f"{place}/access", *(f"{place}/ci{number}/access" for number in range(8))]
    return "".join(f"{name} {minor}\n" for minor, name in enumerate(names, 1))


def device_file(divided: Iterable[tuple[str, object]]) -> str:
    """Return the host_container_device.yml in which each of these GPUs has so many devices.

    A text with a colon is what its entry has instead of `virtual_number`, or also instead of the type; "; "
    may separate its keys.
    """
    lines = []
    for path, how in divided:
        division = how if ":" in str(how) else f"virtual_number: {how}"
        types = [] if "type:" in str(division) else ["  type: NVIDIA_MPS"]
        lines += [f"- path: {path}", *types, *(f"  {key}" for key in str(division).split("; "))]
    return "\n".join(["devices:", *lines] if lines else ["devices: []"]) + "\n"


def _path_of(gpu: GpuDescription) -> str:
    """Return how the device file names the GPU: by its UUID where it has no render node."""
    has_node = gpu.present and gpu.render is not None
    return f"/dev/dri/renderD{gpu.render}" if has_node else gpu.uuid


def plug_in(root: Path, device: GpuDescription | OtherDescription) -> None:
    """Make what the kernel shows of a device that no driver has."""
    folder = _device_folder(root, device.pci)
    os.makedirs(folder, exist_ok=True)
    attributes = {"vendor": f"{VENDOR:#06x}", "class": "0x030200"}  # a 3D controller
    if isinstance(device, OtherDescription):
        attributes = {"vendor": f"{device.kind.vendor:#06x}", "class": "0x030000"}  # a VGA controller
    else:
        attributes["max_link_speed"] = _LINK_SPEEDS[device.kind.generation]
        attributes["max_link_width"] = "16"
    attributes["device"] = f"{device.kind.device:#06x}"
    attributes["numa_node"] = str(device.numa_node)
    for name, value in attributes.items():
        _write(folder / name, f"{value}\n")
    bus = root / "sys/bus/pci/devices"
    _link(bus / device.address, os.path.relpath(folder, bus))


def unplug(root: Path, pci: Pci) -> None:
    """Take away what `plug_in` has made, as after a removal from the PCI bus."""
    (root / "sys/bus/pci/devices" / address_of(pci)).unlink(missing_ok=True)
    shutil.rmtree(_device_folder(root, pci), ignore_errors=True)


def bind(root: Path, pci: Pci, driver: str) -> None:
    """Show which driver of the kernel has a device; an empty name for none."""
    link = _device_folder(root, pci) / "driver"
    link.unlink(missing_ok=True)
    if driver:
        os.makedirs(root / "sys/bus/pci/drivers" / driver, exist_ok=True)
        _link(link, f"../../../bus/pci/drivers/{driver}")


def make_gpu_node(root: Path, gpu: GpuDescription) -> None:
    _node(root / f"dev/nvidia{gpu.minor}")


def remove_gpu_node(root: Path, gpu: GpuDescription) -> None:
    (root / f"dev/nvidia{gpu.minor}").unlink(missing_ok=True)


def make_render_node(root: Path, pci: Pci, number: int) -> None:
    """Make a device's DRM nodes, and udev's links to them; render node 128 + n belongs to card n."""
    for kind_of_node, node in _drm_nodes(number).items():
        os.makedirs(_device_folder(root, pci) / "drm" / node, exist_ok=True)
        _write(root / "dev/dri" / node, "")
        _link(root / f"dev/dri/by-path/pci-{address_of(pci)}-{kind_of_node}", f"../{node}")


def remove_render_node(root: Path, pci: Pci, number: int) -> None:
    for kind_of_node, node in _drm_nodes(number).items():
        (root / f"dev/dri/by-path/pci-{address_of(pci)}-{kind_of_node}").unlink(missing_ok=True)
        (root / "dev/dri" / node).unlink(missing_ok=True)
    shutil.rmtree(_device_folder(root, pci) / "drm", ignore_errors=True)


def _drm_nodes(number: int) -> dict[str, str]:
    return {"render": f"renderD{number}", "card": f"card{number % 128}"}


def _device_folder(root: Path, pci: Pci) -> Path:
    return root / f"sys/devices/pci{pci[0]:04x}:{pci[1]:02x}" / address_of(pci)


def _node(path: Path) -> None:
    """A node that all users may open, as the driver makes them."""
    _write(path, "")
    path.chmod(0o666)


def _write(path: Path, text: str) -> None:
    try:
        with open(path, "x", encoding="ascii") as file:
            file.write(text)
    except FileExistsError:  # a kept root: its edits stay
        pass


def _link(path: Path, target: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.symlink(target, path)
