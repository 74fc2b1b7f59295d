"""The inventory: GPUs from NVML, their places from sysfs, and the GPUs that served before.

A file records the GPUs that have served devices, so that a daemon that starts while one is lost still knows
it. After a reboot, that counts only if the configuration names the GPU: without entries, which mean every GPU
of the host, the reboot shows which GPUs there are.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from yunion_mps.core import reasons
from yunion_mps.core.addresses import sort_key
from yunion_mps.core.errors import DriverError, HostError
from yunion_mps.core.models import (
    Controller,
    Driver,
    Gpu,
    Inventory,
    MeantGpu,
    PcieLink,
    gpus_by_address,
    gpus_by_uuid,
)
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.host.files import read_text, write_atomically
from yunion_mps.host.processes import refuse_if_no_file_can_be_opened
from yunion_mps.inventory import sysfs
from yunion_mps.inventory.driver import reason_of
from yunion_mps.inventory.mig import Mig, instance_gpu
from yunion_mps.inventory.nvml import Nvml

T = TypeVar("T")

_GONE = Reason("the GPU is no longer present", reasons.GPU_GONE)
INSTANCE_GONE = Reason("the MIG instance no longer exists", reasons.MIG_INSTANCE_GONE)
#: What a damaged file raises while it is read.
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
_DIVIDED = Reason(
    "another program divided the MIG instance into compute instances", reasons.MIG_FOREIGN_INSTANCE
)
_NOT_OFFERED = Reason("the driver does not report this GPU", reasons.GPU_ERROR)


#: The kernel drivers whose GPUs NVML can report: of PCI devices, and of Tegra's integrated GPUs.
_NVIDIA_DRIVERS = ("nvidia", "nvgpu")


class ServedGpus(NamedTuple):
    """What the last daemon saved of the GPUs that served devices."""

    gpus: tuple[Gpu, ...] = ()
    #: Whether they served in this boot.
    this_boot: bool = True
    #: What the entries meant, by `GpuPath.name`.
    meant: Mapping[str, MeantGpu] = {}
    #: What the entries meant could not be read.
    is_damaged: bool = False
    #: Only root can read any of it.
    is_hidden: bool = False


class Scanner:
    """Scans repeatedly; reads what cannot change only once, until a GPU fails or a device is added.

    earlier: the GPUs of an earlier scan, whose constants are not read again.
    """

    def __init__(self, paths: Paths, earlier: Iterable[Gpu] = ()) -> None:
        self._paths = paths
        #: GPUs that answered the last scan, by UUID.
        self._known = _answering(earlier)
        #: The vendor of each device that is a display controller, empty for others, by PCI address.
        self._vendors: dict[str, str] = {}

    def scan(self, nvml: Nvml) -> Inventory:
        """Return all NVIDIA GPUs of the host in PCI order, broken ones with their reason.

        A GPU without an NVML handle has no address there, but sysfs lists it, so that it is reported. Raises
        DriverError if the driver does not answer.
        """
        driver = nvml.driver()
        answering, silent = nvml.gpus(self._known)
        nodes = sysfs.render_nodes(self._paths)
        controllers = self.controllers(nodes)
        gpus = {gpu.pci_address: self._locate(gpu) for gpu in answering}
        refusal = reason_of(silent[0]) if silent else _NOT_OFFERED
        for controller in controllers:
            address = controller.pci_address
            if address in gpus or controller.vendor != sysfs.NVIDIA_VENDOR:
                continue
            reason = _other_driver(controller, self._paths)
            if not reason:
                reason = nvml.reason_at(address) or refusal
            gpus[address] = self._locate(Gpu(address, reason=reason))
        shown: list[Gpu] = []
        for gpu in gpus.values():
            located = gpu._replace(render_node=nodes.get(gpu.pci_address))
            shown += _with_instances(located, Mig(nvml))
        self._known = _answering(gpu for gpu in shown if not gpu.parent)
        has_drm = os.path.isdir(self._paths.under("/sys/module/nvidia_drm"))
        return Inventory(driver, in_order(shown), controllers=controllers, drm_is_loaded=has_drm)

    def scan_sysfs(self) -> Inventory:
        """Return the host's NVIDIA GPUs without asking the driver, which does not work."""
        controllers = self.controllers()
        gpus = []
        for controller in controllers:
            if controller.vendor == sysfs.NVIDIA_VENDOR:
                reason = _other_driver(controller, self._paths) or _NOT_OFFERED
                gpus.append(self._locate(Gpu(controller.pci_address, reason=reason)))
        return Inventory(Driver("", None), in_order(gpus), controllers=controllers)

    def controllers(self, render_nodes: Mapping[str, str] | None = None) -> tuple[Controller, ...]:
        """Return the host's display controllers, without asking the driver.

        render_nodes: those of all devices, by PCI address, if they have just been read.
        """
        nodes = sysfs.render_nodes(self._paths) if render_nodes is None else render_nodes
        vendors: dict[str, str] = {}
        for address in sysfs.pci_addresses(self._paths):
            if address in self._vendors:
                vendors[address] = self._vendors[address]
            else:
                vendors[address] = sysfs.controller_vendor(self._paths, address)
        self._vendors = vendors
        controllers: list[Controller] = []
        for address, vendor in sorted(vendors.items()):
            if not vendor:
                continue
            controller = Controller(
                pci_address=address,
                vendor=vendor,
                driver=sysfs.driver_of(self._paths, address),
                render_node=nodes.get(address),
            )
            controllers.append(controller)
        return tuple(controllers)

    def _locate(self, gpu: Gpu) -> Gpu:
        before = self._known.get(gpu.uuid or "")
        if before and before.pci_address == gpu.pci_address and not gpu.reason:
            return gpu
        vendor_device_id = gpu.vendor_device_id or sysfs.vendor_device_id(self._paths, gpu.pci_address)
        numa_node = sysfs.numa_node(self._paths, gpu.pci_address)
        link = sysfs.max_link(self._paths, gpu.pci_address)
        return gpu._replace(vendor_device_id=vendor_device_id, numa_node=numa_node, link=link)


