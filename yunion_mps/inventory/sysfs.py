"""What sysfs and udev report about PCI devices.

Source: Linux, Documentation/PCI/sysfs-pci.rst and drivers/pci/pci-sysfs.c.
"""

from __future__ import annotations

import os

from yunion_mps.core.addresses import normalise_address
from yunion_mps.core.models import PcieLink
from yunion_mps.core.paths import Paths
from yunion_mps.host.files import read_text

NVIDIA_VENDOR = "0x10de"

#: PCI Express versions by the transfer rate that sysfs prints, and GB/s of one lane after encoding: 8 of 10
#: bits up to 2.0, 128 of 130 up to 5.0, and 242 of 256 bytes from 6.0 on (PCI Express Base Specification).
_VERSIONS = {
    "2.5": ("1.0", 0.25),
    "5": ("2.0", 0.5),
    "8": ("3.0", 0.985),
    "16": ("4.0", 1.969),
    "32": ("5.0", 3.938),
    "64": ("6.0", 7.563),
    "128": ("7.0", 15.125),
}


def pci_addresses(paths: Paths) -> list[str]:
    """Return the PCI addresses of all devices of the host."""
    return _listing(paths.pci_devices)


def controller_vendor(paths: Paths, address: str) -> str:
    """Return the vendor of the display controller (PCI class 03xxxx) there; empty if it is none."""
    if _read(paths, address, "class").startswith("0x03"):
        return _read(paths, address, "vendor")
    return ""


def driver_of(paths: Paths, address: str) -> str:
    """Return the kernel driver that is bound to the device, such as nvidia or vfio-pci; empty if none is."""
    try:
        return os.path.basename(os.readlink(os.path.join(paths.pci_devices, address, "driver")))
    except OSError:
        return ""


def vendor_device_id(paths: Paths, address: str) -> str | None:
    """Return the device's vendor and device id, `10de:1b38`; None if sysfs does not report it."""
    vendor = _read(paths, address, "vendor")
    device = _read(paths, address, "device")
    return f"{vendor[2:]}:{device[2:]}" if vendor and device else None


def numa_node(paths: Paths, address: str) -> int | None:
    """Return the device's NUMA node, -1 if it has none; None if sysfs does not report it."""
    text = _read(paths, address, "numa_node")
    return int(text) if text.removeprefix("-").isdigit() else None


def max_link(paths: Paths, address: str) -> PcieLink | None:
    """Return the link's maximum; None if sysfs does not report it, or reports an unknown rate."""
    speed = _read(paths, address, "max_link_speed")
    width = _read(paths, address, "max_link_width")
    if not speed or not width.isdigit():
        return None
    rate = speed.split()[0].removesuffix(".0")
    if rate not in _VERSIONS:
        return None
    version, lane_gb_s = _VERSIONS[rate]
    lanes = int(width)
    return PcieLink(
        version=version,
        transfer_rate_per_lane=f"{rate}GT/s",
        lane_width=lanes,
        throughput=f"{lane_gb_s * lanes:.2f} GB/s",
    )


def render_nodes(paths: Paths) -> dict[str, str]:
    """Return render nodes (`/dev/dri/renderD128`) by PCI address, from udev's links.

    Source: systemd, rules.d/60-drm.rules.
    """
    nodes = {}
    for name in _listing(paths.render_nodes):
        address = normalise_address(name.removeprefix("pci-").removesuffix("-render"))
        if address and name.endswith("-render"):
            try:
                target = os.readlink(os.path.join(paths.render_nodes, name))
            except OSError:  # removed with its GPU since the listing, or not a link
                continue
            nodes[address] = "/dev/dri/" + os.path.basename(target)
    return nodes


def _listing(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _read(paths: Paths, address: str, attribute: str) -> str:
    return read_text(os.path.join(paths.pci_devices, address, attribute)).strip()
