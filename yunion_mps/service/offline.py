"""The one-shot commands of the daemon's program: `yunion-mps-daemon --check`, `--restore` and `--adopt`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection
from typing import NamedTuple

from yunion_mps.config import load
from yunion_mps.core.enums import STOPPED
from yunion_mps.core.errors import HostError, YunionError
from yunion_mps.core.mig import MigLayout
from yunion_mps.core.models import DomainPlan, Event, Gpu, PlannedGpu
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import GPU_GONE, GPU_LOST, GPU_OTHER_DRIVER, MIG_ENABLED
from yunion_mps.gpus.absent import gpu_label, report_absent
from yunion_mps.gpus.blockers import gpus_of
from yunion_mps.gpus.compute_mode import COMPUTE_MODE
from yunion_mps.gpus.kind import Kind
from yunion_mps.gpus.mig_restore import former_layouts, how_to_restore, withdrawn
from yunion_mps.gpus.mig_steps import bring_into_effect
from yunion_mps.gpus.originals import Originals
from yunion_mps.gpus.reconciler import Reconciler, Restoration, Results
from yunion_mps.gpus.restoration import restore_originals
from yunion_mps.host.proc import environment_of, program_of
from yunion_mps.host.processes import Watchable, drive, earliest
from yunion_mps.host.store import Store
from yunion_mps.inventory.mig import Mig
from yunion_mps.inventory.scan import Scanner, load_served, with_served
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.storage import recorded_ledger
from yunion_mps.mps.control_daemon import create_adoption_order
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.processes import (
    MARK,
    PROGRAM,
    AdoptionOrder,
    MpsProcess,
    could_be_ours,
    orphaned_servers,
    our_processes,
    record_order,
)
from yunion_mps.mps.rollover import OrphanedServers
from yunion_mps.planning.plan import below_root
from yunion_mps.supervisor.preflight import HostScan, Preflight, left_running, run_preflight, scan_gpus
from yunion_mps.supervisor.unit_access import unit_problems, unit_warnings

log = logging.getLogger("yunion_mps.daemon")

_ONCE_UNUSED = (
    "jobs may still need the current one: once no process uses the GPU and its leases are released "
    "(systemctl start yunion-mps-daemon; yunion-mps lease list), run this again: yunion-mps-daemon --restore"
)
#: How long the cleanup may take beyond the jobs' timeout, before it reports what is left.
_GRACE_S = 80


def check(paths: Paths, *, requires_driver: bool = False) -> int:
    """Check the configuration; raises YunionError if a start would refuse it.

    A start waits for a driver that does not work yet; with `requires_driver`, that is an error.
    """
    preflight = run_preflight(paths, find_unit_problems=unit_problems)
    try:
        preflight.for_start().check(even_without_driver=not requires_driver)
    finally:
        preflight.close()
    for warning in unit_warnings(paths, preflight.config):
        log.warning("%s", warning)
    error = preflight.driver_error
    if error:
        log.warning("the NVIDIA driver does not work now, so a start waits for it: %s", error.message)
        log.warning("%s", error.hint)
        log.info("the configuration is valid, but cannot be checked against the GPUs without the driver")
    else:
        log.info("the configuration is valid: %d devices", len(preflight.plan_with_layouts().devices))
    return 0


def restore(paths: Paths) -> int:
    """Clean up after a daemon that was killed, whatever is configured; returns 0 if nothing is left.

    It stops our control daemons, and restores compute modes, time slices, and MIG layouts with `mig_restore`.
    The caller holds the daemon's lock. Raises HostError if the state file cannot be read.
    """
    with contextlib.suppress(OSError):
        os.unlink(paths.socket)  # the daemon that listened there has ended
    if not Store.exists(paths) and not our_processes():
        log.info("nothing to restore: no earlier daemon left a record")
        return 0
    store = Store(paths)
    try:
        store.trust_copy()
        return _restore(paths, store)
    finally:
        store.close()


def _restore(paths: Paths, store: Store) -> int:
    config, _ = load(paths)  # invalid values count as their defaults
    timeout_s = config.cuda_mps_stop_timeout_s
    cleanup = _Cleanup(timeout_s, time.monotonic())
    end_s = time.monotonic() + timeout_s + _GRACE_S
    drive(cleanup, lambda: cleanup.ended or time.monotonic() > end_s)
    ledger = recorded_ledger(store)
    processes = left_running(store, leased=ledger.ways_kept().keys())
    scan = scan_gpus(paths)
    try:
        restored = _restore_gpus(paths, Originals(store), scan, ledger, gpus_of(processes))
    finally:
        if scan.nvml:
            scan.nvml.close()
    for process in processes:
        log.error(
            "%s is still running in %s; end it: kill -9 %d", process, process.pipe_directory, process.pid
        )
    if store.has_lost_records:
        log.error(
            "the original compute modes, time slices and MIG layouts are unknown, because the state file was "
            "damaged and had no copies; check them: nvidia-smi -q -d COMPUTE; nvidia-smi mig -lgi"
        )
        return 1
    if processes or not restored.is_complete:
        return 1
    if restored.has_absent:
        log.info("everything else is restored, and no control daemon is running")
    else:
        means = "no control daemon is running, and the GPUs have their original settings"
        log.info("everything is restored: %s", means)
    return 0


class _RestoredGpus(NamedTuple):
    """What became of the originals."""

    #: Whether everything is restored that can be restored now.
    is_complete: bool
    #: Whether something cannot, however often it is tried, such as on a GPU that is not there.
    has_absent: bool


def _restore_gpus(
    paths: Paths, originals: Originals, scan: HostScan, ledger: Ledger, left: Collection[str]
) -> _RestoredGpus:
    """Restore what GPUs had before our first change, and report what is not restored; raises HostError.

    scan: the GPUs, by which both MIG layouts and settings are restored
    left: the GPUs and instances (UUIDs) of MPS processes that are left running
    """
    inventory = Scanner(paths).scan_sysfs() if scan.error else scan.inventory
    gpus = with_served(inventory, load_served(paths).gpus).gpus
    layouts = _Layouts(paths, originals, scan)
    reconciler = Reconciler()
    restored = restore_originals(
        reconciler,
        originals,
        gpus,
        scan.nvml,
        layouts=layouts.known,
        ledger=ledger,
        left=left,
        keeps_requests=False,
    )
    is_complete = layouts.finish(gpus) and not restored.has_unknown
    restoration = restored.settings
    impossible = _impossible(restoration.results)
    report_absent(impossible, gpus)
    values = reconciler.original_values(originals)
    for kind in reconciler.kinds:
        for uuid, value in values.get(kind.name, {}).items():
            if uuid not in impossible.get(kind.label, {}):
                is_complete = False
                problem = f"the {kind.label} of {gpu_label(uuid, gpus)} differs from the original"
                log.error("%s; %s", problem, _how_to_restore(kind, uuid, value, restoration))
    return _RestoredGpus(is_complete, bool(impossible))


def _impossible(results: Results) -> dict[str, dict[str, YunionError]]:
    """Return what cannot be restored now, however often it is tried, as `Results.not_restored` does."""
    codes = {GPU_GONE, GPU_OTHER_DRIVER, MIG_ENABLED}
    impossible = {}
    for label, errors in results.not_restored().items():
        lasting = {uuid: error for uuid, error in errors.items() if error.code in codes}
        if lasting:
            impossible[label] = lasting
    return impossible


def _how_to_restore(kind: Kind, uuid: str, value: str, restoration: Restoration) -> str:
    """Return what the operator has to do about a setting that could not be restored."""
    for look, kept_by in restoration.pending.items():
        if look.key == (kind.name, uuid) and kept_by.users:
            return _ONCE_UNUSED
    how = f"restore it: {kind.command(uuid, value)}"
    error = restoration.results.not_restored().get(kind.label, {}).get(uuid)
    if error and error.code == GPU_LOST:
        return f"reset the GPU (nvidia-smi --gpu-reset -i {uuid}) or reboot the host, then {how}"
    return how


class _Layouts:
    """The MIG layouts of the configuration, of which those with `mig_restore` are restored, and former ones.

    If the files cannot be read completely, what cannot be decided is reported.
    """

    def __init__(self, paths: Paths, originals: Originals, scan: HostScan) -> None:
        """Read the files if a layout was changed, and record the compute modes that a switch will reset.

        scan: the GPUs
        """
        self._paths = paths
        self._originals = originals
        self._preflight: Preflight | None = None
        #: The GPUs (UUIDs) whose original layouts are recorded.
        self._changed = originals.changed_layouts()
        if not self._changed:
            return
        try:
            self._preflight = run_preflight(paths, scan=scan, even_if_disabled=True)
        except YunionError as error:
            log.error("MIG layouts are not restored: %s; %s", error.message, error.hint)
            return
        modes = {}
        for gpu in self._preflight.inventory.gpus:
            if gpu.uuid in self._to_restore and gpu.compute_mode:
                modes[gpu.uuid] = gpu.compute_mode
        originals.remember(COMPUTE_MODE.name, modes)

    @property
    def known(self) -> list[MigLayout]:
        """The layouts of the configuration and, if that can be read completely, former ones."""
        preflight = self._preflight
        if preflight is None:
            return []
        layouts = preflight.plan.layouts
        if preflight.driver_error or self._has_problems(preflight):
            return [*layouts]
        return [*layouts, *former_layouts(layouts, self._originals)]

    @property
    def _to_restore(self) -> set[str]:
        return self._changed & {layout.gpu_uuid for layout in self.known if layout.restore}

    def finish(self, gpus: Collection[Gpu]) -> bool:
        """Cancel requested modes, and report what is unknown; return whether nothing is left to restore."""
        preflight = self._preflight
        if preflight is None:
            return not self._changed
        is_cancelled = _cancel_requests(preflight, self._originals)
        changed = self._originals.changed_layouts()
        unknown: set[str] = set()
        cause = preflight.driver_error and preflight.driver_error.message
        if preflight.problems:
            cause = "the configuration has errors; see: yunion-mps config check"
        if cause:
            unknown = changed - self._known(preflight)
        for uuid in unknown:
            question = f"whether the MIG layout of {gpu_label(uuid, gpus)} is to be restored"
            log.error("it is not known %s, because %s", question, cause)
        return is_cancelled and not unknown and not (changed & self._to_restore)

    def _known(self, preflight: Preflight) -> set[str]:
        """Return the GPUs (UUIDs) of which it is known whether their layouts are to be restored."""
        if self._has_problems(preflight):
            return self._to_restore
        return {layout.gpu_uuid for layout in self.known}

    def _has_problems(self, preflight: Preflight) -> bool:
        """Whether an entry may have a layout that cannot be read."""
        device_file = self._paths.under(preflight.config.container_device_config_file)
        return any(problem.file == device_file for problem in preflight.problems)


def _cancel_requests(preflight: Preflight, originals: Originals) -> bool:
    """Cancel mode changes that no entry requires anymore; return whether none is left, as far as is known."""
    if preflight.nvml is None or preflight.problems:
        return True  # what cannot be decided is reported
    looks = withdrawn(preflight.plan.layouts, preflight.inventory.gpus, lambda: originals)
    result = bring_into_effect(looks, Mig(preflight.nvml), originals, None)
    are_all_cancelled = True
    for look in looks:
        why = result.reasons[look.uuid]
        if why:
            are_all_cancelled = False
            log.error("GPU %s: %s; %s", look.gpu.address, why, how_to_restore(why, look.gpu))
    return are_all_cancelled


class _Cleanup:
    """Stops our control daemons, and servers that have outlived theirs."""

    def __init__(self, timeout_s: int, now_s: float) -> None:
        self._domains: list[Domain] = []
        self._orphans: list[OrphanedServers] = []
        running = our_processes()
        for process in running:
            if not process.is_server:
                self._end(process, timeout_s, now_s)
        for directory in {process.pipe_directory for process in running}:
            orphans = OrphanedServers(directory, _ignore)
            orphans.add(orphaned_servers(directory), "", now_s + timeout_s, "its jobs did not end in time")
            self._orphans.append(orphans)

    def _end(self, process: MpsProcess, timeout_s: int, now_s: float) -> None:
        path = process.pipe_directory
        log.info(
            "stopping the control daemon (PID %d) in %s; giving its jobs %d s to end",
            process.pid,
            path,
            timeout_s,
        )
        plan = DomainPlan(path, path, path, tuple(map(PlannedGpu, process.gpu_uuids)), 100.0)
        domain = Domain(plan, program_of(process.pid), _ignore, lambda: None)
        domain.start(now_s, [process])  # which adopts it
        domain.stop(now_s, timeout_s=timeout_s)
        self._domains.append(domain)

    def tick(self, now_s: float, readable: Collection[Watchable] | None = None) -> float | None:
        """Do what is due; return when to be called again at the latest."""
        del readable  # dozens of domains at a time are rare here
        times_s = [domain.tick(now_s) for domain in self._domains]
        times_s += [orphans.tick(now_s, in_use=None) for orphans in self._orphans]
        return earliest(times_s)

    def watched(self) -> list[Watchable]:
        watched: list[Watchable] = []
        for domain in self._domains:
            watched += domain.watched()
        return watched

    @property
    def ended(self) -> bool:
        waits = any(orphans.pids for orphans in self._orphans)
        return not waits and all(domain.state == STOPPED for domain in self._domains)


def _ignore(_: Event) -> None:
    """Record no events; the log has them."""


def adopt(paths: Paths, pid: int) -> int:
    """Record the order to adopt another program's control daemon; raises YunionError if it cannot be adopted.

    That process is not touched: the daemon finds it at its next start, and sets its limits.
    """
    preflight = run_preflight(paths)
    try:
        preflight.check()
        order = _adoption_order(paths, pid, preflight)
    finally:
        preflight.close()
    if Store.exists(paths):
        store = Store(paths)
        try:
            store.forget_limits(order.pipe_directory)  # they are of another control daemon
        finally:
            store.close()
    record_order(order)
    log.info("the control daemon (PID %d) was adopted: yunion-mps-daemon now manages it", pid)
    return 0


def _adoption_order(paths: Paths, pid: int, preflight: Preflight) -> AdoptionOrder:
    config, plan = preflight.config, preflight.plan
    if config.cuda_mps_scope != "host" or not plan.domains:
        why, hint = "the configuration divides no GPU", "see: yunion-mps config check"
        if plan.domains:
            why = "cuda_mps_scope is gpu"
            hint = "set cuda_mps_scope: host; only a control daemon that serves all GPUs can be adopted"
        raise HostError(f"the control daemon (PID {pid}) cannot be adopted: {why}", hint)
    domain = below_root(plan.domains[0], paths)
    peer = peer_of(domain.pipe_directory)
    if peer is None or peer.pid != pid:
        serves = f"PID {peer.pid} serves it" if peer else "no control daemon serves it"
        hint = f"adopt the one that does; list them: pgrep -a {PROGRAM[:15]}"
        raise HostError(f"PID {pid} is not the control daemon of {domain.pipe_directory}: {serves}", hint)
    environment = environment_of(pid)
    if not could_be_ours(peer.pid) or not environment:
        message = f"PID {pid} (uid {peer.uid}) is not {PROGRAM}, or does not run as root"
        raise HostError(message, f"check it: ls -l /proc/{pid}/exe")
    if MARK in environment:
        raise HostError(
            f"the control daemon (PID {pid}) is already managed by yunion-mps", "nothing needs to be done"
        )
    gpus = [gpu.uuid for gpu in preflight.inventory.gpus]
    return create_adoption_order(pid, environment, gpus, domain)
