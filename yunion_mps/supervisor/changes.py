"""The desired state, the state in effect, and the changes between them that a reload makes.

Changes are shown in advance, and recorded when they begin.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.config import KEYS
from yunion_mps.config.devices import MEMORY_UNITS
from yunion_mps.core import reasons
from yunion_mps.core.enums import NOT_SHARED
from yunion_mps.core.errors import ConfigError, ShortageError
from yunion_mps.core.models import DomainPlan, Event, Gpu, Inventory, Plan
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import Reason
from yunion_mps.core.settings import Config
from yunion_mps.core.text import count
from yunion_mps.core.waits import AT_ONCE, LeaseWait, Users, all_of, wait_reason
from yunion_mps.gpus.blockers import Blockers, blocks, servers_of
from yunion_mps.gpus.kind import Step
from yunion_mps.gpus.kinds import KINDS
from yunion_mps.gpus.mig_layout import ConfirmedLosses
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.processes import find_control_program
from yunion_mps.planning.division import describe_division, pools_of, with_memory
from yunion_mps.planning.mig import describe, describe_layout, describe_result
from yunion_mps.planning.plan import below_root, devices_of, make_plan
from yunion_mps.planning.sharing import direct_devices, keep_sharing
from yunion_mps.supervisor.domain_directories import DomainDirectories
from yunion_mps.supervisor.fleet import Fleet
from yunion_mps.supervisor.gpus import Gpus
from yunion_mps.supervisor.preflight import Preflight, with_leased_domains

log = logging.getLogger(__name__)

#: Keys of host.conf whose changes appear in the plan; changes to other keys are listed as settings.
PLANNED_KEYS = {
    "enable_cuda_mps",
    "cuda_mps_pipe_directory",
    "cuda_mps_pipe_group",
    "cuda_mps_log_directory",
    "cuda_mps_replicas",
    "cuda_mps_compute_mode",
    "cuda_mps_scope",
    "cuda_mps_thread_percentage",
    "cuda_mps_combine",
    "cuda_mps_multiuser",
    "over_budget",
}

#: When a layout takes effect, before it is observed what uses the GPU.
_ONCE_UNUSED = "once nothing uses what the layout removes"


class Change(NamedTuple):
    """A change from `before` to `after`; `effect` says when it takes effect, and for which devices."""

    kind: str
    subject: str
    before: str
    after: str
    effect: str

    @property
    def at_once(self) -> bool:
        return self.effect == AT_ONCE

    def event(self) -> Event:
        return Event(
            severity="info",
            kind="configuration",
            subject=f"{self.kind} {self.subject}",
            what=f"{self.before or 'nothing'} -> {self.after or 'nothing'}",
            cause="the configuration was reloaded",
            consequence=f"it takes effect {self.effect}",
        )


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
        gpus, ways = self._gpus.inventory.gpus, self.ledger.ways_kept()
        self.plan = with_leased_domains(self.plan, ways, gpus, self.config, store, self._paths)
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
        domains = [*self.plan.domains, *self._target.domains]
        awaited = [(domain, self.plan.pending.keys() & domain.gpu_uuids) for domain in domains]
        return {uuid: min(leased) for domain, leased in awaited if leased for uuid in domain.gpu_uuids}

    def plan_for(self, preflight: Preflight, *, driver_worked: bool = True) -> tuple[Plan, list[Change]]:
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
        kept = self._keep_leased(plan).pending.keys() | {layout.gpu_uuid for layout in plan.layouts}
        whole = {uuid for uuid, way in self.ledger.ways_kept().items() if way == NOT_SHARED}
        kept |= whole - plan.offered  # which the plan removes, but which stay leased
        leases, waiting = self.ledger.users_by_gpu(), self.ledger.lease_waits(plan.devices)
        keeping = {uuid: users for uuid, users in leases.items() if uuid in kept}
        before, gpus, domains = self.in_effect(), self._gpus.inventory.gpus, self._fleet.domains
        plans = placed, before, preflight.plan_with_layouts()
        return plan, changes + changes_to(*plans, gpus, domains, waiting, keeping)

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
        self._target, self.plan = target, self._keep_leased(target)

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


def changes_to(
    plan: Plan,
    before: Plan,
    after: Plan,
    gpus: Sequence[Gpu],
    domains: Sequence[Domain],
    lease_waits: Mapping[str, LeaseWait],
    keeping: Mapping[str, Users] = {},
) -> list[Change]:
    """Return the changes from what is in effect (`before`, and the running `domains`) to `plan`.

    `after` is the plan with all layouts in effect. `keeping` has the leases that keep each GPU (UUID) as
    it is. Nothing of a GPU that is not there changes, except that its devices may be removed.
    What uses MIG instances is not known here; see `with_layout_effects`.
    """
    keepers = Blockers(leases=keeping, domains=domains, gpus=gpus)
    changes = _control_daemons(plan, domains, keepers)
    serving = [domain.in_effect for domain in domains]
    for gpu in gpus:
        uuid = str(gpu.uuid)
        is_there = gpu.reason.code not in reasons.GPU_ABSENT
        kept_by, servers = keepers.leases([uuid]), keepers.servers(uuid, plan.domains)
        old = _describe_budget(before, [*serving, *before.domains, *before.parked], gpu.uuid)
        new = _describe_budget(plan, [*plan.domains, *plan.parked], gpu.uuid)
        if old != new and (is_there or not new):
            wait = None if kept_by else lease_waits.get(uuid)
            effect = _after_leases(all_of([kept_by, servers]).effect, wait)
            changes.append(Change("budget", gpu.address, old, new, effect))
        if is_there:
            changes += _settings(plan, before, after, gpu, keepers)
        old_layout, new_layout = (describe_layout(some, gpu) for some in (before, plan))
        if old_layout and not new_layout:
            old_layout, new_layout = _without_layout(gpu)
        if old_layout != new_layout and is_there:
            now = describe(gpu.mig_instances) if gpu.mig_enabled else "MIG mode off"
            result = describe_result(after, gpu)
            when = _ONCE_UNUSED if result and new_layout != now else AT_ONCE
            changes.append(Change("MIG layout", gpu.address, old_layout, result or new_layout, when))
        old_use, new_use = (some.reserved.get(gpu.uuid or "", "") for some in (before, plan))
        if old_use != new_use and not gpu.parent:
            changes.append(Change("reservation", gpu.address, old_use, new_use, AT_ONCE))
        old_action, new_action = (some.over_budget.get(gpu.uuid or "", "") for some in (before, plan))
        if old_action and new_action and old_action != new_action:
            changes.append(
                Change("setting", f"over_budget of GPU {gpu.address}", old_action, new_action, AT_ONCE)
            )
    return changes


def _settings(plan: Plan, before: Plan, after: Plan, gpu: Gpu, keepers: Blockers) -> Iterator[Change]:
    """Yield the changes of the GPU's settings of all kinds, except those that follow from its MIG layout."""
    for kind in KINDS:
        old, new = kind.desired(before, gpu), kind.desired(plan, gpu)
        if old == new or new != kind.desired(after, gpu):
            continue
        needs = kind.needs(Step(old or "", new or "", restores=new is None))
        waits_for_servers = needs.servers or needs.control_daemons
        uuid = str(gpu.uuid)
        users = keepers.with_instances(uuid) if waits_for_servers else keepers.leases([uuid])
        yield Change(kind.label, gpu.address, old or "original", new or "original", users.effect)


