"""The state of the host and of its leases, and everything that is wrong, each problem with its hint.

Both depend on what the processes on the GPUs do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from yunion_mps.core import reasons
from yunion_mps.core.conditions import Condition, shown
from yunion_mps.core.enums import IDLE, PROBLEM
from yunion_mps.core.models import Owner
from yunion_mps.observe.clients import ClientService
from yunion_mps.observe.holdings import Holding, device_names, holdings, lease_states, reasons_by_gpu
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.queries import Queries
from yunion_mps.views.lease_conditions import Activity, conditions_of_use, conditions_with_activity

if TYPE_CHECKING:
    from yunion_mps import answers


class StatusService:
    def __init__(self, queries: Queries, leases: LeaseService, clients: ClientService) -> None:
        self._queries = queries
        self._leases = leases
        self._clients = clients

    async def status(self) -> answers.StatusJson:
        """Return the status, with the processes on the GPUs now, or the last known ones if a call hangs."""
        clients = await self._clients.clients(seen=True)
        return self.of(clients)

    def of(self, clients: answers.ClientListJson) -> answers.StatusJson:
        """Return the status, with these processes on the GPUs."""
        gpus = self._queries.gpus()["gpus"]
        devices = self._queries.all_devices()
        activity = self._activity(clients)
        used_addresses: set[str] = set()
        for holding in activity.held:
            used_addresses.update(holding.devices)
        service = self._queries.service(used_addresses)
        conditions = conditions_with_activity(self._queries.conditions(), activity, service, gpus, devices)
        problems = [problem_json(condition) for condition in shown(conditions)]
        outside = sum(client["mps"] is False for client in clients["clients"])
        is_troubled = any(problem["level"] == PROBLEM for problem in problems)
        state = self._queries.state
        return {
            "state": "degraded" if is_troubled and state == "ready" else state,
            "problems": problems,
            **service,
            "leases": {"total": len(activity.leases), "waiting": len(activity.waiting)},
            "clients": len(clients["clients"]) - outside,
            "outside_mps": outside,
            "errors": clients["errors"],
        }

    def _activity(self, clients: answers.ClientListJson) -> Activity:
        leases = self._leases.leases(brief=True)
        return Activity(
            held=_used(self._queries.all_devices(), leases, clients),
            clients=clients,
            leases=leases,
            waiting=self._leases.waiting(),
            terminating_gpus=self._queries.terminating_gpus(),
        )

    async def job_problems(self) -> list[Condition] | None:
        """Return the jobs that exceed their budgets or wait for an MPS server; None if not all are known."""
        clients = await self._clients.clients(seen=True)
        if clients["errors"]:
            return None
        codes = (reasons.OVER_BUDGET, reasons.CLIENT_WAITING)
        conditions = conditions_of_use(self._activity(clients))
        return [condition for condition in conditions if condition.reason.code in codes]

    async def leases(self) -> answers.LeaseListJson:
        """Return all leases with their states, and the queued requests."""
        clients = await self._clients.clients(seen=True)
        leases = self._with_states(self._leases.leases(), clients)
        waiting = self._leases.waiting()
        return {"leases": leases, "waiting": waiting, "errors": clients["errors"], "total": len(leases)}

    async def lease(self, name: str, caller: Owner) -> answers.LeaseDetailsJson:
        """Return the lease of this id or name, with its state; raises NotFoundError.

        A job may be about to start with it, so the driver is asked whether its MIG instances still exist.
        """
        record = self._leases.lease(name, caller)  # an unknown name is refused even if the driver hangs
        await self._leases.follow_destroyed(self._leases.ledger.leases.get(record["id"]))
        clients = await self._clients.clients(seen=True)
        (lease,) = self._with_states([self._leases.lease(name, caller)], clients)
        return lease

    def _with_states(
        self, leases: list[answers.LeaseRecordJson], clients: answers.ClientListJson
    ) -> list[answers.LeaseDetailsJson]:
        """Return the leases with their states and, if their devices are unavailable or pending, the reason.

        If not all clients are known, a lease that seems idle may be in use: its state is None.
        """
        devices = self._queries.all_devices()
        states = lease_states(_used(devices, leases, clients))
        seeming = {IDLE: None} if clients["errors"] else {}
        by_address = {device["addr"]: device for device in devices}
        details: list[answers.LeaseDetailsJson] = []
        for lease in leases:
            state = states[lease["id"]]
            own = [by_address[name] for name in lease["devices"] if name in by_address]
            reason = "; ".join(f"GPU {gpu}: {text}" for gpu, text in reasons_by_gpu(own))
            code = next((device["reason_code"] for device in own if device["reason"]), "")
            details.append(
                {**lease, "state": seeming.get(state, state), "reason": reason, "reason_code": code}
            )
        return details


def _used(
    devices: Iterable[answers.DeviceJson],
    leases: Iterable[answers.LeaseRecordJson],
    clients: answers.ClientListJson,
) -> list[Holding]:
    """Return the holdings that are in use; idle devices are skipped first: there may be thousands."""
    names: set[str] = set()
    for lease in leases:
        names.update(lease["devices"])
    for client in clients["clients"]:
        names.update(device_names(client))
    listed = [device for device in devices if device["addr"] in names]
    return [holding for holding in holdings(listed, leases, clients["clients"]) if holding.in_use]


def problem_json(condition: Condition) -> answers.StatusProblemJson:
    """Return a condition as the API answers it."""
    return {
        "level": condition.level,
        "code": condition.reason.code,
        "text": condition.text,
        "hint": condition.hint,
        "gpu": condition.gpu or None,
        "devices": list(condition.devices),
        "pid": condition.pid,
        "kind": condition.kind,
        "subject": condition.subject,
        "waits_for": str(condition.waits_for),
    }
