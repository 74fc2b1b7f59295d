"""What the GPUs are like: what NVML says, and what we know beyond that."""

from __future__ import annotations

import logging
from collections.abc import Collection

from yunion_mps.errors import DriverError
from yunion_mps.inventory.events import xid_meaning
from yunion_mps.inventory.scan import GONE, save_served
from yunion_mps.inventory.sysfs import sort_key
from yunion_mps.models import Config, Event, Gpu, Inventory, Plan
from yunion_mps.paths import Paths
from yunion_mps.planning import reason_against
from yunion_mps.supervisor.compute_modes import ModeResult
from yunion_mps.supervisor.illness import Illness

log = logging.getLogger(__name__)


class Gpus:
    """The GPUs as they were looked at last, each with the reason why it cannot be used, if there is one."""

    def __init__(self, inventory: Inventory, config: Config, plan: Plan, illness: Illness) -> None:
        self._illness = illness
        #: Why its compute mode could not be set, by UUID.
        self.mode_errors: dict[str, DriverError] = {}
        #: Whether the last look has changed anything.
        self.changed = False
        self._remembered: set[tuple[str | None, str]] | None = None
        concerned = _concerned(inventory, plan)
        gpus = [self._judged(gpu, config, concerned) for gpu in inventory.gpus]
        self.inventory = inventory._replace(gpus=tuple(gpus))

    def look(self, inventory: Inventory, config: Config, plan: Plan) -> list[Event]:
        """Take note of what they are like now; returns what has happened to which.

        One that only sysfs still lists, or that is gone and serves devices, stays who it was.
        """
        before = {gpu.pci_address: gpu for gpu in self.inventory.gpus}
        self._forget_cured(inventory, before)
        concerned = _concerned(self.inventory, plan)
        known = [_known(gpu, before) for gpu in inventory.gpus]
        gpus = {gpu.pci_address: self._judged(gpu, config, concerned) for gpu in known}
        served = tuple(sorted({*self.inventory.served, *inventory.served}))
        uuids = {gpu.uuid for gpu in gpus.values()}
        lost = {gpu.pci_address for gpu in before.values() if gpu.uuid in served} & set(plan.unavailable)
        for address in (_serving(self.inventory, plan) | lost) - set(gpus):
            if before[address].uuid not in uuids:  # or it has another place now
                gpus[address] = before[address]._replace(reason=GONE, nvml_index=None)
        seen = tuple(sorted(gpus.values(), key=lambda gpu: sort_key(gpu.pci_address)))
        events = [event for gpu in seen for event in _changes(gpu, before.get(gpu.pci_address))]
        after = inventory._replace(gpus=seen, served=served)
        self.changed = after != self.inventory
        self.inventory = after
        return events

    def mark_ill(self, pci_address: str, xid: int) -> Event | None:
        """Take note of an XID (an error that the driver reported); the event, None for a GPU not known."""
        gpu = next((gpu for gpu in self.inventory.gpus if gpu.pci_address == pci_address), None)
        if gpu is None:
            return None
        fatal, words = xid_meaning(xid)
        event = Event("warning", "gpu", gpu.address, f"XID {xid}: {words}", "the driver reported it")
        if not fatal:
            return event._replace(consequence="jobs on it may have failed; its devices stay available")
        remedy = f"reset it (nvidia-smi --gpu-reset -i {gpu.uuid}) or reboot, then: yunion-mps reload"
        self._illness.note(pci_address, f"XID {xid} ({words}): {remedy}")
        self._replace(gpu._replace(reason=gpu.reason or self._illness.reason(pci_address)))
        return event._replace(severity="error", consequence="its devices are unavailable")

    @property
    def healthy(self) -> set[str]:
        """The UUIDs of the GPUs that are there and well."""
        return {str(gpu.uuid) for gpu in self.inventory.gpus if gpu.uuid and not gpu.reason}

    def note_modes(self, result: ModeResult) -> None:
        """Take note of compute modes that were set, and of GPUs that refused."""
        self.mode_errors.update(result.errors)
        for gpu in self.inventory.gpus:
            uuid = gpu.uuid or ""
            if uuid in result.modes:
                self.mode_errors.pop(uuid, None)
                self._replace(gpu._replace(compute_mode=result.modes[uuid]))
            elif uuid in result.errors:
                self._replace(self._with_mode_error(gpu))

    def forgive(self) -> None:
        """Take every GPU for well again: the operator says so by a reload."""
        for gpu in self.inventory.gpus:
            if gpu.reason and gpu.reason == self._illness.reason(gpu.pci_address):
                self._replace(gpu._replace(reason=""))
        self._illness.cure()
        self.mode_errors.clear()

    def remember(self, plan: Plan, paths: Paths) -> None:
        """Write down who serves, also who would and is lost, for a daemon that starts while one is lost.

        Nobody at all, as where MPS was disabled for a while, is not written down: that forgets nobody.
        """
        planned = {uuid for domain in (*plan.domains, *plan.parked) for uuid in domain.gpu_uuids}
        kept = tuple(gpu for gpu in self.inventory.gpus if gpu.uuid in planned)
        self.inventory = self.inventory._replace(served=tuple(sorted(planned)))
        places = {(gpu.uuid, gpu.pci_address) for gpu in kept}
        if places and places != self._remembered and save_served(paths, kept):
            self._remembered = places

    def for_planning(self, inventory: Inventory, plan: Plan) -> Inventory:
        """The GPUs as a plan is to see them: one that serves and is ill, lost or gone now keeps its place."""
        known = {gpu.pci_address: gpu for gpu in self.inventory.gpus}
        serving = _serving(self.inventory, plan)
        gpus = {gpu.pci_address: gpu for gpu in inventory.gpus}
        for address in serving:
            now = gpus.get(address)
            refuses = known[address].uuid in self.mode_errors
            if not refuses and (now is None or now.uuid in (None, known[address].uuid)):
                gpus[address] = known[address]._replace(reason="", mig_enabled=None, compute_mode=None)
        seen = [self._with_mode_error(gpu) for gpu in gpus.values()]
        return inventory._replace(gpus=tuple(sorted(seen, key=lambda gpu: sort_key(gpu.pci_address))))

    def _replace(self, gpu: Gpu) -> None:
        gpus = [gpu if other.pci_address == gpu.pci_address else other for other in self.inventory.gpus]
        self.inventory = self.inventory._replace(gpus=tuple(gpus))

    def _with_mode_error(self, gpu: Gpu) -> Gpu:
        error = self.mode_errors.get(gpu.uuid or "")
        return gpu._replace(reason=f"its compute mode cannot be set: {error.message}") if error else gpu

    def _judged(self, gpu: Gpu, config: Config, concerned: Collection[str]) -> Gpu:
        """The GPU, with the reason where it is to serve devices and cannot: MIG mode, say."""
        gpu = self._with_mode_error(gpu)
        reason = reason_against(gpu, config) if gpu.pci_address in concerned else gpu.reason
        return gpu._replace(reason=reason or self._illness.reason(gpu.pci_address))

    def _forget_cured(self, inventory: Inventory, before: dict[str, Gpu]) -> None:
        """A GPU that was gone and is back was reset: what it had is over."""
        for gpu in inventory.gpus:
            known = before.get(gpu.pci_address)
            was_gone = known and known.reason and known.reason != self._illness.reason(gpu.pci_address)
            if was_gone and not gpu.reason:
                self._illness.cure(gpu.pci_address)


