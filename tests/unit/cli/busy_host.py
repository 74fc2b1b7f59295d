"""A host whose devices are in use: leases as in /v1/leases, and clients of fake_services."""

from __future__ import annotations

from typing import Any

from unit.http.fake_services import CLIENT, LEASE, QUEUED_REQUEST, clients, lease_of
from unit.http.server_host import ServerHost

Json = Any

#: Two devices of one GPU as one larger budget, of which nothing is used yet.
TWO_DEVICES: Json = {
    **LEASE,
    "id": "71b0b1ae-2222-4f0e-8f61-7b8f6f2b9d11",
    **lease_of({"00:06.0-2": 5760, "00:06.0-3": 5760}),
    "thread_percentage": 50,
    "binding": "name",
    "pid": None,
    "user": "bob",
    "command": None,
    "name": "job-17",
    "since": "2026-08-29T11:40:00.000Z",
    "expires": "2026-08-29T12:40:00.000Z",
}
CAROLS_REQUEST: Json = {**QUEUED_REQUEST, "user": "carol"}
#: More than its device has.
OVER_BUDGET: Json = {**CLIENT, "memory_by_gpu_mib": [6000], "memory_used_mib": 6000}
OUTSIDE_MPS: Json = {
    **CLIENT,
    "pid": 4711,
    "user": "mallory",
    "command": "./old-job",
    "mps": False,
    "server": None,
    "device": None,
    "memory_by_gpu_mib": [300],
    "memory_used_mib": 300,
}


def hold_leases(host: ServerHost, *leases: Json, waiting: tuple[Json, ...] = ()) -> None:
    host.leases.listed = {"leases": list(leases), "waiting": list(waiting)}


def make_busy(host: ServerHost, since: str = LEASE["since"]) -> None:
    """Since then: a process over budget, one outside MPS, an idle lease, and a queued request."""
    over, idle, waiting = ({**one, "since": since} for one in (LEASE, TWO_DEVICES, CAROLS_REQUEST))
    hold_leases(host, over, idle, waiting=(waiting,))
    host.clients.listed = clients(OVER_BUDGET, {**OUTSIDE_MPS, "started": since})
