"""What counts as free is what can be had, also where leases from before a reload still have their memory."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from yunion_mps.core.reasons import LEASES_PENDING

from integration.daemon_host import Daemon, eventually
from integration.lease_host import leases_of
from integration.test_cli_host import csv_rows, output_of
from simhost import SimHost
from simhost.host import IN_UNITS

pytestmark = pytest.mark.gpus({"kind": "v100"})


def free_addresses(host: SimHost) -> list[str]:
    return [row[0] for row in csv_rows(output_of(host, "list", "--free", "-o", "csv"))[1:]]


def lease_devices(daemon: Daemon, query: str) -> str:
    status, answer = daemon.ask("POST", "/v1/leases", f"{query}&holder.ttl_s=600")
    return ",".join(answer["devices"]) if status == 201 else ""


@pytest.mark.parametrize(
    ("before", "query", "after", "free"),
    [
        (2, "devices=00:06.0-1", 4, ["00:06.0-0", "00:06.0-2"]),
        (IN_UNITS, "memory_mib=10240", 4, ["00:06.0-0"]),
        (IN_UNITS, "memory_mib=4096", IN_UNITS, []),
    ],
    ids=["second-half", "units", "no-change"],
)
def test_a_device_without_memory_left_by_older_leases_is_not_unused(
    daemon: Daemon, before: object, query: str, after: object, free: list[str]
) -> None:
    host = daemon.host
    host.divide(before)
    daemon.start().wait_ready()
    assert lease_devices(daemon, f"{query}&holder.name=old")
    host.divide(after)
    output_of(host, "reload")
    assert free_addresses(host) == free
    assert json.loads(output_of(host, "status", "-o", "json"))["devices"]["free"] == len(free)
    assert [lease_devices(daemon, f"holder.name=new-{number}") for number in range(len(free))] == free
    assert free_addresses(host) == []
    assert lease_devices(daemon, "holder.name=one-more") == ""


def test_the_screens_say_why_a_device_cannot_be_had_until_that_is_over(daemon: Daemon) -> None:
    host = daemon.host
    host.divide(2)
    daemon.start().wait_ready()
    assert lease_devices(daemon, "holder.name=old") == "00:06.0-0"
    host.divide(4)
    output_of(host, "reload")
    told = "GPU 00:06.0: 2 devices pending: the new division of the GPU waits for lease old of root to end\n"
    status, top = output_of(host, "status"), output_of(host, "top", "--once")
    assert (
        f"Pending:  {told}Hint:     wait for the leases and MPS servers to end; "
        "see who holds and uses the devices: "
        "yunion-mps who\n" in status
    )
    assert "Devices:  2 of 4 available, 2 pending, 1 used, 2 free\n" in status
    assert f"Pending: {told}" in top
    assert told in output_of(host, "who"), "those without a holder are counted too"
    words = {line.split()[0]: line.split()[2:] for line in top.splitlines() if line.startswith("00:06.0-")}
    assert words["00:06.0-0"][:3] == ["0.0", "8.0", "50"], "as it was given, which is not as it would be now"
    assert words["00:06.0-3"] == ["4.0", "25", "no", "memory"]
    assert words["00:06.0-1"] == ["4.0", "25", "free"]
    output_of(host, "lease", "release", "old")
    status, top = output_of(host, "status"), output_of(host, "top", "--once")
    assert "Pending" not in status + top
    assert "Devices:  4 of 4 available, 0 used, 4 free\n" in status
    assert free_addresses(host) == [f"00:06.0-{slot}" for slot in range(4)]


def device_counts(daemon: Daemon) -> dict[str, int]:
    """How many devices there are of each state: what `status` says, which is what the list has."""
    said = daemon.status()["devices"]
    listed = daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]
    states = Counter(device["state"] for device in listed)
    broken = {state: states[state] for state in ("unavailable", "pending")}
    used = sum(device["lease"] is not None for device in listed)
    available = len(listed) - sum(broken.values())
    counts = {"total": len(listed), "available": available, "used": used, "free": states["free"]}
    assert said == {**counts, **broken, "reserved": states["reserved"]}
    return {state: number for state, number in said.items() if number}


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_division_waiting_for_leases_is_named_and_counted_alike(daemon: Daemon) -> None:
    host = daemon.host
    host.divide(4, 6)
    daemon.start().wait_ready()
    for slot in range(4):
        assert lease_devices(daemon, f"devices=00:06.0-{slot}&holder.name=job-{slot}")
    ids = [one["id"] for one in leases_of(daemon)]
    host.divide(2, 6)
    leases = "lease job-0 of root, lease job-1 of root, lease job-2 of root and 1 more"
    what = f"GPU 00:06.0: 4 devices pending: the new division of the GPU waits for {leases} to end"
    waits = {"domain": "host", "pending": what, "leases": ids}

    (change,) = daemon.get("/v1/plan")[1]["changes"]
    assert change["effect"] == f"once {leases} have ended"
    answer = daemon.ask("POST", "/v1/reload")[1]
    assert (answer["changes"], answer["pending"]) == ([change], [waits])
    assert device_counts(daemon) == {"total": 10, "available": 6, "pending": 4, "used": 4, "free": 6}
    shown = f"nothing has changed.\nPending:  host: {what}\nSee who holds the leases: yunion-mps who\n"
    assert output_of(host, "reload") == f"Reloaded; {shown}"
    listed = daemon.get("/v1/devices?addr=00:06.0")[1]["isolated_devices"]
    assert [one["memory_mib"] for one in listed] == [4096] * 4, "as they were given"
    assert {one["reason_code"] for one in listed} == {LEASES_PENDING}
    environment = daemon.get("/v1/devices/00:06.0-0")[1]["client_environment"]
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
    assert lease_devices(daemon, "gpu=00:06.0&holder.name=next") == ""

    daemon.kill()
    daemon.start().wait_ready()
    line = "6 of 10 devices available, 4 pending, 1 of 1 control daemons serving"
    eventually(lambda: leases_of(daemon) and device_counts(daemon)["pending"] == 4, "the leases")
    assert f"is ready: {line}" in daemon.log
    for slot in (2, 3):
        assert daemon.ask("DELETE", f"/v1/leases/job-{slot}")[0] == 200
    assert device_counts(daemon) == {"total": 8, "available": 6, "pending": 2, "used": 2, "free": 6}
    assert daemon.ask("DELETE", "/v1/leases/job-0")[0] == 200
    assert device_counts(daemon) == {"total": 8, "available": 7, "pending": 1, "used": 1, "free": 7}
    assert lease_devices(daemon, "gpu=00:06.0&holder.name=next") == "00:06.0-0"
    assert daemon.ask("DELETE", "/v1/leases/job-1")[0] == 200
    assert device_counts(daemon) == {"total": 8, "available": 8, "used": 1, "free": 7}
    assert not any(daemon.get("/v1/plan")[1].values())