def _without_layout(gpu: Gpu) -> tuple[str, str]:
    """Return what the GPU has, and what it has when no layout is configured for it anymore."""
    now = f"MIG mode {'on' if gpu.mig_enabled else 'off'}"
    if gpu.mig_pending not in (None, gpu.mig_enabled):
        return f"MIG mode {'on' if gpu.mig_pending else 'off'} after a reset", now
    return (describe(gpu.mig_instances), "as it is") if gpu.mig_instances else (now, now)


def with_layout_effects(changes: Iterable[Change], effects: Mapping[str, str]) -> list[Change]:
    """Return the changes, with these `effects` for MIG layouts, by GPU address."""
    shown = []
    for change in changes:
        if change.kind == "MIG layout" and change.subject in effects:
            shown.append(change._replace(effect=effects[change.subject]))
        else:
            shown.append(change)
    return shown


def without_refused(
    changes: Iterable[Change],
    plan: Plan,
    domains: Iterable[DomainPlan],
    gpus: Iterable[Gpu],
    settings: Mapping[str, Collection[str]],
) -> list[Change]:
    """Return the changes except those that were not made, because the driver refused to change a GPU.

    plan, domains: those after the refusal
    settings: the GPUs (UUIDs) that refused the value of a setting, by the label of its kind
    """
    refused = set()
    for gpu in gpus:
        if gpu.mode_is_fixed or gpu.reason.code == reasons.COMPUTE_MODE_REFUSED:
            refused.add(("compute mode", gpu.address))
            if gpu.pci_address in plan.unavailable:
                refused.add(("budget", gpu.address))
        for label, uuids in settings.items():
            if gpu.uuid in uuids:
                refused.add((label, gpu.address))
    if not refused:
        return [*changes]
    planned = _names(domains)
    made = []
    for change in changes:
        name = (change.subject, change.after or change.before)
        if change.kind == "control daemon" and (name in planned) != bool(change.after):
            continue
        if change.after and (change.kind, change.subject) in refused:
            continue
        made.append(change)
    return made


