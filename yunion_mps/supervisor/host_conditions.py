"""The conditions of the host: everything that is wrong or pending, from the state in effect. Pure.

What depends on leases and on what processes do is added in `views/lease_conditions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.addresses import short_address
from yunion_mps.core.conditions import Condition, with_known_causes
from yunion_mps.core.enums import (
    ABOUT_BUDGET,
    ABOUT_COMPUTE_MODE,
    ABOUT_CONFIGURATION,
    ABOUT_DEVICES,
    ABOUT_DOMAIN,
    ABOUT_ENTRY,
    ABOUT_GPU,
    ABOUT_MIG_LAYOUT,
    ABOUT_SERVERS_OF_USER,
    ABOUT_SERVICE,
    ABOUT_WAY_OF_SHARING,
    BROKEN,
    IMPAIRED,
    NOTICE,
    PENDING,
    READY,
    REFUSED,
)
from yunion_mps.core.models import (
    EXCLUSIVE_PROCESS,
    PROHIBITED,
    DomainStatus,
    Gpu,
    Inventory,
    MissingGpu,
    Plan,
)
from yunion_mps.core.reasons import LAYOUT_NEEDS, LAYOUT_WAITS, NO_REASON, Reason, hint_of
from yunion_mps.core.waits import Servers, Users, users_awaited
from yunion_mps.planning.division import enforces_budgets
from yunion_mps.supervisor.serving import domain_names, find_unusable, ways_in_effect

#: Codes of GPUs whose conditions are about their MIG layouts.
_OF_LAYOUTS = LAYOUT_WAITS | LAYOUT_NEEDS


class PendingSetting(NamedTuple):
    """A setting of a GPU that changes once what uses the GPU has ended."""

    #: What its condition is about, one of `CONDITION_KINDS`.
    about: str
    gpu_uuid: str
    reason: Reason


class ConditionFacts(NamedTuple):
    """The state in effect, from which the conditions follow."""

    plan: Plan
    inventory: Inventory
    domains: Sequence[DomainStatus] = ()
    #: Why the MIG layouts of working GPUs are not in effect, by GPU UUID.
    layouts: Mapping[str, Reason] = {}
    #: Why MPS is disabled, and why the driver has not worked since the start; empty if that is not so.
    disabled: Reason = NO_REASON
    driver: Reason = NO_REASON
    #: What the operator has to do about a control daemon of an earlier run.
    leftovers: str = ""
    #: The settings of GPUs that wait.
    settings: Sequence[PendingSetting] = ()
    #: What other parts of the daemon have found.
    reported: Sequence[Condition] = ()


def conditions_of(facts: ConditionFacts) -> tuple[Condition, ...]:
    """Return all conditions, those that follow from others included."""
    gpu_conditions = list(conditions_of_gpus(facts.plan, facts.inventory.gpus, facts.layouts))
    conditions = (
        *_notice(facts),
        *_domains_not_ready(facts.domains),
        *gpu_conditions,
        *_unusable_devices(facts, gpu_conditions),
        *conditions_of_entries(facts.plan.missing),
        *facts.reported,
        *_budgets_and_modes(facts),
        *_failing_users(facts.domains),
        *_pending_domains(facts.domains),
        *_pending_sharing(facts),
        *_pending_settings(facts),
    )
    return with_known_causes(conditions)


def warnings_of_configuration(warnings: Iterable[Reason]) -> list[Condition]:
    """Return the conditions of settings and entries that work otherwise than written."""
    return [Condition(ABOUT_CONFIGURATION, "", IMPAIRED, warning) for warning in warnings]


def gpu_name(gpu: Gpu) -> str:
    """Return for example `GPU 00:06.0 (Tesla P40)`."""
    return f"GPU {gpu.address} ({gpu.name})" if gpu.name else f"GPU {gpu.address}"


# -- the service


def _notice(facts: ConditionFacts) -> Iterator[Condition]:
    """Yield why the host offers no devices, if so, and what is left of an earlier run."""
    why = _why_no_devices(facts)
    text = "; ".join(part for part in (why, facts.leftovers) if part)
    if text:
        code = why.code or reasons.CONTROL_DAEMON_LEFT
        yield Condition(ABOUT_SERVICE, "", NOTICE, Reason(text, code))


def _why_no_devices(facts: ConditionFacts) -> Reason:
    if facts.disabled:
        return facts.disabled
    if facts.driver:
        return Reason(f"waiting for the NVIDIA driver: {facts.driver}", facts.driver.code)
    plan = facts.plan
    if plan.domains or plan.direct or facts.domains:  # a control daemon may serve GPUs that have to go
        return NO_REASON
    waiting = [gpu for gpu in facts.inventory.gpus if gpu.uuid in facts.layouts]
    layouts = [(gpu, facts.layouts[str(gpu.uuid)]) for gpu in waiting]
    named = {gpu.pci_address for gpu, _ in layouts}
    others = []
    for address, reason in plan.unavailable.items():
        if address not in named:
            others.append(f"{short_address(address)}: {reason}")
    others += [f"{entry.path}: {entry.reason}" for entry in plan.missing]
    if not layouts:
        why = "; ".join(others) or "no GPU was found"
        return Reason(f"no GPU on this host can serve devices ({why})", reasons.NO_USABLE_GPU)
    lines = [f"GPU {gpu.address}: {reason}" for gpu, reason in layouts]
    lines += [f"GPU {other}" for other in others]
    return Reason("; ".join(lines), layouts[0][1].code)


# -- GPUs and entries


def conditions_of_gpus(
    plan: Plan, gpus: Iterable[Gpu], layouts: Mapping[str, Reason] = {}
) -> Iterator[Condition]:
    """Yield why GPUs that the plan divides cannot serve as configured.

    `layouts` says why MIG layouts are not in effect, by GPU UUID.
    """
    ways = ways_in_effect(plan)
    for gpu in gpus:
        is_foreign_instance = gpu.is_instance and gpu.uuid is None
        if is_foreign_instance or not (plan.divides(gpu) or gpu.uuid in ways):
            continue  # it is not ours, so it is no problem
        layout = layouts.get(gpu.uuid or "")
        reason = gpu.reason or layout or plan.unavailable.get(gpu.pci_address, NO_REASON)
        if not reason:
            continue
        condition = Condition(
            kind=ABOUT_GPU,
            subject=gpu.address,
            status=BROKEN,
            reason=reason,
            advice=gpu_hint(gpu, reason),
            waits_for=users_awaited(reason),
            name=gpu_name(gpu),
            gpu=gpu.address,
        )
        if not gpu.reason and (layout or reason.code in _OF_LAYOUTS):
            condition = _of_layout(condition)
        yield condition


def _of_layout(condition: Condition) -> Condition:
    """Return the condition of a GPU as that of its MIG layout: it serves what it has meanwhile."""
    is_waiting = condition.reason.code in LAYOUT_WAITS
    return condition._replace(
        kind=ABOUT_MIG_LAYOUT,
        status=PENDING if is_waiting else REFUSED,
        name=f"GPU {condition.gpu}",
    )


def gpu_hint(gpu: Gpu, reason: Reason) -> str:
    """Return what the operator should do about a GPU; for a MIG instance, the hint names its GPU."""
    return hint_of(reason.code, gpu=gpu.parent or gpu.uuid or gpu.pci_address)


def _unusable_devices(facts: ConditionFacts, gpu_conditions: Iterable[Condition]) -> Iterator[Condition]:
    """Yield why no device of a GPU can be used now: because of the GPU, its compute mode or its domain."""
    explained = {condition.subject: condition.identifier for condition in gpu_conditions}
    names = domain_names(facts.plan)
    gpus = {gpu.uuid: gpu for gpu in facts.inventory.gpus}
    unusable = find_unusable(facts.plan, facts.inventory.gpus, facts.domains)
    for uuid, reason in unusable.items():
        gpu = gpus.get(uuid)
        subject = gpu.address if gpu else uuid
        cause = ""
        if subject in explained:
            cause = explained[subject]
        elif reason.code in reasons.OF_DOMAINS:
            cause = f"{ABOUT_DOMAIN} {names[uuid]}"
        yield Condition(
            kind=ABOUT_DEVICES,
            subject=subject,
            status=BROKEN,
            reason=reason,
            advice=gpu_hint(gpu, reason) if gpu else hint_of(reason.code, gpu=uuid),
            waits_for=users_awaited(reason),
            name=gpu_name(gpu) if gpu else f"GPU {uuid}",
            gpu=gpu.address if gpu else "",
            follows_from=cause,
        )


def conditions_of_entries(missing: Iterable[MissingGpu]) -> Iterator[Condition]:
    """Yield the entries whose GPUs this host does not have now."""
    for entry in missing:
        name = f"path {entry.path} ({entry.place})"
        yield Condition(ABOUT_ENTRY, entry.path, BROKEN, entry.reason, name=name)


def _budgets_and_modes(facts: ConditionFacts) -> Iterator[Condition]:
    """Yield what an operator must know of GPUs although their devices can be used."""
    served: set[str] = set()
    for domain in facts.domains:
        served.update(domain.plan.gpu_uuids)
    leaving = {gpu.uuid for gpu in facts.plan.direct}  # MPS still has the mode that it needs
    waiting = {setting.gpu_uuid for setting in facts.settings if setting.about == ABOUT_COMPUTE_MODE}
    for gpu in facts.inventory.gpus:
        if gpu.uuid not in served or gpu.reason:
            continue
        if not enforces_budgets(gpu):
            yield _impaired(ABOUT_BUDGET, gpu, _unenforced_budgets(gpu))
        if gpu.uuid in leaving:
            continue
        if _lacks_mode(gpu, facts.plan):
            yield _impaired(ABOUT_COMPUTE_MODE, gpu, _unsupported_mode(gpu), REFUSED)
        planned = facts.plan.compute_modes.get(gpu.uuid or "")
        if planned and gpu.compute_mode != planned:
            text = f"its compute mode is {gpu.compute_mode}, not {planned}; {_UNLIMITED}"
            status = IMPAIRED
            if gpu.compute_mode == PROHIBITED:
                text, status = _PROHIBITED, BROKEN
            elif gpu.uuid in waiting:
                continue  # no other program has changed it
            yield _impaired(ABOUT_COMPUTE_MODE, gpu, Reason(text, reasons.COMPUTE_MODE_CHANGED), status)


_PROHIBITED = "its compute mode is Prohibited: no CUDA program can use it"
_UNLIMITED = "a process that bypasses the control daemon could use it without limits"


def _impaired(kind: str, gpu: Gpu, reason: Reason, status: str = IMPAIRED) -> Condition:
    name = f"GPU {gpu.address} ({gpu.name})"
    return Condition(kind, gpu.address, status, reason, name=name, gpu=gpu.address)


def _unenforced_budgets(gpu: Gpu) -> Reason:
    text = "budgets are not enforced because it is older than Volta; "
    text += "its clients can use all of its memory and threads"
    if gpu.compute_capability is None:
        text = "its budgets may not be enforced, because the driver does not report its compute capability; "
        text += "if it is older than Volta, its clients can use all of its memory and threads"
    return Reason(text, reasons.BUDGET_NOT_ENFORCED)


def _lacks_mode(gpu: Gpu, plan: Plan) -> bool:
    """Whether the GPU has another mode than MPS should have, because the driver does not support a change."""
    is_kept = gpu.physical_address in plan.kept_modes
    return gpu.mode_is_fixed and not (is_kept or gpu.parent) and gpu.compute_mode != EXCLUSIVE_PROCESS


def _unsupported_mode(gpu: Gpu) -> Reason:
    text = f"its compute mode stays {gpu.compute_mode}, because the driver does not support changing it"
    if gpu.compute_mode is None:
        text = "its compute mode is not changed, because the driver does not report it"
    return Reason(f"{text}; {_UNLIMITED}", reasons.COMPUTE_MODE_UNSUPPORTED)


def _pending_sharing(facts: ConditionFacts) -> Iterator[Condition]:
    """Yield the GPUs whose devices get no new leases until the way of sharing them can change.

    A GPU that waits for its MIG layout is left out, and what waits for the servers of a domain only follows
    from the domain's pending change.
    """
    for gpu in facts.inventory.gpus:
        reason = facts.plan.pending.get(gpu.uuid or "")
        if reason is None or gpu.uuid in facts.layouts:
            continue
        yield Condition(
            kind=ABOUT_WAY_OF_SHARING,
            subject=gpu.address,
            status=PENDING,
            reason=reason,
            waits_for=users_awaited(reason),
            name=f"GPU {gpu.address}",
            gpu=gpu.address,
            follows_from="" if reason.code == reasons.LEASES_PENDING else _pending_domain(facts, gpu),
        )


def _pending_settings(facts: ConditionFacts) -> Iterator[Condition]:
    """Yield the settings of GPUs that wait; a wait that another condition names follows from that."""
    gpus = {gpu.uuid: gpu for gpu in facts.inventory.gpus}
    for setting in facts.settings:
        gpu = gpus.get(setting.gpu_uuid)
        if gpu is None:
            continue
        yield Condition(
            kind=setting.about,
            subject=gpu.address,
            status=PENDING,
            reason=setting.reason,
            waits_for=users_awaited(setting.reason),
            name=f"GPU {gpu.address}",
            gpu=gpu.address,
            follows_from=_cause_of_wait(facts, gpu, setting.reason),
        )


def _cause_of_wait(facts: ConditionFacts, gpu: Gpu, reason: Reason) -> str:
    """Return the identifier of the condition that says already what the GPU's setting waits for.

    A layout that is in use names its users. The way of sharing names leases and servers, a domain only its
    servers, and neither names other processes.
    """
    awaited = users_awaited(reason)
    layout = facts.layouts.get(gpu.uuid or "", NO_REASON)
    if layout.code == reasons.MIG_IN_USE:
        return f"{ABOUT_MIG_LAYOUT} {gpu.address}"
    if gpu.uuid in facts.plan.pending and not layout and not awaited.processes:
        return f"{ABOUT_WAY_OF_SHARING} {gpu.address}"
    if awaited.leases or awaited.more_leases or awaited.processes:
        return ""
    domain = _pending_domain(facts, gpu)
    if domain:
        return domain
    return ABOUT_SERVICE if facts.leftovers and not awaited else ""


def _pending_domain(facts: ConditionFacts, gpu: Gpu) -> str:
    """Return the identifier of the pending change of a domain that serves the GPU or an instance of it."""
    parts = {part.uuid for part in facts.inventory.gpus if gpu.uuid in (part.uuid, part.parent)}
    for domain in facts.domains:
        if domain.pending and not parts.isdisjoint(domain.plan.gpu_uuids):
            return f"{ABOUT_DOMAIN} {domain.plan.name}"
    return ""


# -- domains


def _domains_not_ready(domains: Iterable[DomainStatus]) -> Iterator[Condition]:
    for domain in domains:
        if domain.state == READY or domain.reason.code == reasons.LIMITS_PENDING:
            continue  # one that waits for the end of another is pending
        name = domain.plan.name
        hint = hint_of(domain.reason.code, log_directory=domain.plan.log_directory)
        title = f"domain {name} is {domain.state}"
        yield Condition(ABOUT_DOMAIN, name, BROKEN, domain.reason, hint, name=title)


def _failing_users(domains: Iterable[DomainStatus]) -> Iterator[Condition]:
    """Yield the users whose MPS servers do not start: their problem alone, as long as others' do."""
    for domain in domains:
        name = domain.plan.name
        for reason in domain.failing_users.values():
            why = Reason(f"{reason}; its devices are unavailable for this user", reason.code)
            hint = hint_of(reason.code, log_directory=domain.plan.log_directory)
            yield Condition(ABOUT_SERVERS_OF_USER, name, IMPAIRED, why, hint, name=f"domain {name}")


def _pending_domains(domains: Iterable[DomainStatus]) -> Iterator[Condition]:
    """Yield the domains whose limits change, or which end or start, once MPS servers have ended."""
    for domain in domains:
        if not domain.pending:
            continue
        reason = Reason(domain.pending, reasons.LIMITS_PENDING)
        awaited = Users(servers=(Servers(domain.waits_for),)) if domain.waits_for else Users()
        name = domain.plan.name
        yield Condition(ABOUT_DOMAIN, name, PENDING, reason, waits_for=awaited, name=name)
