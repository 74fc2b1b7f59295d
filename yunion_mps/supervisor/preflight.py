"""Configuration and inventory, checked together before anything changes: at a start, reload or check."""

from __future__ import annotations

import os
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.config import load
from yunion_mps.errors import ConfigError, DriverError, HostError, Problem
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import load_served, machine_id, scan, with_served
from yunion_mps.models import Config, Driver, Inventory, Plan
from yunion_mps.mps.processes import find_control_program
from yunion_mps.paths import Paths
from yunion_mps.planning.plan import make_plan
from yunion_mps.reasons import Reason

#: What happens to a setting with a minor problem.
IGNORED_SETTING = "the daemon ignores this setting"


class Preflight(NamedTuple):
    """The result of a preflight.

    `nvml` is open if MPS is enabled and the driver answers; the caller closes it. `warnings` name settings
    that are configured but ignored.
    """

    config: Config
    problems: tuple[Problem, ...]
    inventory: Inventory
    plan: Plan
    machine_id: str
    nvml: Nvml | None
    driver_error: DriverError | None
    warnings: tuple[Reason, ...] = ()

    def check(self) -> None:
        """Raise ConfigError with all problems, or DriverError if the driver does not work."""
        if self.problems:
            raise ConfigError(self.problems)
        if self.driver_error:
            raise self.driver_error

    def for_start(self) -> Preflight:
        """If all problems are minor (metrics, the web page), return the preflight with warnings instead."""
        if not all(problem.is_minor for problem in self.problems):
            return self
        ignored = (
            Reason(f"{problem}; {IGNORED_SETTING}", reasons.CONFIGURATION_IGNORED)
            for problem in self.problems
        )
        return self._replace(problems=(), warnings=(*self.warnings, *ignored))

    def close(self) -> None:
        if self.nvml:
            self.nvml.close()


def run_preflight(paths: Paths, opened: Nvml | None = None) -> Preflight:
    """Read both files and scan the GPUs, by way of `nvml` if it is open already; changes nothing.

    Raises HostError if there is no machine id.
    """
    host = machine_id(paths)
    config, problems = load(paths)
    config, warnings = _without_multiuser(config, paths)
    nvml, inventory, driver_error = None, Inventory(Driver("", None), ()), None
    gone: set[str] = set()
    if config.enable_cuda_mps:
        try:
            nvml = opened or Nvml()
            inventory, gone = _with_served(scan(nvml, paths), config, paths)
        except DriverError as error:
            driver_error = error
    plan = Plan("")
    host_problems: list[Problem] = []
    if driver_error is None:
        plan, host_problems = make_plan(config, inventory, host)
        kept = (g for g in inventory.gpus if g.pci_address not in gone or g.pci_address in plan.unavailable)
        inventory = inventory._replace(gpus=tuple(kept))
    if not config.devices and any(problem.file != paths.host_conf for problem in problems):
        host_problems = []  # the entries have problems, so cuda_mps_replicas does not apply
    found = (*problems, *host_problems)
    return Preflight(config, found, inventory, plan, host, nvml, driver_error, warnings)


def _with_served(found: Inventory, config: Config, paths: Paths) -> tuple[Inventory, set[str]]:
    """Add the lost GPUs that served to the inventory; also return the addresses without a GPU now."""
    before = load_served(paths)
    known = before.gpus if config.devices or before.this_boot else ()
    inventory = with_served(found, known)
    there = {gpu.pci_address for gpu in found.gpus}
    return inventory, {gpu.pci_address for gpu in inventory.gpus} - there


def _without_multiuser(config: Config, paths: Paths) -> tuple[Config, tuple[Reason, ...]]:
    """Drop cuda_mps_multiuser if NVIDIA's program does not support it, with a warning."""
    if not (config.enable_cuda_mps and config.cuda_mps_multiuser):
        return config, ()
    from yunion_mps.mps.startup import knows_multiuser  # rarely needed

    # A directory for the sockets of a trial run: ours if the daemon has run before.
    directory = paths.run_directory if os.access(paths.run_directory, os.W_OK) else "/tmp"
    try:
        program = find_control_program()
        if knows_multiuser(program, directory):
            return config, ()
    except HostError:  # the start reports this with a hint
        return config, ()
    warning = (
        f"cuda_mps_multiuser is true, but {program} does not support it: users wait for each other's jobs"
    )
    return config._replace(cuda_mps_multiuser=False), (Reason(warning, reasons.MULTIUSER_UNSUPPORTED),)
