"""The changes that a reload makes: shown in advance, and recorded when they begin. Pure.

They are the differences between the desired state (`desired`) and the state in effect (`in_effect`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.config import KEYS
from yunion_mps.config.device_file import MEMORY_UNITS
from yunion_mps.core import reasons
from yunion_mps.core.models import DomainPlan, Event, Gpu, Plan
from yunion_mps.core.settings import Config
from yunion_mps.core.text import count
from yunion_mps.core.waits import AT_ONCE, LeaseWait, Users, all_of
from yunion_mps.gpus.blockers import Blockers, blocks, servers_of
from yunion_mps.gpus.kind import Step
from yunion_mps.gpus.kinds import KINDS
from yunion_mps.mps.domain import Domain
from yunion_mps.planning.division import describe_division
from yunion_mps.planning.mig import describe, describe_layout, describe_result

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


class SettingFacts(NamedTuple):
    """What decides when a setting of a GPU changes, as for its condition."""

    #: All leases, servers and processes.
    blockers: Blockers
    #: The original values, by the name of their kind and the UUID of their GPU.
    originals: Mapping[str, Mapping[str, str]] = {}


def changes_to(
    plan: Plan,
    before: Plan,
    after: Plan,
    gpus: Sequence[Gpu],
    domains: Sequence[Domain],
    lease_waits: Mapping[str, LeaseWait],
    keeping: Mapping[str, Users] = {},
    settings: SettingFacts | None = None,
) -> list[Change]:
    """Return the changes from what is in effect (`before`, and the running `domains`) to `plan`.

    `after` is the plan with all layouts in effect. `keeping` has the leases that keep each GPU (UUID) as
    it is. `settings` is what decides when settings of GPUs change. Nothing of a GPU that is not there
    changes, except that its devices may be removed.
    What uses MIG instances is not known here; see `with_layout_effects`.
    """
    keepers = Blockers(leases=keeping, domains=domains, gpus=gpus)
    changes = _control_daemons(plan, domains, keepers)
    running = [domain.in_effect for domain in domains]
    for gpu in gpus:
        uuid = str(gpu.uuid)
        is_there = gpu.reason.code not in reasons.GPU_ABSENT
        old_budget = _describe_budget(before, [*running, *before.domains, *before.parked], gpu.uuid)
        new_budget = _describe_budget(plan, [*plan.domains, *plan.parked], gpu.uuid)
        if old_budget != new_budget and (is_there or not new_budget):
            kept_by = keepers.leases([uuid])
            users = all_of([kept_by, keepers.servers(uuid, plan.domains)])
            wait = None if kept_by else lease_waits.get(uuid)
            effect = _after_leases(users.effect, wait)
            changes.append(Change("budget", gpu.address, old_budget, new_budget, effect))
        if is_there:
            facts = settings or SettingFacts(keepers)
            changes += _settings(plan, before, after, gpu, keepers=keepers, facts=facts)
            changes += _layout(plan, before, after, gpu)
        changes += _reservation(plan, before, gpu)
        changes += _over_budget(plan, before, gpu)
    return changes


def _layout(plan: Plan, before: Plan, after: Plan, gpu: Gpu) -> Iterator[Change]:
    """Yield the change of the GPU's MIG layout."""
    old = describe_layout(before, gpu)
    new = describe_layout(plan, gpu)
    if old and not new:
        old, new = _without_layout(gpu)
    if old == new:
        return
    current = describe(gpu.mig_instances) if gpu.mig_enabled else "MIG mode off"
    result = describe_result(after, gpu)
    effect = _ONCE_UNUSED if result and new != current else AT_ONCE
    yield Change("MIG layout", gpu.address, old, result or new, effect)


def _reservation(plan: Plan, before: Plan, gpu: Gpu) -> Iterator[Change]:
    """Yield the change of what the GPU is reserved for; its MIG instances are reserved with it."""
    uuid = gpu.uuid or ""
    old = before.reserved.get(uuid, "")
    new = plan.reserved.get(uuid, "")
    if old != new and not gpu.parent:
        yield Change("reservation", gpu.address, old, new, AT_ONCE)


def _over_budget(plan: Plan, before: Plan, gpu: Gpu) -> Iterator[Change]:
    """Yield the change of what is done with jobs over budget."""
    uuid = gpu.uuid or ""
    old = before.over_budget.get(uuid)
    new = plan.over_budget.get(uuid)
    if old and new and old != new:
        yield Change("setting", f"over_budget of GPU {gpu.address}", old, new, AT_ONCE)


