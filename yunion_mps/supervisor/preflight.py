"""What is known before anything changes: configuration and inventory, checked together, and what still runs.

Control daemons that an earlier daemon left running are found by their processes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.config import load
from yunion_mps.core import reasons
from yunion_mps.core.enums import KEEP, MPS
from yunion_mps.core.errors import ConfigError, DriverError, HostError, Problem
from yunion_mps.core.models import EXCLUSIVE_PROCESS, DomainPlan, Driver, Gpu, Inventory, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import Reason
from yunion_mps.core.settings import Config
from yunion_mps.gpus.compute_mode import COMPUTE_MODE
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.processes import Process, readable, spawn
from yunion_mps.host.store import Store
from yunion_mps.inventory.driver import reason_of
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner, load_served, machine_id, with_saved
from yunion_mps.mps.control_daemon import MULTIUSER
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.limits import LimitsInEffect
from yunion_mps.mps.processes import (
    PROGRAM,
    MpsProcess,
    client_variables,
    find_control_program,
    our_processes,
    server_path,
)
from yunion_mps.planning.division import mode_for
from yunion_mps.planning.entries import confirm_replacements
from yunion_mps.planning.kept_sharing import ways_of_sharing
from yunion_mps.planning.mig import with_layouts
from yunion_mps.planning.plan import make_plan, without_root
from yunion_mps.supervisor.domain_directories import DomainDirectories

log = logging.getLogger(__name__)

#: What happens to a setting with a minor problem.
IGNORED_SETTING = "the daemon ignores this setting"
RESTORED_LATER = "the next start of yunion-mps-daemon then restores its GPUs' compute modes"

#: How long a test run of a control program may take: it serves within milliseconds, or later under load.
_TRIAL_S = 2.0
_TRIAL_POLL_S = 0.005

#: Finds the directories that the service's unit does not let the daemon use.
FindUnitProblems = Callable[[Paths, Config], "list[Problem]"]

#: The results of test runs, by a program's path, modification time and size.
_knows_multiuser: dict[tuple[str, int, int], bool] = {}


class HostScan(NamedTuple):
    """The GPUs as they were found."""

    #: NVML, which the caller closes; None if it cannot be opened.
    nvml: Nvml | None
    #: Without GPUs if the driver does not work.
    inventory: Inventory
    #: Why the driver does not work.
    error: DriverError | None = None


def scan_gpus(paths: Paths, opened: Nvml | None = None) -> HostScan:
    """Scan the GPUs, through `opened` if NVML is already open; raises ShortageError."""
    nvml, scanner = opened, Scanner(paths)
    try:
        nvml = opened or Nvml()
        return HostScan(nvml, scanner.scan(nvml))
    except DriverError as error:
        inventory = Inventory(Driver("", None), (), controllers=scanner.controllers())
        return HostScan(nvml, inventory, error)


class Preflight(NamedTuple):
    """The result of a preflight.

    `nvml` is open if MPS is enabled and the driver answers; the caller closes it. `warnings` name settings
    that are configured but ignored. `directories` are those of the domains in `plan`.
    """

    config: Config
    problems: tuple[Problem, ...]
    inventory: Inventory
    plan: Plan
    machine_id: str
    nvml: Nvml | None
    driver_error: DriverError | None
    directories: DomainDirectories
    warnings: tuple[Reason, ...] = ()

    @property
    def all_warnings(self) -> tuple[Reason, ...]:
        """The warnings, and those of directories that are not used because of other users."""
        return (*self.warnings, *self.directories.warnings())

    @property
    def configured(self) -> Config:
        """The configuration as it is written, with settings that are ignored."""
        is_ignored = any(warning.code == reasons.MULTIUSER_UNSUPPORTED for warning in self.warnings)
        return self.config._replace(cuda_mps_multiuser=True) if is_ignored else self.config

    def check(self, *, even_without_driver: bool = False) -> None:
        """Raise ConfigError with all problems, or DriverError if the driver does not work."""
        if self.problems:
            raise ConfigError(self.problems)
        if self.driver_error and not even_without_driver:
            raise self.driver_error

    def for_start(self) -> Preflight:
        """Return what a start uses; raise ConfigError if the configuration cannot be used.

        Minor problems prevent no start: settings of metrics or the web page are ignored with a warning, and a
        GPU that its entry does not fit is unavailable. Neither does a driver that does not work yet.
        """
        if not all(problem.is_minor for problem in self.problems):
            raise ConfigError(self.problems)
        warnings = [*self.warnings]
        for problem in self.problems:
            if not (problem.gpu or problem.entry):
                warnings.append(Reason(f"{problem}; {IGNORED_SETTING}", reasons.CONFIGURATION_IGNORED))
        return self._replace(problems=(), warnings=tuple(warnings))

    def plan_with_layouts(self) -> Plan:
        """Return the plan once all MIG layouts are in effect."""
        if not self.plan.layouts:
            return self.plan
        gpus = with_layouts(self.inventory.gpus, self.plan.layouts)
        return make_plan(self.config, self.inventory._replace(gpus=gpus), self.machine_id)[0]

    def close(self) -> None:
        if self.nvml:
            self.nvml.close()


def run_preflight(
    paths: Paths,
    opened: Nvml | None = None,
    *,
    scan: HostScan | None = None,
    even_if_disabled: bool = False,
    confirms_replacements: bool = False,
    creates_directories: bool = False,
    find_unit_problems: FindUnitProblems | None = None,
) -> Preflight:
    """Read the files and scan the GPUs, through `opened` if NVML is already open; or use this `scan` of them.

    Changes nothing, except that `creates_directories` creates the domains' directories if the configuration
    can be used, so that no other user can create them before the control daemons start.

    If MPS is disabled, the GPUs are not scanned; with `even_if_disabled`, it counts as enabled. With
    `confirms_replacements`, the operator confirms that entries mean the cards that replaced theirs.
    `find_unit_problems` returns the directories that the service's unit forbids. Raises HostError if there is
    no machine id, and ShortageError if it cannot be found out which control daemons run.
    """
    machine = machine_id(paths)
    config, problems = load(paths)
    config = config._replace(enable_cuda_mps=config.enable_cuda_mps or even_if_disabled)
    config, warnings = _without_multiuser(config, paths)
    host = _PlannedHost(HostScan(None, Inventory(Driver("", None), ())))
    if config.enable_cuda_mps:
        host = _plan_host(
            config,
            paths,
            scan or scan_gpus(paths, opened),
            machine,
            confirms_replacements=confirms_replacements,
        )
    host_problems = host.problems
    device_file = paths.under(config.container_device_config_file)
    if not config.devices and any(problem.file == device_file for problem in problems):
        host_problems = ()  # the entries have problems, so cuda_mps_replicas does not apply
    can_start = all(problem.is_minor for problem in (*problems, *host_problems))
    directories = DomainDirectories(config, paths, creates=creates_directories and can_start)
    nvml = host.scan.nvml
    try:
        plan = directories.place(host.plan)
    except HostError:
        if scan is None and nvml is not None and nvml is not opened:
            nvml.close()
        raise
    unit_problems = find_unit_problems(paths, directories.in_use(config)) if find_unit_problems else []
    return Preflight(
        config=config,
        problems=(*problems, *host_problems, *unit_problems),
        inventory=host.scan.inventory,
        plan=plan,
        machine_id=machine,
        nvml=nvml,
        driver_error=host.scan.error,
        directories=directories,
        warnings=warnings,
    )


class _PlannedHost(NamedTuple):
    """The GPUs with what is recorded of them, and what they should be."""

    scan: HostScan
    plan: Plan = Plan("")
    problems: Sequence[Problem] = ()


def _plan_host(
    config: Config, paths: Paths, scan: HostScan, machine: str, *, confirms_replacements: bool
) -> _PlannedHost:
    """Return the plan for the GPUs that were found, and for those that are recorded and not found."""
    inventory = with_saved(scan.inventory, load_served(paths), are_named=bool(config.devices))
    if confirms_replacements:
        meant = confirm_replacements(inventory.meant, inventory)
        inventory = inventory._replace(meant=meant, meant_is_damaged=False)
    if scan.error:
        reason = reason_of(scan.error)
        lost = [gpu._replace(reason=reason) for gpu in inventory.gpus]
        inventory = inventory._replace(gpus=tuple(lost), driver_reason=reason)
    plan, problems = make_plan(config, inventory, machine)
    addresses = {gpu.pci_address for gpu in scan.inventory.gpus} | plan.unavailable.keys()
    gpus = [gpu for gpu in inventory.gpus if gpu.pci_address in addresses]
    inventory = inventory._replace(gpus=tuple(gpus))
    return _PlannedHost(scan._replace(inventory=inventory), plan, problems)


def _without_multiuser(config: Config, paths: Paths) -> tuple[Config, tuple[Reason, ...]]:
    """Drop cuda_mps_multiuser if NVIDIA's program does not support it, with a warning."""
    if not (config.enable_cuda_mps and config.cuda_mps_multiuser):
        return config, ()
    if supports_multiuser(paths) is not False:
        return config, ()
    warning = (
        f"cuda_mps_multiuser is true, but {find_control_program()} does not support it: only one user's jobs "
        "run at a time"
    )
    return config._replace(cuda_mps_multiuser=False), (Reason(warning, reasons.MULTIUSER_UNSUPPORTED),)


