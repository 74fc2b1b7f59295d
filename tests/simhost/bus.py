"""The PCI bus of a simulated host: its devices, the driver of each, and the files that show both."""

from __future__ import annotations

import itertools
import os
import uuid
from pathlib import Path

from . import layout, tree
from .description import (
    FIRST_RENDER,
    GpuDescription,
    HostDescription,
    Pci,
    address_of,
    parse_pci,
)
from .state import StateError, StateFile

NVIDIA = "nvidia"
_NAMESPACE = uuid.UUID("c1f1e2ab-8f3f-4c52-8a5e-77f2c1f0f8a3")


class Bus:
    """Devices come, go, and change their drivers, as the kernel shows it and as the first nvmlInit finds it.

    Files come before NVML finds a GPU, and go after it does not any more.
    """

    def __init__(self, root: Path, host: HostDescription, file: StateFile) -> None:
        self._root = root
        self._host = host
        self._file = file

    def start(self) -> None:
        """Make the files of a new host."""
        if self._state.driver_loaded:
            tree.load_driver(self._root, self._version, self._minors)
            self._load_drm_module()
        for number, other in enumerate(self._host.others):
            tree.plug_in(self._root, other)
            tree.bind(self._root, other.pci, other.kind.driver)
            self._show_other(number)
        for slot, gpu in enumerate(self._host.gpus):
            if gpu.present:
                self._arrive(slot)

    def gpu(self, slot: int) -> GpuDescription:
        """Return the GPU as it is now: cards are exchanged and moved, and their render nodes renumbered."""
        now = self._slot(slot)
        return self._host.gpus[slot]._replace(
            uuid=now.uuid.decode(),
            pci=(now.pci_domain, now.pci_bus, now.pci_device),
            render=None if now.render == layout.UNSET else now.render,
        )

    def remove(self, slot: int) -> None:
        """Take the GPU off the bus."""
        self._require_on_bus(slot)
        self._unbind(slot)
        with self._file.changing():
            self._slot(slot).on_bus = 0
        tree.unplug(self._root, self.gpu(slot).pci)

    def restore(self, slot: int) -> None:
        """Put the GPU on the bus, and give it to the nvidia driver if that is loaded."""
        if self._slot(slot).on_bus and self._state.driver_loaded and not self._is_nvidias(slot):
            self.bind(slot, NVIDIA)
        elif not self._slot(slot).on_bus:
            self._require_free(self.gpu(slot).pci)
            self._arrive(slot)

    def bind(self, slot: int, driver: str) -> None:
        """Give the GPU to a driver of the kernel; an empty name: to none."""
        self._require_on_bus(slot)
        if driver == NVIDIA and not self._state.driver_loaded:
            raise StateError("the nvidia driver is not loaded: simhost-ctl driver on")
        if len(driver) >= layout.Gpu.driver.size or "/" in driver:
            raise StateError(f"{driver!r} is not the name of a driver")
        self._unbind(slot)
        if driver == NVIDIA:
            self._bind_nvidia(slot)
            return
        tree.bind(self._root, self.gpu(slot).pci, driver)
        with self._file.changing():
            self._slot(slot).driver = driver.encode()

    def move(self, slot: int, address: str) -> None:
        """Put the card into another slot, as with the power off."""
        pci = parse_pci(address)
        if pci == self.gpu(slot).pci:
            return
        self._require_free(pci)
        was_there = bool(self._slot(slot).on_bus)
        if was_there:
            self.remove(slot)
        with self._file.changing():
            now = self._slot(slot)
            now.pci_domain, now.pci_bus, now.pci_device = pci
        if was_there:
            self._arrive(slot)

    def exchange(self, slot: int, new_uuid: str | None) -> None:
        """Put another card of the same model into the slot, as with the power off."""
        made_uuid = f"GPU-{uuid.uuid5(_NAMESPACE, self.gpu(slot).uuid)}"
        with self._file.changing():
            now = self._slot(slot)
            now.uuid = (made_uuid if new_uuid is None else new_uuid).encode()
            now.lost = now.mig_current = now.mig_pending = 0
            now.arrivals += 1

    def load_driver(self) -> None:
        """Load the kernel module nvidia, which takes each GPU that no driver has."""
        if self._state.driver_loaded:
            return
        free = [slot for slot in self._slots_on_bus() if not self._slot(slot).driver]
        if not free:
            raise StateError("the nvidia driver cannot be loaded: there is no GPU that no driver has")
        tree.load_driver(self._root, self._version, self._minors)
        with self._file.changing() as state:
            state.driver_loaded = 1
        self._load_drm_module()
        for slot in free:
            self._bind_nvidia(slot)

    def unload_driver(self) -> None:
        """Unload the module, even if programs use it; their GPUs are lost."""
        if not self._state.driver_loaded:
            return
        for slot in self._slots_on_bus():
            if self._is_nvidias(slot):
                self._unbind(slot)
        with self._file.changing() as state:
            state.driver_loaded = 0
        tree.unload_drm(self._root)
        tree.unload_driver(self._root)

    def set_drm(self, *, loaded: bool) -> None:
        """Load or unload nvidia-drm, also before nvidia itself."""
        if not loaded:
            for slot in self._slots_on_bus():
                self._remove_render_node(slot)
        with self._file.changing() as state:
            state.drm_loaded = loaded
        self._load_drm_module()
        if loaded:
            for slot in self._slots_on_bus():
                self._make_render_node(slot)

    def renumber(self) -> None:
        """Number the render nodes as a boot may: from 128, in the order of the addresses of all devices."""
        slots = [slot for slot in self._slots_on_bus() if self._has_render_node(slot)]
        others = [number for number, other in enumerate(self._host.others) if other.render is not None]
        for slot in slots:
            self._remove_render_node(slot)
        for number in others:
            tree.remove_render_node(
                self._root, self._host.others[number].pci, self._state.others[number].render
            )
        places: list[tuple[Pci, layout.Gpu | layout.Other]] = []
        places += [(self.gpu(slot).pci, self._slot(slot)) for slot in slots]
        places += [(self._host.others[number].pci, self._state.others[number]) for number in others]
        places.sort(key=lambda place: place[0])
        with self._file.changing():
            for render, (_, device) in enumerate(places, FIRST_RENDER):
                device.render = render
        for slot in slots:
            self._make_render_node(slot)
        for number in others:
            self._show_other(number)

    # ---- One GPU

    def _arrive(self, slot: int) -> None:
        tree.plug_in(self._root, self.gpu(slot))
        with self._file.changing():
            self._slot(slot).on_bus = 1
        if self._state.driver_loaded:
            self._bind_nvidia(slot)

    def _bind_nvidia(self, slot: int) -> None:
        gpu = self.gpu(slot)
        tree.make_gpu_node(self._root, gpu)
        tree.bind(self._root, gpu.pci, NVIDIA)
        with self._file.changing():
            self._slot(slot).driver = NVIDIA.encode()
        self._make_render_node(slot)
        with self._file.changing():
            self._slot(slot).arrivals += 1
            self._slot(slot).present = 1

    def _unbind(self, slot: int) -> None:
        """Take the GPU from its driver."""
        gpu = self.gpu(slot)
        with self._file.changing():
            self._slot(slot).present = 0
        self._remove_render_node(slot)
        with self._file.changing():
            self._slot(slot).driver = b""
        tree.bind(self._root, gpu.pci, "")
        tree.remove_gpu_node(self._root, gpu)

    def _is_nvidias(self, slot: int) -> bool:
        return bool(self._slot(slot).driver == NVIDIA.encode())

    def _has_render_node(self, slot: int) -> bool:
        described = self._slot(slot).render != layout.UNSET
        return described and self._is_nvidias(slot) and bool(self._state.drm_loaded)

    def _make_render_node(self, slot: int) -> None:
        """Make the GPU's node with the number that it had, or, as the kernel does, the first that is free."""
        if not self._has_render_node(slot):
            return
        pci, number = self.gpu(slot).pci, self._slot(slot).render
        link = self._root / f"dev/dri/by-path/pci-{address_of(pci)}-render"
        if link.is_symlink():
            return
        if self._is_taken(number):
            number = next(free for free in itertools.count(FIRST_RENDER) if not self._is_taken(free))
            with self._file.changing():
                self._slot(slot).render = number
        tree.make_render_node(self._root, pci, number)

    def _remove_render_node(self, slot: int) -> None:
        if self._has_render_node(slot):
            tree.remove_render_node(self._root, self.gpu(slot).pci, self._slot(slot).render)

    def _is_taken(self, render: int) -> bool:
        return (self._root / f"dev/dri/renderD{render}").exists()

    # ---- All

    @property
    def _state(self) -> layout.State:
        return self._file.state

    @property
    def _version(self) -> str:
        version: bytes = self._state.driver_version
        return version.decode()

    @property
    def _minors(self) -> int:
        return 1 + max((gpu.minor for gpu in self._host.gpus), default=-1)

    def _slot(self, slot: int) -> layout.Gpu:
        gpu: layout.Gpu = self._state.gpus[slot]
        return gpu

    def _slots_on_bus(self) -> list[int]:
        """Return the slots in the order of today's PCI addresses."""
        slots = [slot for slot in range(len(self._host.gpus)) if self._slot(slot).on_bus]
        return sorted(slots, key=lambda slot: self.gpu(slot).pci)

    def _show_other(self, number: int) -> None:
        other, render = self._host.others[number], self._state.others[number].render
        if other.render is not None:
            tree.make_render_node(self._root, other.pci, render)

    def _load_drm_module(self) -> None:
        if self._state.driver_loaded and self._state.drm_loaded:
            tree.load_drm(self._root)
        else:
            tree.unload_drm(self._root)

    def _require_on_bus(self, slot: int) -> None:
        if not self._slot(slot).on_bus:
            raise StateError(f"GPU {slot} is not on the bus: simhost-ctl restore {slot}")

    def _require_free(self, pci: Pci) -> None:
        if os.path.lexists(self._root / "sys/bus/pci/devices" / address_of(pci)):
            raise StateError(f"there is already a device at {address_of(pci)}")
