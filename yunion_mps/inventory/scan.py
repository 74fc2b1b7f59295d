"""The inventory: NVML for the GPUs, sysfs for their place in the host, and the GPUs that served before.

A file keeps what the GPUs are that have served devices, so that a daemon that starts while one is lost still
knows what it was. Across a reboot that counts only if the configuration names the GPU; without entries, which
mean every GPU of the host, a reboot shows again which those are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import HostError
from yunion_mps.host.files import read_text, write_atomically
from yunion_mps.inventory import sysfs
from yunion_mps.inventory.nvml import Nvml, reason_of
from yunion_mps.models import Gpu, Inventory, PcieLink
from yunion_mps.paths import Paths
from yunion_mps.reasons import NO_REASON, Reason

GONE = Reason("the GPU is no longer present", reasons.GPU_GONE)
_NOT_OFFERED = Reason("the driver does not report this GPU", reasons.GPU_ERROR)


class ServedGpus(NamedTuple):
    """GPUs that served devices, and whether in this boot."""

    gpus: tuple[Gpu, ...] = ()
    this_boot: bool = True


def scan(nvml: Nvml, paths: Paths) -> Inventory:
    """Return every NVIDIA GPU of the host in PCI order, the broken ones with their reason.

    Raises DriverError when the driver as a whole does not answer.
    """
    return Scanner(paths).scan(nvml)


class Scanner:
    """Scans again and again; what cannot change is read once, until a GPU fails or another device comes."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        #: The GPUs that answered at the last scan, by UUID.
        self._known: dict[str, Gpu] = {}
        #: Whether the device is an NVIDIA GPU, by its PCI address.
        self._is_gpu: dict[str, bool] = {}

    def scan(self, nvml: Nvml) -> Inventory:
        """As `scan` above.

        A GPU that NVML cannot give a handle for has no address there; sysfs still lists it, so that it is
        reported by its place.
        """
        driver = nvml.driver()
        found, silent = nvml.gpus(self._known)
        nodes = sysfs.render_nodes(self._paths)
        gpus = {gpu.pci_address: self._placed(gpu) for gpu in found}
        refused = [reason_of(error) for _, error in silent]
        for address in self._nvidia_gpus():
            if address not in gpus:
                reason = nvml.reason_at(address) or (refused or [_NOT_OFFERED])[0]
                gpus[address] = self._placed(Gpu(address, reason=reason))
        self._known = {gpu.uuid: gpu for gpu in gpus.values() if gpu.uuid and not gpu.reason}
        shown = (gpu._replace(render_node=nodes.get(gpu.pci_address)) for gpu in gpus.values())
        return Inventory(driver, _in_order(shown))

    def _nvidia_gpus(self) -> list[str]:
        known = self._is_gpu
        self._is_gpu = {
            address: known[address] if address in known else sysfs.is_nvidia_gpu(self._paths, address)
            for address in sysfs.pci_addresses(self._paths)
        }
        return [address for address, is_gpu in self._is_gpu.items() if is_gpu]

    def _placed(self, gpu: Gpu) -> Gpu:
        """The GPU with what sysfs knows of its address."""
        known = self._known.get(gpu.uuid or "")
        if known and known.pci_address == gpu.pci_address and not gpu.reason:
            return gpu
        vendor_device_id = gpu.vendor_device_id or sysfs.vendor_device_id(self._paths, gpu.pci_address)
        numa_node = sysfs.numa_node(self._paths, gpu.pci_address)
        link = sysfs.max_link(self._paths, gpu.pci_address)
        return gpu._replace(vendor_device_id=vendor_device_id, numa_node=numa_node, link=link)


def _in_order(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    return tuple(sorted(gpus, key=lambda gpu: sysfs.sort_key(gpu.pci_address)))


def load_served(paths: Paths) -> ServedGpus:
    """The GPUs that the last daemon saved; none if that cannot be read."""
    unreadable = (OSError, ValueError, TypeError, KeyError, RecursionError)
    with contextlib.suppress(*unreadable), open(paths.served_gpus) as file:
        text = json.load(file)
        return ServedGpus(tuple(_gpu(one) for one in text["gpus"]), text["boot_id"] == _boot_id(paths))
    return ServedGpus()


def save_served(paths: Paths, gpus: Iterable[Gpu]) -> bool:
    """Save the GPUs for the next daemon; return whether that could be done."""
    kept = [
        gpu._replace(nvml_index=None, compute_mode=None, mig_enabled=None, reason=NO_REASON) for gpu in gpus
    ]
    rows = [{**gpu._asdict(), "link": gpu.link and gpu.link._asdict()} for gpu in kept]
    with contextlib.suppress(OSError):
        text = {"boot_id": _boot_id(paths), "gpus": rows}
        write_atomically(paths.served_gpus, json.dumps(text), directory_mode=0o700)
        return True
    return False


def with_served(inventory: Inventory, served: Iterable[Gpu]) -> Inventory:
    """The inventory with those `served` GPUs that are lost or gone, each with the reason.

    One whose address another GPU has now was replaced, and is left out.
    """
    there = {gpu.pci_address: gpu for gpu in inventory.gpus}
    uuids = {gpu.uuid for gpu in inventory.gpus}
    nodes = {gpu.render_node for gpu in inventory.gpus}
    gpus = dict(there)
    known = []
    for gpu in served:
        now = there.get(gpu.pci_address)
        if gpu.uuid not in uuids:
            if now is None:
                node = None if gpu.render_node in nodes else gpu.render_node
                gpus[gpu.pci_address] = gpu._replace(reason=GONE, render_node=node)
            elif now.reason and now.uuid is None and now.vendor_device_id in (None, gpu.vendor_device_id):
                gpus[gpu.pci_address] = gpu._replace(reason=now.reason, render_node=now.render_node)
            else:
                continue
        known.append(str(gpu.uuid))
    return inventory._replace(gpus=_in_order(gpus.values()), served=tuple(known))


def _gpu(row: dict[str, Any]) -> Gpu:
    capability, link = row["compute_capability"], row["link"]
    known = {**row, "compute_capability": capability and tuple(capability), "link": link and PcieLink(**link)}
    gpu = Gpu(**known)._replace(reason=NO_REASON)
    words = (gpu.pci_address, gpu.uuid, gpu.name or "", gpu.vendor_device_id or "", gpu.render_node or "")
    numbers = (*(gpu.compute_capability or ()), gpu.minor or 0, gpu.memory_mib or 0, gpu.numa_node or 0)
    if not (all(isinstance(one, str) for one in words) and all(isinstance(one, int) for one in numbers)):
        raise TypeError(f"not a GPU: {row}")
    return gpu


def _boot_id(paths: Paths) -> str:
    with open(paths.boot_id, encoding="ascii") as file:
        return file.read().strip()


def machine_id(paths: Paths) -> str:
    """The host's machine-id(5), 32 hexadecimal digits; raises HostError if there is none."""
    text = read_text(paths.machine_id, 64).strip()
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise HostError(
            f"{paths.machine_id} contains no machine id, from which the device ids are derived",
            "create one: systemd-machine-id-setup",
        )
    return text
