"""The inventory: GPUs from NVML, their places from sysfs, and the GPUs that served before.

A file records the GPUs that have served devices, so that a daemon that starts while one is lost still knows
it. After a reboot, that counts only if the configuration names the GPU: without entries, which mean every GPU
of the host, the reboot shows which GPUs there are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import DriverError, HostError
from yunion_mps.host.files import read_text, write_atomically
from yunion_mps.inventory import sysfs
from yunion_mps.inventory.driver import reason_of
from yunion_mps.inventory.mig import Mig, instance_gpu
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.models import Gpu, Inventory, PcieLink
from yunion_mps.paths import Paths
from yunion_mps.reasons import NO_REASON, Reason

_GONE = Reason("the GPU is no longer present", reasons.GPU_GONE)
INSTANCE_GONE = Reason("the MIG instance no longer exists", reasons.MIG_INSTANCE_GONE)
_DIVIDED = Reason(
    "another program divided the MIG instance into compute instances", reasons.MIG_FOREIGN_INSTANCE
)
_NOT_OFFERED = Reason("the driver does not report this GPU", reasons.GPU_ERROR)


class ServedGpus(NamedTuple):
    """The GPUs that served devices, and whether they did in this boot."""

    gpus: tuple[Gpu, ...] = ()
    this_boot: bool = True


class Scanner:
    """Scans repeatedly; reads what cannot change only once, until a GPU fails or a device is added."""

    def __init__(self, paths: Paths, earlier: Iterable[Gpu] = ()) -> None:
        """`earlier` are the GPUs of an earlier scan, whose constants are not read again."""
        self._paths = paths
        #: GPUs that answered the last scan, by UUID.
        self._known = _answering(earlier)
        #: Whether a device is an NVIDIA GPU, by PCI address.
        self._is_gpu = {gpu.pci_address: True for gpu in self._known.values() if not gpu.parent}

    def scan(self, nvml: Nvml) -> Inventory:
        """Return all NVIDIA GPUs of the host in PCI order, broken ones with their reason.

        A GPU without an NVML handle has no address there, but sysfs lists it, so that it is reported. Raises
        DriverError if the driver does not answer.
        """
        driver = nvml.driver()
        answering, silent = nvml.gpus(self._known)
        nodes = sysfs.render_nodes(self._paths)
        gpus = {gpu.pci_address: self._locate(gpu) for gpu in answering}
        refused = [reason_of(error) for error in silent]
        for address in self._nvidia_gpus():
            if address not in gpus:
                reason = nvml.reason_at(address) or (refused or [_NOT_OFFERED])[0]
                gpus[address] = self._locate(Gpu(address, reason=reason))
        located = [gpu._replace(render_node=nodes.get(gpu.pci_address)) for gpu in gpus.values()]
        shown = [one for gpu in located for one in _with_instances(gpu, Mig(nvml))]
        self._known = _answering(gpu for gpu in shown if not gpu.parent)
        return Inventory(driver, in_order(shown))

    def _nvidia_gpus(self) -> list[str]:
        before = self._is_gpu
        self._is_gpu = {
            address: before[address] if address in before else sysfs.is_nvidia_gpu(self._paths, address)
            for address in sysfs.pci_addresses(self._paths)
        }
        return [address for address, is_gpu in self._is_gpu.items() if is_gpu]

    def _locate(self, gpu: Gpu) -> Gpu:
        before = self._known.get(gpu.uuid or "")
        if before and before.pci_address == gpu.pci_address and not gpu.reason:
            return gpu
        vendor_device_id = gpu.vendor_device_id or sysfs.vendor_device_id(self._paths, gpu.pci_address)
        numa_node = sysfs.numa_node(self._paths, gpu.pci_address)
        link = sysfs.max_link(self._paths, gpu.pci_address)
        return gpu._replace(vendor_device_id=vendor_device_id, numa_node=numa_node, link=link)


def _with_instances(gpu: Gpu, mig: Mig) -> tuple[Gpu, ...]:
    """Return the GPU and its MIG instances; without them, it has the reason why they cannot be read."""
    if gpu.reason or gpu.mig_enabled is None:
        return (gpu,)
    try:
        return mig.read(gpu)
    except DriverError as error:
        return (gpu._replace(reason=reason_of(error)),)


def _answering(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    return {gpu.uuid: gpu for gpu in gpus if gpu.uuid and not gpu.reason}


def in_order(gpus: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs in the order of their PCI addresses."""
    return tuple(sorted(gpus, key=lambda gpu: sysfs.sort_key(gpu.pci_address)))


def load_served(paths: Paths) -> ServedGpus:
    """Return the GPUs that the last daemon saved; none if they cannot be read."""
    unreadable = (OSError, ValueError, TypeError, KeyError, RecursionError)
    with contextlib.suppress(*unreadable), open(paths.served_gpus) as file:
        text = json.load(file)
        return ServedGpus(
            tuple(_gpu_from_json(row) for row in text["gpus"]), text["boot_id"] == _boot_id(paths)
        )
    return ServedGpus()


