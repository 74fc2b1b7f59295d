"""GPU health: NVML's reports, and faults that NVML does not show.

A GPU with a fatal Xid still answers NVML. The fault is kept until the GPU is reset or the operator runs a
reload, and survives restarts of the daemon until the next boot.

Source: NVIDIA: Xid Errors, section "Analyzing Xid Errors with the Xid Catalog".
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Mapping

from yunion_mps.core import reasons
from yunion_mps.core.errors import DriverError
from yunion_mps.core.models import PROHIBITED, Event, Gpu, Inventory, MeantGpu, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.gpus.compute_mode import COMPUTE_MODE
from yunion_mps.gpus.kind import TRIED_AGAIN
from yunion_mps.gpus.refusals import Refusals
from yunion_mps.host.files import write_atomically
from yunion_mps.inventory.gpu_events import xid_meaning
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import (
    Scanner,
    gone,
    identities,
    in_order,
    not_found,
    save_served,
    with_served,
)
from yunion_mps.planning.division import unusable_reason, with_memory

log = logging.getLogger(__name__)

#: Codes of errors that say nothing about the compute mode itself.
_PASSING = reasons.GPU_ABSENT | {
    reasons.DRIVER_NOT_LOADED,
    reasons.DRIVER_MISMATCH,
    reasons.DRIVER_MISSING,
    reasons.DRIVER_HUNG,
}


class Gpus:
    """The GPUs at the last poll, each with the reason why it cannot be used, if any."""

    def __init__(self, inventory: Inventory, plan: Plan, paths: Paths, refusals: Refusals) -> None:
        self._paths = paths
        self._refusals = refusals
        #: Faults by PCI address.
        self._faults = _read_faults(paths.gpu_faults)
        #: The GPUs (UUIDs) whose driver does not support a change of the compute mode, until the daemon ends.
        self._fixed_modes: set[str] = set()
        #: Whether what the entries mean could be saved.
        self.is_saved = True
        #: What was saved last.
        self._saved: object = None
        gpus = [self._with_reason(gpu, plan) for gpu in inventory.gpus]
        self.inventory = inventory._replace(gpus=tuple(gpus))

    @property
    def healthy(self) -> set[str]:
        return {str(gpu.uuid) for gpu in self.inventory.gpus if gpu.uuid and not gpu.reason}

    def update(self, inventory: Inventory, plan: Plan) -> list[Event]:
        """Apply the result of a poll, and return which GPUs have come; replaces `inventory` if it changed.

        A GPU that only sysfs still lists, or that is gone and serves devices, keeps its identity.
        """
        before = {gpu.pci_address: gpu for gpu in self.inventory.gpus}
        for gpu in inventory.gpus:
            earlier = before.get(gpu.pci_address)
            if earlier and earlier.reason not in ("", self._fault_of(earlier)) and not gpu.reason:
                self._clear_faults(gpu.pci_address)  # it was gone and is back, so it was reset
        gpus_found = (_with_identity(gpu, before.get(gpu.pci_address)) for gpu in inventory.gpus)
        gpus = {gpu.pci_address: self._with_reason(gpu, plan) for gpu in gpus_found}
        served = tuple(sorted({*self.inventory.served, *inventory.served}))
        uuids = {gpu.uuid for gpu in gpus.values()} | identities(gpus.values())
        served_or_parents = {*served, *(gpu.parent for gpu in before.values() if gpu.uuid in served)}
        lost = {gpu.pci_address for gpu in before.values() if gpu.uuid in served_or_parents}
        lost.intersection_update(plan.unavailable)
        for address in (_serving(self.inventory, plan) | lost) - set(gpus):
            if not {before[address].uuid, before[address].identity} & uuids:  # otherwise it has moved
                gpus[address] = gone(before[address], gpus)
        after = inventory._replace(
            gpus=in_order(gpus.values()),
            served=served,
            meant=self.inventory.meant,
            meant_is_damaged=self.inventory.meant_is_damaged,
        )
        if after != self.inventory:
            self.inventory = after
        events: list[Event] = []
        for gpu in after.gpus:
            if gpu.pci_address not in before and not gpu.reason and plan.divides(gpu):
                events.append(_arrival(gpu))
        return events

    def with_known_settings(self, inventory: Inventory, changing_mig: Collection[str] = ()) -> Inventory:
        """Return what a poll has found while steps change GPUs: only which GPUs answer is used.

        Working GPUs keep the compute mode, MIG mode and instances that are known.

        changing_mig: the GPUs (UUIDs) that keep all that is known of them and of their instances, because
            their instances come and go while they are read. One that is lost is noticed by the scan that
            follows the steps.
        """
        before = {gpu.pci_address: gpu for gpu in self.inventory.gpus}
        known_gpus = [gpu for gpu in self.inventory.gpus if {gpu.uuid, gpu.parent} & {*changing_mig}]
        kept_addresses = {gpu.physical_address for gpu in known_gpus}
        scanned = [gpu for gpu in inventory.gpus if gpu.physical_address not in kept_addresses]
        gpus = [*known_gpus]
        working: set[str] = set()
        for gpu in scanned:
            known = before.get(gpu.pci_address)
            if gpu.is_instance or gpu.reason or known is None or known.uuid != gpu.uuid:
                continue
            if known.reason.code in reasons.GPU_ABSENT:
                continue  # it has come back, with its settings reset
            working.add(str(gpu.uuid))
            gpus.append(
                gpu._replace(
                    compute_mode=known.compute_mode,
                    mig_enabled=known.mig_enabled,
                    mig_pending=known.mig_pending,
                    mig_instances=known.mig_instances,
                )
            )
        gpus += [gpu for gpu in scanned if not {gpu.uuid, gpu.parent} & working]
        gpus += [gpu for gpu in self.inventory.gpus if gpu.parent in working]
        return inventory._replace(gpus=in_order(gpus))

    def note_xid(self, pci_address: str, xid: int) -> Event | None:
        """Record an Xid (an error that the driver reported); return None for an unknown GPU."""
        gpu = next((gpu for gpu in self.inventory.gpus if gpu.pci_address == pci_address), None)
        if gpu is None:
            return None
        is_fatal, meaning = xid_meaning(xid)
        event = Event("warning", "gpu", gpu.address, f"Xid {xid}: {meaning}", "reported by the driver")
        if not is_fatal:
            consequence = "jobs on the GPU may have failed; its devices remain available"
            return event._replace(consequence=consequence, code=reasons.XID)
        self._faults[pci_address] = Reason(f"Xid {xid} ({meaning})", reasons.GPU_FAULT)
        self._write_faults()
        for part in self.inventory.gpus:
            if part.physical_address == pci_address:
                self._replace(part._replace(reason=part.reason or self._fault_of(part)))
        consequence = "its devices are unavailable"
        return event._replace(severity="error", consequence=consequence, code=reasons.GPU_FAULT)

    def note_modes(self, modes: Mapping[str, str], errors: Mapping[str, DriverError]) -> bool:
        """Record compute modes that were set, and GPUs that refused, by UUID, also for their instances.

        A GPU whose driver supports no change of the mode can be used in the mode that it has. Returns whether
        one that had refused its mode can be used now.
        """
        are_new_usable = False
        for uuid, error in errors.items():
            if error.code == reasons.COMPUTE_MODE_UNSUPPORTED:
                self._fixed_modes.add(uuid)
        for gpu in self.inventory.gpus:
            uuid = gpu.parent or gpu.uuid or ""
            if uuid in modes:
                known = gpu._replace(compute_mode=modes[uuid])
                if gpu.reason.code == reasons.COMPUTE_MODE_REFUSED:
                    known = known._replace(reason=self._fault_of(gpu))
                    are_new_usable = True
                self._replace(known)
            elif uuid in errors:
                self._replace(self._with_mode_answer(gpu))
        return are_new_usable

    def refuse_if_no_mode_can_be_set(self, plan: Plan) -> None:
        """Raise DriverError if every GPU that the plan divides has refused its compute mode."""
        usable = [gpu for gpu in self.inventory.gpus if gpu.pci_address not in plan.unavailable]
        divided = [gpu for gpu in usable if gpu.uuid in plan.gpu_uuids]
        errors = self._mode_errors()
        if divided and all(gpu.uuid in errors for gpu in divided):
            first = next(iter(errors.values()))
            message = f"no GPU's compute mode can be set: {first.message}"
            raise DriverError(message, first.hint, reasons.COMPUTE_MODE_REFUSED)

    def clear_faults(self) -> None:
        """Consider every GPU healthy, as the operator asks by a reload."""
        for gpu in self.inventory.gpus:
            if gpu.reason and gpu.reason == self._fault_of(gpu):
                self._replace(gpu._replace(reason=NO_REASON))
        self._clear_faults(*self._faults)

    def scan(self) -> Nvml | None:
        """Scan the GPUs, even if MPS is disabled; return the open NVML, or None if the driver fails."""
        try:
            nvml = Nvml()
        except DriverError as error:
            log.error("the GPUs of leases are not known: %s; %s", error.message, error.hint)
            return None
        with contextlib.suppress(DriverError):  # which the next poll reports
            self.inventory = Scanner(self._paths).scan(nvml)._replace(meant=self.inventory.meant)
        return nvml

    def find_again(self, nvml: Nvml, uuids: Collection[str]) -> None:
        """Scan once more before a stop restores settings of GPUs (`uuids`), if one has come or gone.

        NVML is initialised again if it does not report a GPU that is there. A GPU that is not there has the
        reason, even if nothing divides it. Raises DriverError if the driver does not answer.
        """
        scanner = Scanner(self._paths)
        absent = {gpu.uuid for gpu in self.inventory.gpus if gpu.reason.code in reasons.GPU_ABSENT}
        if absent.isdisjoint(uuids) and scanner.controllers() == self.inventory.controllers:
            return
        inventory = scanner.scan(nvml)
        if not_found(inventory) and nvml.initialise_again():
            inventory = scanner.scan(nvml)
        known = [gpu for gpu in self.inventory.gpus if gpu.uuid]
        self.inventory = self.inventory._replace(
            gpus=with_served(inventory, known).gpus, controllers=inventory.controllers
        )

    def set_served(self, plan: Plan) -> None:
        """Record what the entries mean, and the GPUs that serve, or would if not lost.

        A daemon that starts while one of them is lost, or has another render node, then still knows it. An
        empty plan, for example with MPS disabled, is not recorded, so that no GPU is forgotten.
        """
        self.inventory = self.inventory._replace(served=tuple(sorted(plan.gpu_uuids)))
        self.save(plan)

    def save(self, plan: Plan) -> None:
        """Record what the entries mean, and the GPUs that will serve, before anything of them changes."""
        planned = self._planned(plan)
        planned_gpus = tuple(gpu for gpu in self.inventory.gpus if gpu.uuid in planned)
        self.inventory = self.inventory._replace(meant=plan.meant)
        record = ({(gpu.uuid, gpu.pci_address) for gpu in planned_gpus}, dict(plan.meant))
        if not (planned_gpus or plan.meant):
            return
        if record == self._saved and os.path.exists(self._paths.served_gpus):
            return
        self.is_saved = save_served(self._paths, planned_gpus, plan.meant)
        if self.is_saved:
            self._saved = record

    def _planned(self, plan: Plan) -> set[str]:
        """Return the UUIDs of all divided GPUs and MIG instances, and of the instances' GPUs."""
        planned = set(plan.gpu_uuids)
        return planned | {gpu.parent for gpu in self.inventory.gpus if gpu.uuid in planned and gpu.parent}

    def set_meant(self, meant: Mapping[str, MeantGpu]) -> None:
        """Use what the entries mean after a reload, by which the operator has confirmed replaced cards."""
        self.inventory = self.inventory._replace(meant=meant, meant_is_damaged=False)

    def for_planning(self, inventory: Inventory, plan: Plan, *, are_named: bool = True) -> Inventory:
        """Return the GPUs as a plan should see them: those that serve keep their place if faulty or lost.

        One that no entry names (`are_named` is false) is given up if it is bound to another driver.
        """
        before = {gpu.pci_address: gpu for gpu in self.inventory.gpus}
        gpus = {gpu.pci_address: gpu for gpu in inventory.gpus}
        again = identities(inventory.gpus)
        for address in _serving(self.inventory, plan):
            scanned = gpus.get(address)
            if scanned is None and before[address].identity in again:
                continue
            if scanned and not are_named and scanned.reason.code == reasons.GPU_OTHER_DRIVER:
                continue
            known = self._with_mode_answer(before[address])
            is_closed = known.mode_is_fixed and known.compute_mode == PROHIBITED
            refuses = is_closed or known.reason.code == reasons.COMPUTE_MODE_REFUSED
            if not refuses and (scanned is None or scanned.uuid in (None, before[address].uuid)):
                gpus[address] = before[address]._replace(
                    reason=NO_REASON, mig_enabled=None, compute_mode=None
                )
        return inventory._replace(gpus=in_order(map(self._with_mode_answer, gpus.values())))

    def _replace(self, gpu: Gpu) -> None:
        gpus = [gpu if other.pci_address == gpu.pci_address else other for other in self.inventory.gpus]
        self.inventory = self.inventory._replace(gpus=tuple(gpus))

    def _with_mode_answer(self, gpu: Gpu) -> Gpu:
        """Return the GPU with what the driver has answered to a change of its compute mode."""
        uuid = gpu.parent or gpu.uuid or ""
        if uuid in self._fixed_modes:
            return gpu._replace(mode_is_fixed=True)
        error = self._mode_errors().get(uuid)
        if error is None or gpu.reason:
            return gpu
        text = f"its compute mode cannot be set: {error.message}; {TRIED_AGAIN}"
        return gpu._replace(reason=Reason(text, reasons.COMPUTE_MODE_REFUSED))

    def _mode_errors(self) -> dict[str, DriverError]:
        """Return why compute modes cannot be set, by GPU UUID.

        A GPU that could not be reached has not refused: its mode is set once it answers.
        """
        errors = {}
        for uuid, refusal in self._refusals.to_set(COMPUTE_MODE.name).items():
            error = refusal.error
            if (
                isinstance(error, DriverError)
                and error.code not in _PASSING
                and uuid not in self._fixed_modes
            ):
                errors[uuid] = error
        return errors

    def _with_reason(self, gpu: Gpu, plan: Plan) -> Gpu:
        """Return the GPU with the reason why it cannot serve its devices, such as MIG mode."""
        gpu = self._with_mode_answer(gpu)
        way = plan.sharing.get(gpu.pci_address)
        keeps_mode = gpu.physical_address in plan.kept_modes
        reason = gpu.reason
        if way:
            reason = unusable_reason(with_memory(gpu, plan), way, keeps_mode=keeps_mode)
        return gpu._replace(reason=reason or self._fault_of(gpu))

    def _fault_of(self, gpu: Gpu) -> Reason:
        return self._faults.get(gpu.physical_address, NO_REASON)

    def _clear_faults(self, *pci_addresses: str) -> None:
        if [address for address in pci_addresses if self._faults.pop(address, None) is not None]:
            self._write_faults()

    def _write_faults(self) -> None:
        with contextlib.suppress(OSError):  # the faults are still known until this daemon ends
            if self._faults:
                write_atomically(self._paths.gpu_faults, json.dumps(self._faults))
            else:
                os.unlink(self._paths.gpu_faults)