def supports_multiuser(paths: Paths) -> bool | None:
    """Whether NVIDIA's control program can serve all users at once; None if that is not known."""
    # A directory for the sockets of a trial run: ours if the daemon has run before.
    directory = paths.run_directory if os.access(paths.run_directory, os.W_OK) else "/tmp"
    try:
        return knows_multiuser(find_control_program(), directory)
    except HostError:  # the start reports this with a hint
        return None


def knows_multiuser(program: str, run_directory: str, deadline_s: float = _TRIAL_S) -> bool:
    """Whether the program can serve all users at once; may block until the deadline, so call it on a thread.

    Programs before 570 start as a front-end if they get an unknown flag (measured with 535), and versions are
    unreliable because vendors backport changes. So the program is tried in a temporary directory below
    `run_directory`, whose path must be short, because it holds a socket. The result is cached until the
    program changes. Raises HostError if it cannot be tried.
    """
    try:
        info = os.stat(program)
        key = (program, info.st_mtime_ns, info.st_size)
        if key in _knows_multiuser:
            return _knows_multiuser[key]
        knows = _try_multiuser(program, run_directory, deadline_s)
    except OSError as error:
        raise HostError(f"{program} cannot be run: {error.strerror}", "check the file system") from None
    if knows is not None:
        _knows_multiuser[key] = knows
    return knows is True


