"""What the host is to become: the configuration that was accepted last, and the plan of it for the GPUs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from yunion_mps.errors import ConfigError
from yunion_mps.models import Config, DomainPlan, Inventory, Plan
from yunion_mps.mps.control import find_control_program
from yunion_mps.mps.domain import Domain
from yunion_mps.paths import Paths
from yunion_mps.planning import make_plan
from yunion_mps.supervisor.changes import Change, FindLeaseWaits, changes_to, settings_changed
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.preflight import Examination
from yunion_mps.supervisor.view import in_force

log = logging.getLogger(__name__)


class Target:
    """The plan is made anew where the GPUs become others; nothing on the host is changed here."""

    def __init__(self, paths: Paths, examined: Examination, gpus: Gpus) -> None:
        self._paths = paths
        self._machine_id = examined.machine_id
        self._gpus = gpus
        self.config: Config = examined.config
        self.plan: Plan = examined.plan
        #: What the host cannot do of what is configured, and goes without.
        self.remarks = examined.remarks

    def domains(self, plan: Plan | None = None) -> list[DomainPlan]:
        """The plan's domains, their directories below the root that everything of ours lies under."""
        return [
            domain._replace(
                pipe_directory=self._paths.under(domain.pipe_directory),
                log_directory=self._paths.under(domain.log_directory),
            )
            for domain in (plan or self.plan).domains
        ]

    def in_force(self, domains: Sequence[Domain]) -> Plan:
        """The plan with the devices as the clients of these domains get them now."""
        return in_force(self.plan, domains, self._gpus.inventory.gpus)

    def examine(
        self, examined: Examination, domains: Sequence[Domain], find_lease_waits: FindLeaseWaits
    ) -> tuple[Plan, list[Change]]:
        """The plan for what was read anew, and its changes to what the domains serve and leases have.

        Raises YunionError where it cannot be.
        """
        examined.check()
        plan = self._plan_for(examined.config, examined.inventory)
        if plan.domains:
            find_control_program()
        placed = plan._replace(domains=tuple(self.domains(plan)))
        settings = settings_changed(self.config, examined.config)
        before = self.in_force(domains)
        inventory = self._gpus.inventory
        changes = changes_to(placed, before, inventory, domains, settings, find_lease_waits)
        return plan, changes

    def accept(self, examined: Examination, plan: Plan) -> bool:
        """Aim at what was read anew from now on; returns whether that is anything else."""
        is_other = (examined.config, plan) != (self.config, self.plan)
        self.config, self.plan, self.remarks = examined.config, plan, examined.remarks
        return is_other

    def plan_anew(self) -> None:
        """Plan for the GPUs as they are known now; what cannot be planned is left as it was."""
        try:
            self.plan = self._plan_for(self.config, self._gpus.inventory)
        except ConfigError as error:
            log.error("the GPUs that came do not fit the configuration: %s", error.message)

    def _plan_for(self, config: Config, inventory: Inventory) -> Plan:
        plan, problems = make_plan(config, self._gpus.for_planning(inventory, self.plan), self._machine_id)
        if problems:
            raise ConfigError(problems)
        return plan