def _read_faults(path: str) -> dict[str, Reason]:
    """Return the fatal errors that an earlier daemon has seen since the boot, by PCI address."""
    try:
        with open(path, encoding="utf-8") as file:
            faults = json.load(file).items()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        log.warning(
            "%s cannot be read (%s): fatal GPU errors before this start are not known; "
            "see: dmesg | grep -i xid",
            path,
            error,
        )
        return {}
    return {str(address): Reason(str(why), reasons.GPU_FAULT) for address, why in faults}


def _serving(inventory: Inventory, plan: Plan) -> set[str]:
    uuids = plan.gpu_uuids
    addresses = {gpu.pci_address for gpu in inventory.gpus if gpu.uuid in uuids}
    return addresses - plan.unavailable.keys()


def _with_identity(gpu: Gpu, before: Gpu | None) -> Gpu:
    """Return the GPU; if it was lost, perhaps during the poll, with its known identity."""
    if before and gpu.reason and gpu.uuid in (None, before.uuid):
        return before._replace(reason=gpu.reason)
    return gpu


def _arrival(gpu: Gpu) -> Event:
    """Log that a GPU has come, and return the event."""
    log.info("GPU %s is available", gpu.address)
    return Event(
        severity="info",
        kind="gpu",
        subject=gpu.address,
        what="available",
        cause="previously missing",
        consequence="it can be used",
    )
