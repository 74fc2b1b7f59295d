"""A host whose devices are in use: leases by hand, in the shape of /v1/leases, beside by_hand's clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yunion_mps.api.deferred import Later
from yunion_mps.api.query import Request

from unit.api.by_hand import CLIENT, clients
from unit.api.server_host import ServerHost

Json = dict[str, Any]

LEASE: Json = {
    "id": "3f2a8a1e-0d3c-4f0e-8f61-7b8f6f2b9d11",
    "devices": ["00:06.0-1"],
    "gpus": ["00:06.0"],
    "memory": [5760],
    "thread_percentage": 25,
    "binding": "process",
    "pid": 4260,
    "uid": 1000,
    "user": "alice",
    "command": "python train.py",
    "name": None,
    "since": 1788000060.5,
    "expires": None,
    "environment": {},
}
#: Two devices of one GPU as one larger budget, of which nothing is used yet.
TWO: Json = {
    **LEASE,
    "id": "71b0b1ae-2222-4f0e-8f61-7b8f6f2b9d11",
    "devices": ["00:06.0-2", "00:06.0-3"],
    "memory": [5760, 5760],
    "thread_percentage": 50,
    "binding": "name",
    "pid": None,
    "user": "bob",
    "command": None,
    "name": "job-17",
    "since": 1788003600.0,
    "expires": 1788007200.0,
}
WAITER: Json = {
    "uid": 1001,
    "user": "carol",
    "pid": 4300,
    "since": 1788003000.0,
    "wants": "2 devices on one GPU",
}
#: More than its device has.
OVER: Json = {**CLIENT, "memory_by_gpu": [6000], "memory_used": 6000}
PAST_MPS: Json = {
    **CLIENT,
    "pid": 4711,
    "user": "mallory",
    "command": "./old-job",
    "mps": False,
    "server": None,
    "device": None,
    "memory_by_gpu": [300],
    "memory_used": 300,
}


def hold(host: ServerHost, *leases: Json, waiting: tuple[Json, ...] = ()) -> None:
    """From now on the host has these leases."""
    answer = {"leases": list(leases), "waiting": list(waiting), "total": len(leases)}

    async def give(request: Request, query: Mapping[str, str]) -> Json:
        return answer

    host.deferred._paths["/v1/leases"] = Later(("GET", "HEAD"), give)


def busy(host: ServerHost) -> None:
    """Somebody over budget, somebody past MPS, somebody who has not begun, and somebody who waits."""
    hold(host, LEASE, TWO, waiting=(WAITER,))
    host.people.found = clients(OVER, PAST_MPS)
