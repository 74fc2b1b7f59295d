"""The files of a simulated host: /sys, /dev, /proc and /etc under one root, as a real host has them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from .catalog import VENDOR
from .description import GpuDescription, HostDescription

MACHINE_ID = "5c3f2b1de4a94f60b7c8d9e0f1a2b3c4"

_FOLDERS = (
    "bin", "dev/dri/by-path", "dev/nvidia-caps", "dev/shm", "etc/yunion", "lib",
    "proc/driver/nvidia/capabilities/mig", "proc/driver/nvidia-caps", "run",
    "sys/bus/pci/devices", "sys/bus/pci/drivers/nvidia", "tmp", "var/lib", "var/log",
)  # fmt: skip
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
    """Make the tree; configuration files that are there stay as they are."""
    for folder in _FOLDERS:
        os.makedirs(root / folder, exist_ok=True)
    os.chmod(root / "tmp", 0o1777)
    divided = ((_path_of(gpu), gpu.virtual_number) for gpu in host.gpus)
    _write(root / "etc/machine-id", f"{MACHINE_ID}\n")
    _write(root / "etc/yunion/host.conf", _HOST_CONF)
    _write(root / "etc/yunion/host_container_device.yml", device_file(divided))
    _write(root / "proc/driver/nvidia/version", _DRIVER.format(version=host.driver_version))
    (root / "dev/shm").chmod(0o1777)
    for node in ("nvidiactl", "nvidia-uvm"):
        _node(root / "dev" / node)
    _write(root / "proc/driver/nvidia-caps/mig-minors", _mig_minors(host))
    for name, minor, mode in (("config", 1, 0o400), ("monitor", 2, 0o444)):
        access = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        _write(root / "proc/driver/nvidia/capabilities/mig" / name, access)
        _write(root / f"dev/nvidia-caps/nvidia-cap{minor}", "")
    for gpu in host.gpus:
        plug_in(root, gpu)


def _mig_minors(host: HostDescription) -> str:
    """Return the table of the minors of /dev/nvidia-caps/*; libnvidia-ml/access.c counts the same way."""
    names = ["config", "monitor"]
    for gpu in range(1 + max(gpu.minor for gpu in host.gpus)):
        for instance in range(15):
            place = f"gpu{gpu}/gi{instance}"
            names += [f"{place}/access", *(f"{place}/ci{number}/access" for number in range(8))]
    return "".join(f"{name} {minor}\n" for minor, name in enumerate(names, 1))


def device_file(divided: Iterable[tuple[str, object]]) -> str:
    """Return the host_container_device.yml in which each of these GPUs has so many devices.

    A text with a colon is what its entry has instead of `virtual_number`, or also instead of the type; "; "
    may separate its keys.
    """
    lines = ["devices:"]
    for path, how in divided:
        division = how if ":" in str(how) else f"virtual_number: {how}"
        types = [] if "type:" in str(division) else ["  type: NVIDIA_MPS"]
        lines += [f"- path: {path}", *types, *(f"  {key}" for key in str(division).split("; "))]
    return "\n".join(lines) + "\n"


def _path_of(gpu: GpuDescription) -> str:
    """Return how the device file names the GPU: by its UUID where it has no render node."""
    return gpu.uuid if gpu.render is None else f"/dev/dri/renderD{gpu.render}"


def plug_in(root: Path, gpu: GpuDescription) -> None:
    """Make the files of one GPU: what a kernel with a bound nvidia driver shows of it."""
    folder = _device_folder(root, gpu)
    os.makedirs(folder, exist_ok=True)
    attributes = {
        "vendor": f"{VENDOR:#06x}",
        "device": f"{gpu.kind.device:#06x}",
        "class": "0x030200",  # a 3D controller
        "numa_node": str(gpu.numa_node),
        "max_link_speed": _LINK_SPEEDS[gpu.kind.generation],
        "max_link_width": "16",
    }
    for name, value in attributes.items():
        _write(folder / name, f"{value}\n")
    _link(folder / "driver", "../../../bus/pci/drivers/nvidia")
    _link(root / "sys/bus/pci/devices" / gpu.address, os.path.relpath(folder, root / "sys/bus/pci/devices"))
    _node(root / f"dev/nvidia{gpu.minor}")
    if gpu.render is not None:
        for kind_of_node, node in _nodes(gpu).items():
            os.makedirs(folder / "drm" / node, exist_ok=True)
            _write(root / "dev/dri" / node, "")
            _link(root / f"dev/dri/by-path/pci-{gpu.address}-{kind_of_node}", f"../{node}")


def unplug(root: Path, gpu: GpuDescription) -> None:
    """Take away the files of one GPU, as after its removal from the PCI bus."""
    paths = [root / "sys/bus/pci/devices" / gpu.address, root / f"dev/nvidia{gpu.minor}"]
    for kind_of_node, node in _nodes(gpu).items():
        paths += [root / "dev/dri" / node, root / f"dev/dri/by-path/pci-{gpu.address}-{kind_of_node}"]
    for path in paths:
        if path.is_symlink() or path.exists():
            path.unlink()
    shutil.rmtree(_device_folder(root, gpu), ignore_errors=True)


def _device_folder(root: Path, gpu: GpuDescription) -> Path:
    return root / f"sys/devices/pci{gpu.pci[0]:04x}:{gpu.pci[1]:02x}" / gpu.address


def _nodes(gpu: GpuDescription) -> dict[str, str]:
    """Return the DRM nodes by kind; render node 128 + n belongs to card n."""
    return {} if gpu.render is None else {"render": f"renderD{gpu.render}", "card": f"card{gpu.render % 128}"}


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