def _serving(inventory: Inventory, plan: Plan) -> set[str]:
    """The PCI addresses of the GPUs that are divided into devices."""
    uuids = {uuid for domain in plan.domains for uuid in domain.gpu_uuids}
    return {gpu.pci_address for gpu in inventory.gpus if gpu.uuid in uuids}


def _concerned(inventory: Inventory, plan: Plan) -> set[str]:
    """The PCI addresses of the GPUs that the configuration divides, also of those that cannot be."""
    return _serving(inventory, plan) | set(plan.unavailable)


def _known(gpu: Gpu, before: dict[str, Gpu]) -> Gpu:
    """The GPU; one that is lost, perhaps in the middle of a look at it, with what was known of it."""
    known = before.get(gpu.pci_address)
    if known and gpu.reason and gpu.uuid in (None, known.uuid):
        return known._replace(reason=gpu.reason)
    return gpu


def _changes(gpu: Gpu, before: Gpu | None) -> list[Event]:
    """What has happened to the GPU, as events and in the log."""
    reason = before.reason if before else "it was not there"
    if gpu.reason and gpu.reason != reason:
        log.error("GPU %s cannot be used: %s", gpu.address, gpu.reason)
        return [Event("error", "gpu", gpu.address, "unavailable", gpu.reason, "its devices are unavailable")]
    if reason and not gpu.reason:
        log.info("GPU %s is back", gpu.address)
        return [
            Event("info", "gpu", gpu.address, "available", f"it was not: {reason}", "it can be used again")
        ]
    return []
