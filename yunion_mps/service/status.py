"""The state of the host and of its leases, which depends on what the processes on the GPUs do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from yunion_mps.enums import FREE, IDLE, PROBLEM
from yunion_mps.models import Owner
from yunion_mps.service.clients import ClientService
from yunion_mps.service.holdings import Holding, holdings, lease_states, reasons_by_gpu
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.problems import by_severity, of_devices, of_leases, of_service, of_uses
from yunion_mps.service.queries import Filters, Queries

if TYPE_CHECKING:
    from yunion_mps import answers


class StatusService:
    def __init__(self, queries: Queries, leases: LeaseService, clients: ClientService) -> None:
        self._queries = queries
        self._leases = leases
        self._clients = clients

    async def status(self) -> answers.Status:
        """The status, with the processes that use the GPUs now; with the last known ones if a call hangs."""
        clients = await self._clients.clients(seen=True)
        return self.of(clients)

    def of(self, clients: answers.ClientList) -> answers.Status:
        """The status with these processes."""
        service, gpus, devices = self._queries.service(), self._queries.gpus()["gpus"], self._devices()
        leases, waiting = self._leases.leases(brief=True), self._leases.waiting()
        held = _used(devices, leases, clients)
        problems = by_severity(
            [
                *of_service(service, gpus, self._queries.warnings()),
                *of_devices(devices),
                *of_uses(held, clients),
                *of_leases(leases, service["domains"], gpus),
            ]
        )
        used = {address for holding in held for address in holding.devices}
        outside = sum(client["mps"] is False for client in clients["clients"])
        is_troubled = any(problem["level"] == PROBLEM for problem in problems)
        state = self._queries.state
        return {
            "state": "degraded" if is_troubled and state == "ready" else state,
            "problems": problems,
            **service,
            "devices": {
                **service["devices"],
                "used": len(used),
                "free": sum(device["state"] == FREE and device["addr"] not in used for device in devices),
            },
            "leases": {"total": len(leases), "waiting": len(waiting)},
            "clients": len(clients["clients"]) - outside,
            "outside_mps": outside,
            "errors": clients["errors"],
        }

    async def leases(self) -> answers.LeaseList:
        """All leases with their states, and the queued requests."""
        clients = await self._clients.clients(seen=True)
        leases = self._with_states(self._leases.leases(), clients)
        waiting = self._leases.waiting()
        return {"leases": leases, "waiting": waiting, "errors": clients["errors"], "total": len(leases)}

    async def lease(self, name: str, caller: Owner) -> answers.LeaseDetails:
        """The lease of this id or name, with its state; raises NotFoundError."""
        self._leases.lease(name, caller)  # an unknown name is refused at once, even if the driver hangs
        clients = await self._clients.clients(seen=True)
        (lease,) = self._with_states([self._leases.lease(name, caller)], clients)
        return lease

    def _with_states(
        self, leases: list[answers.LeaseRecord], clients: answers.ClientList
    ) -> list[answers.LeaseDetails]:
        """The leases with their states and, if their devices are unavailable or pending, the reason.

        If not all clients are known, a lease that seems idle may be in use: its state is None.
        """
        devices = self._devices()
        states = lease_states(_used(devices, leases, clients))
        seeming = {IDLE: None} if clients["errors"] else {}
        known = {device["addr"]: device for device in devices}
        found: list[answers.LeaseDetails] = []
        for lease in leases:
            state = states[lease["id"]]
            own = reasons_by_gpu(known[name] for name in lease["devices"] if name in known)
            reason = "; ".join(f"GPU {gpu}: {text}" for gpu, text in own)
            found.append({**lease, "state": seeming.get(state, state), "reason": reason})
        return found

    def _devices(self) -> list[answers.Device]:
        return self._queries.devices(Filters(), 0, 0)["isolated_devices"]


def _used(
    devices: Iterable[answers.Device],
    leases: Iterable[answers.LeaseRecord],
    clients: answers.ClientList,
) -> list[Holding]:
    """The holdings that are in use; idle devices are skipped first, because there may be thousands."""
    names = {name for lease in leases for name in lease["devices"]}
    for client in clients["clients"]:
        names.update(name.strip() for name in (client["device"] or "").split(","))
    found = holdings([one for one in devices if one["addr"] in names], leases, clients["clients"])
    return [holding for holding in found if holding.in_use]