def as_made(
    changes: Iterable[Change],
    planned: Sequence[DomainPlan],
    domains: Iterable[Domain],
    laid_out: Collection[str],
) -> list[Change]:
    """Return the changes; those that a reload to the `planned` domains has made took effect at once.

    `laid_out` has the addresses of the GPUs whose MIG layouts are in effect.
    """
    running = [domain.in_effect for domain in domains]
    started = _names(new for new in planned if any(new.same_control_daemon(one) for one in running))
    left = _names(old for old in running if not any(old.same_control_daemon(one) for one in planned))

    def is_made(change: Change) -> bool:
        if change.kind == "control daemon":
            name = (change.subject, change.after or change.before)
            return name in started if change.after else name not in left
        adds_or_removes = change.kind == "budget" and not (change.before and change.after)
        gpu = change.subject.partition("-")[0]
        return (change.kind == "MIG layout" or adds_or_removes) and gpu in laid_out

    return [change._replace(effect=AT_ONCE) if is_made(change) else change for change in changes]


def _describe_budget(plan: Plan, domains: Iterable[DomainPlan], gpu_uuid: str | None) -> str:
    """Describe the division in `plan`, and how many devices its GPU's first domain combines."""
    planned = (gpu.most_combined for domain in domains for gpu in domain.gpus if gpu.uuid == gpu_uuid)
    combined = next(planned, 1)
    return describe_division(plan, gpu_uuid) + (f", up to {combined} combined" if combined > 1 else "")


def setting_changes(old: Config, new: Config) -> list[Change]:
    """Return the changes of the keys of host.conf that do not show in the plan."""
    values = [(name, getattr(old, name), getattr(new, name)) for name in KEYS if name not in PLANNED_KEYS]
    units = {mib: unit for unit, mib in MEMORY_UNITS.items()}
    values.append(("gpu_memory_unit", units[old.gpu_memory_unit_mib], units[new.gpu_memory_unit_mib]))
    return [
        Change("setting", name, _as_written(before), _as_written(after), AT_ONCE)
        for name, before, after in values
        if before != after
    ]


