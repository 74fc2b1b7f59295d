"""A host whose devices are in use: leases by hand, in the shape of /v1/leases, beside by_hand's clients."""

from __future__ import annotations

from typing import Any

from unit.http.by_hand import CLIENT, LEASE, WAITER, clients, lease_of
from unit.http.server_host import ServerHost

Json = Any

#: Two devices of one GPU as one larger budget, of which nothing is used yet.
TWO: Json = {
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
CAROL: Json = {**WAITER, "user": "carol"}
#: More than its device has.
OVER: Json = {**CLIENT, "memory_by_gpu_mib": [6000], "memory_used_mib": 6000}
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


def hold(host: ServerHost, *leases: Json, waiting: tuple[Json, ...] = ()) -> None:
    host.leases.found = {"leases": list(leases), "waiting": list(waiting)}


def busy(host: ServerHost, since: str = LEASE["since"]) -> None:
    """Since then: a process over budget, one outside MPS, an idle lease, and a queued request."""
    over, idle, waiting = ({**one, "since": since} for one in (LEASE, TWO, CAROL))
    hold(host, over, idle, waiting=(waiting,))
    host.clients.found = clients(OVER, {**OUTSIDE_MPS, "started": since})