def _other_driver(controller: Controller, paths: Paths) -> Reason:
    """Return which other driver, or that none, is bound to this GPU; empty if NVIDIA's is."""
    if controller.driver in _NVIDIA_DRIVERS:
        return NO_REASON
    if controller.driver:
        text = f"the GPU is bound to the driver {controller.driver}, so the NVIDIA driver cannot use it"
        return Reason(text, reasons.GPU_OTHER_DRIVER)
    if not os.path.isdir(paths.under("/sys/module/nvidia")):
        return Reason("the NVIDIA driver's kernel module is not loaded", reasons.DRIVER_NOT_LOADED)
    return Reason("the GPU is not bound to any driver", reasons.GPU_OTHER_DRIVER)


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
    return tuple(sorted(gpus, key=lambda gpu: sort_key(gpu.pci_address)))


def load_served(paths: Paths) -> ServedGpus:
    """Return what the last daemon saved; `is_damaged` if there is something that cannot be read."""
    try:
        with open(paths.served_gpus, encoding="utf-8") as file:
            record = json.load(file)
        boot_id = record["boot_id"]
        gpus, _ = _readable(record["gpus"], _gpu_from_json)
        served = ServedGpus(tuple(gpus), this_boot=boot_id == _boot_id(paths))
        if "entries" not in record:  # an earlier version saved only the render nodes of GPUs that served
            return served._replace(meant=_meant_by_render_nodes(gpus))
        keys = list(record["entries"])
        rows, is_damaged = _readable(keys, lambda key: (key, _meant_from_json(record["entries"][key])))
        return served._replace(meant=dict(rows), is_damaged=is_damaged)
    except FileNotFoundError:
        return ServedGpus()
    except PermissionError:  # doctor and config check run as any user
        return ServedGpus(is_hidden=True)
    except _UNREADABLE:
        return ServedGpus(is_damaged=True)