def _try_multiuser(program: str, run_directory: str, deadline_s: float) -> bool | None:
    # Imported here, because they take several milliseconds and few hosts need them.
    import shutil
    import tempfile

    directory = tempfile.mkdtemp(prefix="try.", dir=run_directory)
    try:
        variables = {
            **client_variables(directory),
            "PATH": server_path(program),
            "CUDA_MPS_LOG_DIRECTORY": directory,
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(os.devnull, "r+b") as null:
            output = null.fileno()
            process = spawn([program, "-f", MULTIUSER], variables, stdin=None, stdout=output, stderr=output)
        try:
            return _wait_until_serving(process, directory, deadline_s)
        finally:
            process.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_serving(process: Process, directory: str, deadline_s: float) -> bool | None:
    """Whether it serves there; None if it neither serves nor exits before the deadline."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if process.status() is not None:
            return False
        peer = peer_of(directory)
        if peer and peer.pid == process.pid:
            return True
        readable(process.fileno(), _TRIAL_POLL_S)
    return None


# -- what an earlier daemon left running


class Leftovers(NamedTuple):
    """Processes of an earlier daemon that the plan does not adopt.

    `running` lists all of our processes, `known` the limits of domains to supervise until they have no jobs;
    `notice` says what the operator has to do about a control daemon without a record.
    """

    running: list[MpsProcess]
    known: list[LimitsInEffect]
    notice: str


def find_leftovers(store: Store | None, planned: Sequence[DomainPlan]) -> Leftovers:
    """Find leftovers; raise HostError if a control daemon without a record serves a GPU that the plan needs.

    It may have jobs, so it is left alone, and none of its GPUs gets a second control daemon.
    """
    gpus = {plan.pipe_directory: set(plan.gpu_uuids) for plan in planned}
    needed = set[str]().union(*gpus.values())
    # What the plan needs of the records of ended control daemons, it has: they are deleted.
    leftovers = Leftovers(left_running(store), [], "")
    for process in leftovers.running:
        directory = process.pipe_directory
        if process.is_server or gpus.get(directory, set()) & set(process.gpu_uuids):
            continue
        recorded = LimitsInEffect.from_json(store.recorded_limits(directory)) if store else None
        if recorded is None and process.plan:  # its daemon ended before it served
            recorded = LimitsInEffect(process.plan, ())
        if recorded and recorded.plan.gpu_uuids == process.gpu_uuids:
            leftovers.known.append(recorded)
            continue
        message = f"a control daemon (PID {process.pid}) from an earlier run still serves {directory}"
        hint = (
            f"once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {PROGRAM}; "
            f"{RESTORED_LATER}"
        )
        if needed & set(process.gpu_uuids):
            raise HostError(message, hint)
        log.error("%s; %s", message, hint)
        leftovers = leftovers._replace(notice=f"{message}; {hint}")
    return leftovers


def with_leased_domains(
    plan: Plan, leased: Mapping[str, str], gpus: Sequence[Gpu], config: Config, store: Store, paths: Paths
) -> Plan:
    """Return the plan with the recorded control daemons of `leased` GPUs that it does not share through MPS.

    `leased` says how each GPU (UUID) is shared. Without its control daemon, the next process of a job that
    has none at the moment would fail. One that has ended, as at a stop or a reboot, is started again.
    """
    ways = ways_of_sharing(plan)
    missing = {uuid for uuid, way in leased.items() if way == MPS != ways.get(uuid)}
    if not missing:
        return plan
    usable = {str(gpu.uuid) for gpu in gpus if not (gpu.reason or gpu.mig_enabled)}
    can_start = usable if config.enable_cuda_mps else set()
    running = {process.pipe_directory for process in left_running(store, leased=leased)}
    domains: list[DomainPlan] = []
    continued: set[str] = set()
    for directory in sorted(store.recorded_domains(), key=lambda directory: directory not in running):
        recorded = LimitsInEffect.from_json(store.recorded_limits(directory))
        if recorded is None:
            continue
        needed = missing if directory in running else missing & can_start
        uuids = [uuid for uuid in recorded.plan.gpu_uuids if uuid in needed]
        if uuids:
            domains.append(without_root(recorded.plan.for_gpus(uuids), paths))
            missing.difference_update(uuids)
            continued.update(uuids)
    modes = _modes_of_leased(continued, gpus, plan, config, store)
    return plan._replace(domains=(*plan.domains, *domains), compute_modes={**plan.compute_modes, **modes})


def _modes_of_leased(
    leased: Collection[str], gpus: Iterable[Gpu], plan: Plan, config: Config, store: Store
) -> dict[str, str]:
    """Return the compute modes that the `leased` GPUs and instances (UUIDs) need for MPS, by GPU UUID."""
    former = Originals(store).of(COMPUTE_MODE.name).keys()
    modes = dict.fromkeys(former & set(leased), EXCLUSIVE_PROCESS)
    for gpu in gpus:
        if gpu.uuid not in leased:
            continue
        is_kept = config.cuda_mps_compute_mode == KEEP
        if gpu.pci_address in plan.sharing:
            is_kept = gpu.physical_address in plan.kept_modes
        whole, mode = mode_for(gpu, MPS)
        if whole in former or not (is_kept or gpu.mode_is_fixed):
            modes[whole] = mode
    return modes


def left_running(
    store: Store | None, watched: Collection[str] = (), leased: Collection[str] = ()
) -> list[MpsProcess]:
    """Return our MPS processes that run in pipe directories which are not `watched`.

    Deletes records of directories without processes and `leased` GPUs (UUIDs). Raises ShortageError if
    processes cannot be listed.
    """
    running = our_processes()
    if store:
        used = {*watched, *[process.pipe_directory for process in running]}
        _forget_records(store, used, leased)
    return [process for process in running if process.pipe_directory not in watched]


def _forget_records(store: Store, used: Collection[str], leased: Collection[str]) -> None:
    """Delete the records of directories that are not `used` and have no `leased` GPUs (UUIDs)."""
    try:
        for directory in store.recorded_domains():
            if directory in used:
                continue
            recorded = LimitsInEffect.from_json(store.recorded_limits(directory))
            if recorded is None or set(leased).isdisjoint(recorded.plan.gpu_uuids):
                store.forget_limits(directory)
    except HostError as error:
        log.warning("records of ended control daemons cannot be deleted: %s; %s", error.message, error.hint)
