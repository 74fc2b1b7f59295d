"""What another configuration would change, in words: shown before it is done, and recorded when it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.models import Config, Device, DomainPlan, Event, Gpu, Inventory, Plan
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.servers import named
from yunion_mps.planning import division

AT_ONCE = "at once"


class LeaseWait(NamedTuple):
    """How many devices of a GPU wait for leases of a former division, those leases' ids, and their names."""

    devices: int
    leases: tuple[str, ...]
    description: str


#: Returns, by GPU UUID, which of these devices of a plan wait for leases.
FindLeaseWaits = Callable[[Sequence[Device]], Mapping[str, LeaseWait]]


class Change(NamedTuple):
    """One thing that becomes another; `effect` says when it comes into force, and for whom."""

    kind: str
    subject: str
    before: str
    after: str
    effect: str


#: The keys of host.conf that change how we work, and nothing about the GPUs.
_SETTINGS = (
    "cuda_mps_stop_timeout_s",
    "cuda_mps_max_clients",
    "max_leases_per_user",
    "max_lease_ttl_s",
    "metrics_listen",
    "metrics_allow_public",
    "metrics_textfile",
    "web_listen",
    "web_allow_public",
)


def settings_changed(old: Config, new: Config) -> list[Change]:
    """The keys of host.conf that change how we work, and nothing on the host by themselves."""
    values = [(name, getattr(old, name), getattr(new, name)) for name in _SETTINGS]
    return [
        Change("setting", name, str(before), str(after), AT_ONCE)
        for name, before, after in values
        if before != after
    ]


def events_of(changes: Iterable[Change]) -> Iterable[Event]:
    """The changes as events: what a reload has begun."""
    for change in changes:
        subject = f"{change.kind} {change.subject}"
        what = f"{change.before or 'nothing'} -> {change.after or 'nothing'}"
        means = f"it counts {change.effect}"
        yield Event("info", "configuration", subject, what, "the configuration was read again", means)


def changes_to(
    plan: Plan,
    before: Plan,
    inventory: Inventory,
    domains: Sequence[Domain],
    settings: Iterable[Change],
    find_lease_waits: FindLeaseWaits,
) -> list[Change]:
    """What it takes from what is in force (`before`, and the running `domains`) to `plan`.

    `find_lease_waits` returns which devices of the plan wait for leases.
    """
    lease_waits = find_lease_waits(plan.devices)
    found = [*settings]
    found += _control_daemons(plan, domains)
    for gpu in inventory.gpus:
        found += _budgets(gpu, plan, before, domains, lease_waits)
        found += _mode(gpu, plan, before, domains)
    return found


def _control_daemons(plan: Plan, domains: Sequence[Domain]) -> list[Change]:
    found = []
    kept = []
    for domain in domains:
        if any(wanted.same_control_daemon(domain.wanted) for wanted in plan.domains):
            kept.append(domain.wanted)
        else:
            found.append(Change("control daemon", domain.plan.name, _shown(domain.plan), "", _when(domain)))
    for wanted in plan.domains:
        if not any(wanted.same_control_daemon(other) for other in kept):
            waits = [change.effect for change in found if change.effect != AT_ONCE]
            effect = f"once the one before has ended: {waits[0]}" if waits else AT_ONCE
            found.append(Change("control daemon", wanted.name, "", _shown(wanted), effect))
    return found


def _shown(plan: DomainPlan) -> str:
    count = len(plan.gpu_uuids)
    users = ", one server for all users" if plan.multiuser else ""
    group = f", only for the group {plan.pipe_group}" if plan.pipe_group else ""
    return f"{count} GPU{'s' if count > 1 else ''} in {plan.pipe_directory}{users}{group}"


def _when(domain: Domain) -> str:
    servers = domain.server_pids()
    return f"when {named(servers)} has ended" if servers else AT_ONCE


def _budgets(
    gpu: Gpu, plan: Plan, before: Plan, domains: Sequence[Domain], lease_waits: Mapping[str, LeaseWait]
) -> list[Change]:
    old, new = division(before, gpu.uuid), division(plan, gpu.uuid)
    if old == new:
        return []
    domain = next((d for d in domains if gpu.uuid in d.plan.gpu_uuids), None)
    effect = _when(domain) if domain else AT_ONCE
    if gpu.uuid and gpu.uuid in lease_waits:
        total = sum(device.gpu_uuid == gpu.uuid for device in plan.devices)
        effect = _after_leases(effect, total, lease_waits[gpu.uuid])
    return [Change("budget", gpu.address, old, new, effect)]


def _after_leases(effect: str, total: int, wait: LeaseWait) -> str:
    end = f"after the end of {wait.description}"
    if effect != AT_ONCE:
        return f"{effect}; {wait.devices} of {total} devices {end}"
    if wait.devices == total:
        return end
    return f"{AT_ONCE} for {total - wait.devices} of {total} devices, for the others {end}"


def _mode(gpu: Gpu, plan: Plan, before: Plan, domains: Sequence[Domain]) -> list[Change]:
    old, new = (some.compute_modes.get(gpu.uuid or "") for some in (before, plan))
    if old == new:
        return []
    domain = next((d for d in domains if gpu.uuid in d.plan.gpu_uuids), None)
    effect = AT_ONCE if new or domain is None else _when(domain)
    return [Change("compute mode", gpu.address, old or "as it was", new or "as it was", effect)]
