"""The desired state: the last accepted configuration, and its plan for the GPUs that there are."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping

from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.errors import ConfigError, ShortageError
from yunion_mps.core.models import DomainPlan, Inventory, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import Reason
from yunion_mps.core.settings import Config
from yunion_mps.core.waits import Users
from yunion_mps.gpus.blockers import Blockers
from yunion_mps.gpus.mig_layout import ConfirmedLosses
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.processes import find_control_program
from yunion_mps.planning.kept_sharing import keep_sharing
from yunion_mps.planning.plan import below_root, make_plan
from yunion_mps.supervisor.changes import Change, SettingFacts, changes_to, setting_changes
from yunion_mps.supervisor.domain_directories import DomainDirectories
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.in_effect import in_effect
from yunion_mps.supervisor.preflight import Preflight, with_leased_domains

log = logging.getLogger(__name__)


class DesiredState:
    """The last accepted configuration and its plan for the GPUs; changes nothing on the host.

    In `plan`, GPUs are still shared as their leases require, in `_target` as configured.
    """

    def __init__(
        self,
        paths: Paths,
        preflight: Preflight,
        *,
        gpus: Gpus,
        fleet: Fleet,
        ledger: Ledger,
        confirmed: ConfirmedLosses,
    ) -> None:
        self._paths = paths
        self._machine_id = preflight.machine_id
        self._gpus = gpus
        self._fleet = fleet
        self.config: Config = preflight.config
        self.plan: Plan = preflight.plan
        self._target: Plan = preflight.plan
        self.ledger = ledger
        #: The GPUs and MIG devices whose leases MIG layouts do not wait for.
        self._confirmed = confirmed
        self._directories = preflight.directories
        #: Settings that are configured but ignored.
        self._ignored = preflight.warnings
        _log_warnings(self.warnings, known=())

    @property
    def warnings(self) -> tuple[Reason, ...]:
        """Settings that are configured but ignored, and directories that are replaced."""
        return (*self._ignored, *self._directories.warnings())

    def keep_leased(self, store: Store) -> None:
        """Keep GPUs with leases of an earlier daemon as they are."""
        self.plan = with_leased_domains(
            self.plan,
            leased=self.ledger.ways_kept(),
            gpus=self._gpus.inventory.gpus,
            config=self.config,
            store=store,
            paths=self._paths,
        )
        self.replan()

    def domains(self, plan: Plan | None = None) -> list[DomainPlan]:
        """Return the plan's domains, with their directories below our root directory."""
        return [below_root(domain, self._paths) for domain in (plan or self.plan).domains]

    def target_domains(self) -> list[DomainPlan]:
        """Return the domains as configured, whatever leases keep as it is."""
        return self.domains(self._target)

    def blockers(
        self, *, left: Collection[str] = (), processes: Mapping[str, Collection[int]] = {}
    ) -> Blockers:
        """Return what keeps GPUs and MIG instances as they are now.

        left: the GPUs (UUIDs) of our processes that an earlier daemon left running
        processes: the PIDs of all processes that use each GPU (UUID)
        """
        gpus, domains = self._gpus.inventory.gpus, self._fleet.domains
        return Blockers.of(self.ledger, domains=domains, gpus=gpus, left=left, processes=processes)

    def in_effect(self) -> Plan:
        return in_effect(self.plan, self._fleet.domains, self._gpus.inventory.gpus, self.waiting())

    def waiting(self) -> dict[str, str]:
        """Return the GPUs (UUIDs) whose control daemon is replaced after leases, each with a leased GPU."""
        waiting: dict[str, str] = {}
        for domain in (*self.plan.domains, *self._target.domains):
            leased = self.plan.pending.keys() & domain.gpu_uuids
            if leased:
                waiting.update(dict.fromkeys(domain.gpu_uuids, min(leased)))
        return waiting

    def plan_for(
        self, preflight: Preflight, *, driver_worked: bool = True, settings: SettingFacts | None = None
    ) -> tuple[Plan, list[Change]]:
        """Return the plan for a reloaded configuration, and its changes to domains and leases.

        `driver_worked` is whether the driver has worked since the start. Raises YunionError if no plan is
        possible, or if a driver that has worked does not work now.
        """
        preflight.check(even_without_driver=not driver_worked)
        self._leave_mended(preflight)
        plan = self._make_plan(preflight.config, preflight.inventory, preflight.directories)
        if plan.domains:
            find_control_program()
        placed = plan._replace(domains=tuple(self.domains(plan)))
        changes = setting_changes(self.config, preflight.config)
        changes += changes_to(
            placed,
            before=self.in_effect(),
            after=preflight.plan_with_layouts(),
            gpus=self._gpus.inventory.gpus,
            domains=self._fleet.domains,
            lease_waits=self.ledger.lease_waits(plan.devices),
            keeping=self._leases_that_keep(plan),
            settings=settings,
        )
        return plan, changes

    def _leases_that_keep(self, plan: Plan) -> dict[str, Users]:
        """Return the leases that keep GPUs (UUIDs) as they are, which this plan would change."""
        to_change = {layout.gpu_uuid for layout in plan.layouts}
        to_change.update(self._keep_leased(plan).pending)
        for uuid, way in self.ledger.ways_kept().items():
            if way == NOT_SHARED and uuid not in plan.offered:  # the plan removes it, but it stays leased
                to_change.add(uuid)
        keeping: dict[str, Users] = {}
        for uuid, users in self.ledger.users_by_gpu().items():
            if uuid in to_change:
                keeping[uuid] = users
        return keeping

    def _leave_mended(self, preflight: Preflight) -> None:
        """Let control daemons without leases and jobs use the configured directories again.

        Other directories in the configuration are used even by one that has some: it is replaced after them.
        """
        keys = ("cuda_mps_pipe_directory", "cuda_mps_log_directory")
        is_same = all(getattr(self.config, key) == getattr(preflight.config, key) for key in keys)
        held: set[str] = set()
        leased = self.ledger.users_by_gpu().keys()
        for domain in self._fleet.domains:
            has_leases = self.ledger.unknown or not leased.isdisjoint(domain.in_effect.gpu_uuids)
            if has_leases or domain.server_pids():
                held.add(domain.in_effect.pipe_directory)
        preflight.directories.leave_mended(lambda path: is_same and path in held)

    def accept(self, preflight: Preflight, plan: Plan) -> bool:
        """Make the reloaded configuration the desired one; return whether it differs."""
        differs = (preflight.config, plan) != (self.config, self._target)
        known = self.warnings
        self.config = preflight.config
        self._ignored = preflight.warnings
        self._directories = preflight.directories
        _log_warnings(self.warnings, known=known)
        self._aim_at(plan)
        return differs

    def replan(self) -> None:
        """Plan for the GPUs as they are known now; if that fails, keep the plan."""
        known = self.warnings
        try:
            self._aim_at(
                self._make_plan(self.config, self._gpus.inventory, self._directories, is_accepted=True)
            )
        except ConfigError as error:
            log.error("the configuration does not fit the newly found GPUs: %s", error.message)
        except ShortageError as error:
            log.error("the plan stays as it is: %s", error.message)
        _log_warnings(self.warnings, known=known)

    def refuse_directories(self, domains: Iterable[DomainPlan]) -> bool:
        """Choose other directories for domains that cannot start in theirs because of other users.

        Returns whether there are any; then `replan` plans with them.
        """
        known = self.warnings
        is_any_moved = False
        for domain in domains:
            with contextlib.suppress(ShortageError):  # the next attempt to start it tells again
                is_any_moved = self._directories.refuse(domain) or is_any_moved
        _log_warnings(self.warnings, known=known)
        return is_any_moved

    def _aim_at(self, target: Plan) -> None:
        self._target = target
        self.plan = self._keep_leased(target)

    def _keep_leased(self, target: Plan) -> Plan:
        gpus, ignored = self._gpus.inventory.gpus, self._confirmed.uuids
        leased = {uuid: way for uuid, way in self.ledger.ways_kept().items() if uuid not in ignored}
        blockers, domains = self.blockers(), self.domains(target)
        return keep_sharing(target, self.plan, leased, gpus, lambda uuid: blockers.of_gpu(uuid, domains))

    def _make_plan(
        self,
        config: Config,
        inventory: Inventory,
        directories: DomainDirectories,
        *,
        is_accepted: bool = False,
    ) -> Plan:
        """Return the plan; problems of single entries of an `is_accepted` configuration are conditions."""
        known = self._gpus.for_planning(inventory, self.plan, are_named=bool(config.devices))
        used = self.ledger.ways_kept().keys() | self.blockers().by_gpu().keys()
        plan, problems = make_plan(config, known, self._machine_id, used)
        if not all(problem.is_minor or (is_accepted and problem.entry) for problem in problems):
            raise ConfigError(problems)
        return directories.place(plan)


def _log_warnings(warnings: Iterable[Reason], known: Collection[Reason]) -> None:
    for warning in warnings:
        if warning not in known:
            log.warning("%s [%s]", warning, warning.code)
