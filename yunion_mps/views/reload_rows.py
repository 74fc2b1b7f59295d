"""What is not in effect after a reload, and what it waits for: the conditions as rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import (
    ABOUT_DOMAIN,
    ABOUT_MIG_LAYOUT,
    ABOUT_WAY_OF_SHARING,
    APPLYING,
    PENDING,
    STARTING,
)
from yunion_mps.core.models import Plan, Snapshot
from yunion_mps.core.reasons import GPU_NEEDS, MODE_NEEDS, SETTING_REFUSED
from yunion_mps.core.waits import LeaseWait
from yunion_mps.supervisor.host_conditions import conditions_of_entries, conditions_of_gpus
from yunion_mps.supervisor.serving import domain_names
from yunion_mps.views.lease_conditions import condition_of_wait, is_pending_setting, unless_awaited

if TYPE_CHECKING:
    from yunion_mps import answers


def pending_rows(
    snapshot: Snapshot,
    plan: Plan,
    lease_waits: Mapping[str, LeaseWait],
    shared_as_before: Collection[str],
    leases_on: Callable[[str], Sequence[str]],
) -> list[answers.PendingJson]:
    """Return what is pending, and the GPUs and entries of the `plan` that an operator has to repair.

    plan: the plan after the reload, which the snapshot may not have yet
    lease_waits: the devices that wait for leases of a previous division, by GPU UUID
    shared_as_before: the GPUs (UUIDs) that are shared as before until their leases have ended
    leases_on: returns the ids of the leases of a GPU (UUID)
    """
    uuids = {gpu.address: str(gpu.uuid) for gpu in snapshot.inventory.gpus}
    names = domain_names(snapshot.plan)
    rows = list(_domains(snapshot))
    rows += _divisions(snapshot, lease_waits)
    layouts = []
    for condition in snapshot.conditions:
        uuid = uuids.get(condition.subject, "")
        if condition.kind == ABOUT_WAY_OF_SHARING:
            leases = leases_on(uuid) if uuid in shared_as_before else []
            rows.append(_row(condition.text, names.get(uuid, ""), leases))
        elif condition.kind == ABOUT_MIG_LAYOUT:
            layouts.append(_row(condition.text))
    rows += layouts
    rows += _settings(snapshot, lease_waits)
    rows += _to_repair(snapshot, plan)
    return rows


def _domains(snapshot: Snapshot) -> Iterator[answers.PendingJson]:
    """Yield the domains whose plan is not in effect, and those that are about to serve."""
    changes = {}
    for condition in snapshot.conditions:
        if condition.kind == ABOUT_DOMAIN and condition.status == PENDING:
            changes[condition.subject] = condition.reason
    for domain in snapshot.domains:
        name = domain.plan.name
        if name in changes:
            yield _row(changes[name], name)
        elif domain.state in (STARTING, APPLYING):
            yield _row(f"it is {domain.state}: {domain.reason}", name)


def _divisions(snapshot: Snapshot, lease_waits: Mapping[str, LeaseWait]) -> Iterator[answers.PendingJson]:
    """Yield the GPUs with devices that wait for leases of a previous division."""
    names = domain_names(snapshot.plan)
    for uuid, condition in _divisions_by_gpu(snapshot, lease_waits).items():
        yield _row(condition.text, names[uuid], lease_waits[uuid].leases)


def _divisions_by_gpu(snapshot: Snapshot, lease_waits: Mapping[str, LeaseWait]) -> dict[str, Condition]:
    """Return the conditions of these devices, by GPU UUID."""
    addresses = {gpu.uuid: gpu.address for gpu in snapshot.inventory.gpus}
    divisions = {}
    for uuid, wait in lease_waits.items():
        divisions[uuid] = condition_of_wait(addresses.get(uuid, uuid), wait.reason, len(wait.pending))
    return divisions


def _settings(snapshot: Snapshot, lease_waits: Mapping[str, LeaseWait]) -> Iterator[answers.PendingJson]:
    """Yield the settings of GPUs that wait, if no other row names their wait, or are refused."""
    divisions = _divisions_by_gpu(snapshot, lease_waits).values()
    for condition in snapshot.conditions:
        if is_pending_setting(condition) and not unless_awaited(condition, divisions).follows_from:
            yield _row(condition.text)
        elif condition.reason.code in SETTING_REFUSED and not condition.follows_from:
            yield _row(f"{condition.text}; {condition.hint}")


def _to_repair(snapshot: Snapshot, plan: Plan) -> Iterator[answers.PendingJson]:
    """Yield the GPUs and entries that serve nothing until the operator has repaired something."""
    for condition in conditions_of_gpus(plan, snapshot.inventory.gpus):
        if condition.reason.code in MODE_NEEDS | GPU_NEEDS:
            yield _row(f"GPU {condition.gpu}: {condition.reason}; {condition.hint}")
    for condition in conditions_of_entries(plan.missing):
        yield _row(f"path {condition.subject}: {condition.reason}; {condition.hint}")


def _row(pending: str, domain: str = "", leases: Sequence[str] = ()) -> answers.PendingJson:
    return {"domain": domain, "pending": pending, "leases": [*leases]}
