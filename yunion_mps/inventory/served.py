"""The GPUs that have served devices: a daemon that starts while one is lost still knows what it was.

Who a GPU is stays known across a reboot only where the configuration names it; without entries, which mean
every GPU of the host, a reboot shows anew which those are.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from yunion_mps.host.files import write_atomically
from yunion_mps.inventory.pci import sort_key
from yunion_mps.models import Gpu, Inventory, PcieLink
from yunion_mps.paths import Paths

GONE = "the GPU is not there any more"


class Served(NamedTuple):
    """GPUs that served, and whether in this boot."""

    gpus: tuple[Gpu, ...] = ()
    this_boot: bool = True


def load(paths: Paths) -> Served:
    """What the last daemon wrote down; nothing where that cannot be read."""
    unreadable = (OSError, ValueError, TypeError, KeyError, RecursionError)
    with contextlib.suppress(*unreadable), open(paths.served_gpus) as file:
        text = json.load(file)
        return Served(tuple(_gpu(one) for one in text["gpus"]), text["boot_id"] == _boot_id(paths))
    return Served()


def save(paths: Paths, gpus: Iterable[Gpu]) -> bool:
    """Write down who they are; whether that could be done."""
    kept = [gpu._replace(nvml_index=None, compute_mode=None, mig_enabled=None, reason="") for gpu in gpus]
    rows = [{**gpu._asdict(), "link": gpu.link and gpu.link._asdict()} for gpu in kept]
    with contextlib.suppress(OSError):
        text = {"boot_id": _boot_id(paths), "gpus": rows}
        write_atomically(paths.served_gpus, json.dumps(text), directory_mode=0o700)
        return True
    return False


def with_served(inventory: Inventory, served: Iterable[Gpu]) -> Inventory:
    """The inventory with those of them that are lost or gone, each with the reason.

    One whose place another GPU has taken was replaced, and is none of ours any more.
    """
    there = {gpu.pci_address: gpu for gpu in inventory.gpus}
    uuids = {gpu.uuid for gpu in inventory.gpus}
    nodes = {gpu.render_node for gpu in inventory.gpus}
    gpus = dict(there)
    known = []
    for gpu in served:
        now = there.get(gpu.pci_address)
        if gpu.uuid in uuids:
            known.append(str(gpu.uuid))
        elif now is None:
            node = None if gpu.render_node in nodes else gpu.render_node
            gpus[gpu.pci_address] = gpu._replace(reason=GONE, render_node=node)
            known.append(str(gpu.uuid))
        elif now.reason and now.uuid is None and now.vendor_device_id in (None, gpu.vendor_device_id):
            gpus[gpu.pci_address] = gpu._replace(reason=now.reason, render_node=now.render_node)
            known.append(str(gpu.uuid))
    in_order = sorted(gpus.values(), key=lambda gpu: sort_key(gpu.pci_address))
    return inventory._replace(gpus=tuple(in_order), served=tuple(known))


def _gpu(row: dict[str, Any]) -> Gpu:
    capability, link = row["compute_capability"], row["link"]
    known = {**row, "compute_capability": capability and tuple(capability), "link": link and PcieLink(**link)}
    gpu = Gpu(**known)
    words = (gpu.pci_address, gpu.uuid, gpu.name or "", gpu.vendor_device_id or "", gpu.render_node or "")
    numbers = (*(gpu.compute_capability or ()), gpu.minor or 0, gpu.memory_mib or 0, gpu.numa_node or 0)
    if not (all(isinstance(one, str) for one in words) and all(isinstance(one, int) for one in numbers)):
        raise TypeError(f"not a GPU: {row}")
    return gpu


def _boot_id(paths: Paths) -> str:
    with open(paths.boot_id, encoding="ascii") as file:
        return file.read().strip()