def _meant_by_render_nodes(gpus: Iterable[Gpu]) -> dict[str, MeantGpu]:
    meant: dict[str, MeantGpu] = {}
    for gpu in gpus:
        if gpu.render_node and not gpu.parent:
            meant[gpu.render_node] = MeantGpu(str(gpu.uuid), gpu.pci_address)
    return meant


def _readable(rows: Iterable[Any], read: Callable[[Any], T]) -> tuple[list[T], bool]:
    """Return the rows that can be read, and whether there are others."""
    values: list[T] = []
    is_damaged = False
    for row in rows:
        try:
            values.append(read(row))
        except _UNREADABLE:
            is_damaged = True
    return values, is_damaged


def _meant_from_json(row: Any) -> MeantGpu:
    gpu = MeantGpu(uuid=row["uuid"], pci_address=row["pci_address"], replaced=row["replaced"])
    if not all(isinstance(text, str) for text in gpu):
        raise TypeError(f"not a GPU: {row}")
    return gpu


def save_served(paths: Paths, gpus: Iterable[Gpu], meant: Mapping[str, MeantGpu]) -> bool:
    """Save the GPUs that serve, and what the entries mean; return whether that succeeded.

    A file that cannot be read is kept beside it, as `….unreadable`.
    """
    rows = [_gpu_row(gpu) for gpu in gpus]
    entries = {key: gpu._asdict() for key, gpu in meant.items()}
    with contextlib.suppress(OSError):
        record = {"boot_id": _boot_id(paths), "gpus": rows, "entries": entries}
        if load_served(paths).is_damaged:
            os.replace(paths.served_gpus, f"{paths.served_gpus}.unreadable")
        write_atomically(paths.served_gpus, json.dumps(record), directory_mode=0o700)
        return True
    return False


def _gpu_row(gpu: Gpu) -> dict[str, Any]:
    """Return what is saved of a GPU, by name: what does not change while it serves."""
    lasting = gpu._replace(
        nvml_index=None,
        compute_mode=None,
        mig_enabled=None,
        mig_pending=None,
        mig_profiles=(),
        mig_instances=(),
        reason=NO_REASON,
        mode_is_fixed=False,
    )
    row = lasting._asdict()
    row["link"] = None if gpu.link is None else gpu.link._asdict()
    return row


def with_served(inventory: Inventory, served: Iterable[Gpu]) -> Inventory:
    """Return the inventory with those of the `served` GPUs that are lost or gone, each with the reason.

    A GPU whose address now belongs to another one was replaced, and is left out, as is a MIG instance that
    was made again.
    """
    present_by_address = gpus_by_address(inventory.gpus)
    uuids = gpus_by_uuid(inventory.gpus).keys()
    created_again = identities(inventory.gpus)
    nodes = {gpu.render_node for gpu in inventory.gpus}
    gpus = dict(present_by_address)
    served = tuple(served)
    divided = {gpu.parent for gpu in served}  # these served by their instances only
    served_uuids = []
    for gpu in served:
        present = present_by_address.get(gpu.pci_address)
        if gpu.uuid not in uuids:
            if gpu.identity in created_again:
                continue
            if present is None:
                node = gpu.render_node if gpu.parent or gpu.render_node not in nodes else None
                gpus[gpu.pci_address] = gone(gpu, present_by_address)._replace(render_node=node)
            elif _may_be(present, gpu):
                gpus[gpu.pci_address] = gpu._replace(reason=present.reason, render_node=present.render_node)
            else:
                continue
        if gpu.uuid not in divided:
            served_uuids.append(str(gpu.uuid))
    return inventory._replace(gpus=in_order(gpus.values()), served=tuple(served_uuids))