def _settings(
    plan: Plan, before: Plan, after: Plan, gpu: Gpu, keepers: Blockers, facts: SettingFacts
) -> Iterator[Change]:
    """Yield the changes of the GPU's settings of all kinds, except those that follow from its MIG layout.

    They wait for what keeps the step, as `Reconciler.decide` says, and for the GPU's control daemon to end.
    """
    uuid = str(gpu.uuid)
    for kind in KINDS:
        old, new = kind.desired(before, gpu), kind.desired(plan, gpu)
        if old == new or new != kind.desired(after, gpu):
            continue
        target = facts.originals.get(kind.name, {}).get(uuid, "") if new is None else new
        step = kind.step(kind.polled(gpu) or old or "", target, restores=new is None)
        # Without a step, too: the GPU or its instances may be shared as before until their leases end.
        needs = kind.needs(step or Step(old or "", target, restores=new is None))
        ends_servers = needs.servers or needs.control_daemons
        users = keepers.with_instances(uuid) if ends_servers else keepers.leases([uuid])
        if step:
            users = all_of([users, facts.blockers.against(uuid, needs).users])
        yield Change(kind.label, gpu.address, old or "original", new or "original", users.effect)


def _without_layout(gpu: Gpu) -> tuple[str, str]:
    """Return what the GPU has, and what it has when no layout is configured for it anymore."""
    mode = f"MIG mode {'on' if gpu.mig_enabled else 'off'}"
    if gpu.mig_pending not in (None, gpu.mig_enabled):
        return f"MIG mode {'on' if gpu.mig_pending else 'off'} after a reset", mode
    return (describe(gpu.mig_instances), "as it is") if gpu.mig_instances else (mode, mode)


def with_layout_effects(changes: Iterable[Change], effects: Mapping[str, str]) -> list[Change]:
    """Return the changes, with these `effects` for MIG layouts, by GPU address."""
    return with_effects(changes, {("MIG layout", address): effect for address, effect in effects.items()})


def with_effects(changes: Iterable[Change], effects: Mapping[tuple[str, str], str]) -> list[Change]:
    """Return the changes, with these `effects`, by the kind and subject of the change."""
    shown = []
    for change in changes:
        effect = effects.get((change.kind, change.subject), change.effect)
        shown.append(change._replace(effect=effect))
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
    listed = []
    for change in changes:
        name = (change.subject, change.after or change.before)
        if change.kind == "control daemon" and (name in planned) != bool(change.after):
            continue
        if change.after and (change.kind, change.subject) in refused:
            continue
        listed.append(change)
    return listed


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
    started = _names(new for new in planned if _is_among(new, running))
    left = _names(old for old in running if not _is_among(old, planned))

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
    combined = _most_combined(domains, gpu_uuid)
    return describe_division(plan, gpu_uuid) + (f", up to {combined} combined" if combined > 1 else "")


def _most_combined(domains: Iterable[DomainPlan], gpu_uuid: str | None) -> int:
    """Return how many devices of the GPU a lease may combine, in the first domain that has it."""
    for domain in domains:
        for gpu in domain.gpus:
            if gpu.uuid == gpu_uuid:
                return gpu.most_combined
    return 1


def setting_changes(old: Config, new: Config) -> list[Change]:
    """Return the changes of the keys of host.conf that do not show in the plan."""
    units = {mib: unit for unit, mib in MEMORY_UNITS.items()}
    values: list[tuple[str, object, object]] = []
    for name in KEYS:
        if name not in PLANNED_KEYS:
            values.append((name, getattr(old, name), getattr(new, name)))
    values.append(("gpu_memory_unit", units[old.gpu_memory_unit_mib], units[new.gpu_memory_unit_mib]))
    changes: list[Change] = []
    for name, before, after in values:
        if before != after:
            changes.append(Change("setting", name, _as_written(before), _as_written(after), AT_ONCE))
    return changes


def _as_written(value: object) -> str:
    """Format a value as in host.conf; empty if it is not set."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _control_daemons(plan: Plan, domains: Sequence[Domain], keepers: Blockers) -> list[Change]:
    """Return which control daemons end and start; a replacement waits for the leases of both."""
    running = [domain.desired for domain in domains]
    old = [domain for domain in domains if not _is_among(domain.desired, plan.domains)]
    new = [planned for planned in plan.domains if not _is_among(planned, running)]
    changes: list[Change] = []
    for domain in old:
        next_ones = [planned for planned in new if blocks(domain.in_effect, planned)]
        effect = _effect_of_replacement([domain], next_ones, keepers)
        current = domain.in_effect
        changes.append(Change("control daemon", current.name, _describe_control_daemon(current), "", effect))
    for planned in new:
        earlier = [domain for domain in old if blocks(domain.in_effect, planned)]
        effect = _effect_of_replacement(earlier, [planned], keepers)
        changes.append(Change("control daemon", planned.name, "", _describe_control_daemon(planned), effect))
    return changes


def _effect_of_replacement(
    running: Sequence[Domain], planned: Sequence[DomainPlan], keepers: Blockers
) -> str:
    """Return when control daemons are replaced: after the leases on both, and the servers of the old ones."""
    uuids: list[str] = []
    for plan in (*(domain.in_effect for domain in running), *planned):
        uuids += plan.gpu_uuids
    users = [keepers.leases(uuids)]
    for domain in running:
        users.append(servers_of(domain))
    return all_of(users).effect


def _is_among(plan: DomainPlan, others: Iterable[DomainPlan]) -> bool:
    """Whether one of the others has the same control daemon."""
    return any(plan.same_control_daemon(other) for other in others)


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
