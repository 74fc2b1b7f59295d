"""What counts as free is what can be had, also where leases from before a reload still have their memory."""

from __future__ import annotations

import json

import pytest

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon
from integration.test_cli_host import printed, rows
from simhost import SimHost

HALVES, QUARTERS = "virtual_number: 2", "virtual_number: 4"
IN_UNITS = "virtual_number: 0\n  memory_unit: 1GiB"


def divide(host: SimHost, how: str) -> None:
    entry = f"- path: {host.gpus[0].uuid}\n  type: NVIDIA_MPS\n  {how}\n"
    (host.root / "etc/yunion/host_container_device.yml").write_text(f"devices:\n{entry}")


def unused(host: SimHost) -> list[str]:
    return [row[3] for row in rows(printed(host, "list", "--unused", "-o", "csv"))[1:]]


def lease(daemon: Daemon, query: str) -> str:
    status, answer = daemon.ask("POST", f"/v1/leases?{query}&ttl=600")
    return ",".join(answer["devices"]) if status == 200 else ""


@pytest.mark.parametrize(
    ("before", "query", "after", "free"),
    [
        (HALVES, "device=00:06.0-0", QUARTERS, ["00:06.0-1", "00:06.0-2"]),
        (HALVES, "device=00:06.0-1", QUARTERS, ["00:06.0-0", "00:06.0-2"]),
        (QUARTERS, "device=00:06.0-3", HALVES, ["00:06.0-0"]),
        (IN_UNITS, "memory=10240", QUARTERS, ["00:06.0-0"]),
        (IN_UNITS, "memory=16384", HALVES, []),
        (IN_UNITS, "memory=4096", IN_UNITS, []),
    ],
    ids=["first-half", "second-half", "last-quarter", "units", "all-units", "no-change"],
)
def test_a_device_whose_memory_a_lease_from_before_a_reload_has_is_not_unused(
    make_host: MakeHost, make_daemon: MakeDaemon, before: str, query: str, after: str, free: list[str]
) -> None:
    host = make_host([{"kind": "v100"}])
    divide(host, before)
    daemon = make_daemon(host).start().wait_ready()
    assert lease(daemon, f"{query}&name=old")
    divide(host, after)
    printed(host, "reload")
    assert unused(host) == free
    assert json.loads(printed(host, "status", "-o", "json"))["devices"]["free"] == len(free)
    assert [lease(daemon, f"name=new-{number}") for number in range(len(free))] == free
    assert unused(host) == []
    assert lease(daemon, "name=one-more") == ""


def test_the_screens_say_why_a_device_cannot_be_had_until_that_is_over(
    make_host: MakeHost, make_daemon: MakeDaemon
) -> None:
    host = make_host([{"kind": "v100"}])
    divide(host, HALVES)
    daemon = make_daemon(host).start().wait_ready()
    assert lease(daemon, "name=old") == "00:06.0-0"
    divide(host, QUARTERS)
    printed(host, "reload")
    told = "GPU 00:06.0: leases from before a reload leave no memory for 1 device\n"
    status, top = printed(host, "status"), printed(host, "top", "--once")
    assert (
        f"Pending:  {told}Remedy:   there is some once they have ended; see whose they are: yunion-mps who\n"
        in status
    )
    assert "Devices:  4 of 4 available, 1 used, 2 free\n" in status
    assert f"Pending: {told}" in top
    words = {line.split()[0]: line.split()[2:] for line in top.splitlines() if line.startswith("00:06.0-")}
    assert words["00:06.0-0"][:3] == ["0", "8192", "50"], "as it was given, which is not as it would be now"
    assert words["00:06.0-3"] == ["4096", "25", "no", "room"]
    assert words["00:06.0-1"] == ["4096", "25", "free"]
    printed(host, "lease", "release", "old")
    status, top = printed(host, "status"), printed(host, "top", "--once")
    assert "Pending" not in status + top
    assert "Devices:  4 of 4 available, 0 used, 4 free\n" in status
    assert unused(host) == [f"00:06.0-{slot}" for slot in range(4)]