def _may_be(present: Gpu, served: Gpu) -> bool:
    """Return whether a GPU that does not report its UUID may be the one that has served at its address."""
    is_same_model = present.vendor_device_id in (None, served.vendor_device_id)
    return bool(present.reason) and present.uuid is None and is_same_model


def with_saved(inventory: Inventory, saved: ServedGpus, *, are_named: bool) -> Inventory:
    """Return the inventory with the lost GPUs that the last daemon saved, and with what the entries meant.

    are_named: whether entries name the GPUs; those that none names are forgotten after a reboot.
    """
    served = saved.gpus if are_named or saved.this_boot else ()
    return with_served(inventory, served)._replace(
        meant=saved.meant, meant_is_damaged=saved.is_damaged, meant_is_hidden=saved.is_hidden
    )


def gone(gpu: Gpu, present_by_address: Mapping[str, Gpu]) -> Gpu:
    """Return the GPU with the reason why it is not among those that are present."""
    if not gpu.parent:
        return gpu._replace(reason=_GONE, nvml_index=None)
    parent = present_by_address.get(gpu.physical_address)
    if parent is None or parent.reason:
        return gpu._replace(reason=parent.reason if parent else _GONE)
    by_address = {f"{parent.pci_address}-g{instance.id}": instance for instance in parent.mig_instances}
    present = by_address.get(gpu.pci_address)
    return gpu._replace(reason=INSTANCE_GONE if present is None or present.is_whole else _DIVIDED)


def not_found(inventory: Inventory) -> frozenset[str]:
    """Return the PCI addresses of the GPUs that the driver is bound to but NVML does not report.

    They may have come after NVML was initialised, when it fixed its list of GPUs.
    """
    silent = {gpu.pci_address for gpu in inventory.gpus if gpu.nvml_index is None and not gpu.parent}
    not_found: set[str] = set()
    for controller in inventory.controllers:
        if controller.driver in _NVIDIA_DRIVERS and controller.pci_address in silent:
            not_found.add(controller.pci_address)
    return frozenset(not_found)


def unusable_instances(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the MIG instances that are not MIG devices, and so cannot be leased, with reasons.

    One that was served before is left out, because it is among the `gpus`.
    """
    present_by_address = gpus_by_address(gpus)
    unusable: list[Gpu] = []
    for gpu in present_by_address.values():
        for instance in gpu.mig_instances:
            if instance.uuid:
                continue
            shown = instance_gpu(gpu, instance)
            if shown.pci_address not in present_by_address:
                unusable.append(shown._replace(reason=_not_leasable(instance.compute_instances)))
    return unusable


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
    capability = row["compute_capability"]
    link = row["link"]
    parts = {
        "compute_capability": capability and tuple(capability),
        "link": link and PcieLink(**link),
        "mig_profiles": (),
        "mig_instances": (),
    }
    gpu = Gpu(**{**row, **parts})._replace(reason=NO_REASON)
    texts = (gpu.pci_address, gpu.uuid, gpu.name or "", gpu.vendor_device_id or "", gpu.render_node or "")
    numbers = (*(gpu.compute_capability or ()), gpu.minor or 0, gpu.memory_mib or 0, gpu.numa_node or 0)
    has_texts = all(isinstance(text, str) for text in texts)
    has_numbers = all(isinstance(number, int) for number in numbers)
    if not (has_texts and has_numbers):
        raise TypeError(f"not a GPU: {row}")
    return gpu


def _boot_id(paths: Paths) -> str:
    with open(paths.boot_id, encoding="ascii") as file:
        return file.read().strip()


def machine_id(paths: Paths) -> str:
    """Return the host's machine-id(5), 32 hexadecimal digits.

    Raises HostError if there is none.
    """
    text = read_text(paths.machine_id, 64).strip()
    if not text:
        refuse_if_no_file_can_be_opened(f"{paths.machine_id} cannot be read")
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise HostError(
            f"{paths.machine_id} contains no machine id, from which the device ids are derived",
            "create one: systemd-machine-id-setup",
        )
    return text