def save_served(paths: Paths, gpus: Iterable[Gpu]) -> bool:
    kept = [
        gpu._replace(
            nvml_index=None,
            compute_mode=None,
            mig_enabled=None,
            mig_pending=None,
            mig_profiles=(),
            mig_instances=(),
            reason=NO_REASON,
            mode_is_fixed=False,
        )
        for gpu in gpus
    ]
    rows = [{**gpu._asdict(), "link": gpu.link and gpu.link._asdict()} for gpu in kept]
    with contextlib.suppress(OSError):
        text = {"boot_id": _boot_id(paths), "gpus": rows}
        write_atomically(paths.served_gpus, json.dumps(text), directory_mode=0o700)
        return True
    return False


def with_served(inventory: Inventory, served: Iterable[Gpu]) -> Inventory:
    """Add `served` GPUs that are lost or gone to the inventory, each with the reason.

    A GPU whose address now belongs to another one was replaced, and is left out, as is a MIG instance that
    was made again.
    """
    there = {gpu.pci_address: gpu for gpu in inventory.gpus}
    uuids = {gpu.uuid for gpu in inventory.gpus}
    again = identities(inventory.gpus)
    nodes = {gpu.render_node for gpu in inventory.gpus}
    gpus = dict(there)
    served_uuids = []
    for gpu in served:
        now = there.get(gpu.pci_address)
        if gpu.uuid not in uuids:
            if gpu.identity in again:
                continue
            if now is None:
                node = gpu.render_node if gpu.parent or gpu.render_node not in nodes else None
                gpus[gpu.pci_address] = gone(gpu, there)._replace(render_node=node)
            elif now.reason and now.uuid is None and now.vendor_device_id in (None, gpu.vendor_device_id):
                gpus[gpu.pci_address] = gpu._replace(reason=now.reason, render_node=now.render_node)
            else:
                continue
        served_uuids.append(str(gpu.uuid))
    return inventory._replace(gpus=in_order(gpus.values()), served=tuple(served_uuids))


def gone(gpu: Gpu, there: Mapping[str, Gpu]) -> Gpu:
    """Return the GPU with the reason why it is not among those `there` (by address)."""
    if not gpu.parent:
        return gpu._replace(reason=_GONE, nvml_index=None)
    parent = there.get(gpu.physical_address)
    if parent is None or parent.reason:
        return gpu._replace(reason=parent.reason if parent else _GONE)
    addresses = {f"{parent.pci_address}-g{one.id}": one for one in parent.mig_instances}
    now = addresses.get(gpu.pci_address)
    return gpu._replace(reason=INSTANCE_GONE if now is None or now.is_whole else _DIVIDED)


def unusable_instances(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the MIG instances that are not MIG devices, and so cannot be leased, with reasons.

    One that was served before is left out, because it is among the `gpus`.
    """
    there = {gpu.pci_address: gpu for gpu in gpus}
    divided = (
        (instance_gpu(gpu, one), one.compute_instances)
        for gpu in there.values()
        for one in gpu.mig_instances
        if not one.uuid
    )
    return [
        instance._replace(reason=_not_leasable(number))
        for instance, number in divided
        if instance.pci_address not in there
    ]


def _not_leasable(compute_instances: int) -> Reason:
    text = f"another program divided it into {compute_instances} compute instances"
    if compute_instances == 0:
        text = "it has no compute instance"
    elif compute_instances == 1:
        text = "another program created a compute instance with only some of its slices"
    return Reason(text, reasons.MIG_FOREIGN_INSTANCE)


def identities(gpus: Iterable[Gpu]) -> set[str]:
    """Return those of the MIG instances among the GPUs."""
    return {gpu.identity for gpu in gpus if gpu.identity}


def _gpu_from_json(row: dict[str, Any]) -> Gpu:
    capability, link = row["compute_capability"], row["link"]
    parts = {
        "compute_capability": capability and tuple(capability),
        "link": link and PcieLink(**link),
        "mig_profiles": (),
        "mig_instances": (),
    }
    gpu = Gpu(**{**row, **parts})._replace(reason=NO_REASON)
    texts = (gpu.pci_address, gpu.uuid, gpu.name or "", gpu.vendor_device_id or "", gpu.render_node or "")
    numbers = (*(gpu.compute_capability or ()), gpu.minor or 0, gpu.memory_mib or 0, gpu.numa_node or 0)
    if not (
        all(isinstance(text, str) for text in texts) and all(isinstance(number, int) for number in numbers)
    ):
        raise TypeError(f"not a GPU: {row}")
    return gpu


def _boot_id(paths: Paths) -> str:
    with open(paths.boot_id, encoding="ascii") as file:
        return file.read().strip()


def machine_id(paths: Paths) -> str:
    """Return the host's machine-id(5), 32 hexadecimal digits; raises HostError if there is none."""
    text = read_text(paths.machine_id, 64).strip()
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise HostError(
            f"{paths.machine_id} contains no machine id, from which the device ids are derived",
            "create one: systemd-machine-id-setup",
        )
    return text