def _as_written(value: object) -> str:
    """Format a value as in host.conf; empty if it is not set."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _control_daemons(plan: Plan, domains: Sequence[Domain], keepers: Blockers) -> list[Change]:
    """Return which control daemons end and start; a replacement waits for the leases of both."""

    def effect(running: list[Domain], planned: list[DomainPlan]) -> str:
        plans = [*(domain.in_effect for domain in running), *planned]
        leases = keepers.leases(uuid for plan in plans for uuid in plan.gpu_uuids)
        return all_of([leases, *map(servers_of, running)]).effect

    old = [one for one in domains if not any(new.same_control_daemon(one.desired) for new in plan.domains)]
    new = [one for one in plan.domains if not any(one.same_control_daemon(old.desired) for old in domains)]
    rows = []
    for domain in old:
        when = effect([domain], [planned for planned in new if blocks(domain.in_effect, planned)])
        rows.append((domain.in_effect.name, _describe_control_daemon(domain.in_effect), "", when))
    for planned in new:
        when = effect([domain for domain in old if blocks(domain.in_effect, planned)], [planned])
        rows.append((planned.name, "", _describe_control_daemon(planned), when))
    return [Change("control daemon", *row) for row in rows]


def _names(plans: Iterable[DomainPlan]) -> set[tuple[str, str]]:
    """Return the names and descriptions of control daemons, by which changes name them."""
    return {(plan.name, _describe_control_daemon(plan)) for plan in plans}


def _describe_control_daemon(plan: DomainPlan) -> str:
    users = ", one server for all users" if plan.multiuser else ""
    group = f", accessible to the group {plan.pipe_group} only" if plan.pipe_group else ""
    return f"{count(len(plan.gpu_uuids), 'GPU')} in {plan.pipe_directory}{users}{group}"


def _after_leases(effect: str, wait: LeaseWait | None) -> str:
    if wait is None:
        return effect
    end = wait.users.effect
    waiting = len(wait.pending)
    if effect != AT_ONCE:
        return f"{effect}; {waiting} of {wait.total} devices {end}"
    if waiting == wait.total:
        return end
    return f"{AT_ONCE} for {wait.total - waiting} of {wait.total} devices; for the others {end}"


def in_effect(
    desired: Plan, domains: Sequence[Domain], gpus: Sequence[Gpu], waiting: Mapping[str, str] = {}
) -> Plan:
    """Return the plan with the devices and pools that clients get now, perhaps of an earlier plan.

    `waiting` has the GPUs (UUIDs) whose control daemon is replaced after leases, each with a leased GPU.
    """
    gpus = [with_memory(gpu, desired) for gpu in gpus]
    served = {uuid for domain in domains for uuid in domain.in_effect.gpu_uuids}
    rest = [gpu for gpu in gpus if gpu.uuid not in served]
    shown = [(domain.in_effect, gpus) for domain in domains]
    shown += [(plan, rest) for plan in (*desired.domains, *desired.parked)]
    devices = [device for plan, its in shown for device in devices_of(desired.host_id, plan, its)]
    devices += direct_devices(desired.host_id, desired.direct, rest)
    pools = [pool for plan, its in shown for pool in pools_of(plan, its)]
    pending = dict(_leaving(desired, domains, gpus, waiting))
    order = order_of(gpus)
    devices.sort(key=lambda device: (order[device.gpu_uuid], device.slot))
    pools.sort(key=lambda pool: order[pool.gpu_uuid])
    pending |= desired.pending
    return desired._replace(devices=tuple(devices), pools=tuple(pools), pending=pending)


def _leaving(
    desired: Plan, domains: Iterable[Domain], gpus: Iterable[Gpu], waiting: Mapping[str, str]
) -> Iterator[tuple[str, Reason]]:
    """Yield the GPUs (UUIDs) that a control daemon serves until its servers have ended, and what follows.

    They get no new leases, which would delay that forever.
    """
    stay = {uuid for plan in (*desired.domains, *desired.parked) for uuid in plan.gpu_uuids}
    what = {str(gpu.uuid): "its MIG layout" for gpu in gpus if desired.has_layout(gpu)}
    what |= {gpu.uuid: f"the change to {gpu.sharing}" for gpu in desired.direct}
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    for domain in domains:
        users = servers_of(domain) or "its control daemon"
        for uuid in domain.in_effect.gpu_uuids:
            if uuid not in stay:
                change = what.get(uuid, "the removal of its devices")
                yield uuid, wait_reason(change, users, reasons.LIMITS_PENDING)
            elif domain.is_draining and (other := waiting.get(uuid)):
                why = f"a pending change to GPU {addresses.get(other, other)}: {desired.pending[other]}"
                yield uuid, Reason(f"its control daemon is draining because of {why}", reasons.LEASES_PENDING)
            elif domain.is_draining:
                yield (
                    uuid,
                    wait_reason("the replacement of its control daemon", users, reasons.LIMITS_PENDING),
                )


def order_of(gpus: Iterable[Gpu]) -> dict[str | None, int]:
    return {gpu.uuid: place for place, gpu in enumerate(gpus)}


def _log_warnings(warnings: Iterable[Reason], known: Collection[Reason]) -> None:
    for warning in warnings:
        if warning not in known:
            log.warning("%s [%s]", warning, warning.code)
