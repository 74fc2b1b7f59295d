"""State files of other versions: the previous one, which knew less, and an invented next one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from yunion_mps.core.paths import Paths

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leased_addresses, take

pytestmark = pytest.mark.gpus({"kind": "v100"})

Row = dict[str, Any]
Rewrite = Callable[[Row], None]

#: What leases had before they could be repeated, expire, be used by containers or be shared without MPS.
_LATER = {
    "lease": ("idempotency_key", "cdi", "ends_s", "is_extended", "request"),
    "holder": ("unit", "command", "job_uid"),
    "device": ("priority", "reserve_mib", "sharing"),
}


def _previous(row: Row) -> None:
    for members, names in ((row, "lease"), (row["holder"], "holder"), (row["devices"][0], "device")):
        for name in _LATER[names]:
            members.pop(name, None)


def _more(row: Row) -> None:
    """The next version says more."""
    for members in (row, row["holder"], row["devices"][0]):
        members["of_the_next_version"] = [{"a": 1}]


def _new_binding(row: Row) -> None:
    row["holder"]["binding"] = "pod"


def _other_budget(row: Row) -> None:
    row["devices"][0]["memory_limit_mib"] = {"of": "4 GiB"}


def _other_devices(row: Row) -> None:
    row["shares"] = row.pop("devices")


@pytest.fixture
def restart_after(ready_daemon: Daemon) -> Callable[[Rewrite], Row]:
    """Take a lease of the first device, end the daemon, rewrite the row, and start the daemon again."""

    def rewrite(change: Rewrite) -> Row:
        lease = take(ready_daemon, f"holder.name=a&holder.ttl_s=600&devices={ADDRESSES[0]}")
        ready_daemon.kill()
        with closing(sqlite3.connect(Paths(str(ready_daemon.host.root)).store)) as file, file:
            ((text,),) = file.execute("SELECT value FROM lease").fetchall()
            row = json.loads(text)
            change(row)
            file.execute("UPDATE lease SET value = ?", [json.dumps(row)])
            file.execute("ALTER TABLE lease ADD COLUMN of_the_next_version TEXT")
            file.execute("ALTER TABLE event ADD COLUMN of_the_next_version TEXT")
        ready_daemon.start().wait_ready()
        return lease

    return rewrite


def _problems(daemon: Daemon) -> list[str]:
    return [one["text"] for one in daemon.status()["problems"] if one["code"] == "lease_unreadable"]


@pytest.mark.parametrize("change", [_previous, _more])
def test_a_lease_of_another_version_continues(
    ready_daemon: Daemon, restart_after: Callable[[Rewrite], Row], change: Rewrite
) -> None:
    lease = restart_after(change)
    (found,) = ready_daemon.get("/v1/leases")[1]["leases"]
    assert (found["id"], found["name"], found["devices"]) == (lease["id"], "a", [ADDRESSES[0]])
    assert _problems(ready_daemon) == []
    assert ready_daemon.ask("POST", "/v1/leases/a/renew")[0] == 200
    take(ready_daemon, "holder.name=b&holder.ttl_s=600")
    assert leased_addresses(ready_daemon) == [*ADDRESSES[:2]]


@pytest.mark.parametrize("change", [_new_binding, _other_budget, _other_devices])
def test_an_unreadable_lease_keeps_its_device_until_its_release(
    ready_daemon: Daemon, restart_after: Callable[[Rewrite], Row], change: Rewrite
) -> None:
    lease = restart_after(change)
    (problem,) = eventually(lambda: _problems(ready_daemon))
    assert f"lease {lease['id']} in the state file cannot be read" in problem
    status, answer = ready_daemon.ask("POST", "/v1/leases", f"devices={ADDRESSES[0]}")
    assert status in (409, 423), answer
    ready_daemon.kill()
    ready_daemon.start().wait_ready()
    assert _problems(ready_daemon) == [problem], "the row is kept as it was"
    assert ready_daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    assert _problems(ready_daemon) == []
    take(ready_daemon, f"devices={ADDRESSES[0]}")
