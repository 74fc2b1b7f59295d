"""`yunion-mps who`: who has what, matched to leases, and counted against budgets."""

from __future__ import annotations

import json
import re

from unit.cli.conftest import Cli
from unit.cli.held import OVER, TWO, busy, hold
from unit.http.by_hand import CLIENT, LEASE, clients


def test_numbers_stand_on_the_right(own: Cli) -> None:
    own.host.clients.found = clients(
        CLIENT, {**CLIENT, "pid": 97, "device": "00:06.0-2", "memory_by_gpu_mib": [5]}
    )
    first, second = own.good("who").splitlines()[1:3]
    assert re.match(r"\S+  alice  4260  512 / 5760 MiB  ", first)
    assert re.match(r"\S+  alice    97    5 / 5760 MiB  ", second)


def test_without_leases_and_processes_who_says_so(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients()
    assert own.good("who") == "No devices are in use.\n"


def test_a_process_in_a_container_is_shown_with_its_container(own: Cli) -> None:
    own.env["COLUMNS"] = "160"
    hold(own.host, {**LEASE, "container": "trainer", "container_id": "a" * 64})
    own.host.clients.found = clients(
        {**CLIENT, "pid": 4261, "container": "trainer", "container_id": "a" * 64}
    )
    assert own.good("who").splitlines()[1].endswith("  trainer: python train.py")
    assert json.loads(own.good("who", "-o", "json"))["uses"][0]["container"] == "trainer"
    own.host.clients.found = clients()
    assert own.good("who").splitlines()[1].endswith("  trainer: python train.py"), "idle, by its lease"
    assert "trainer: python train.py" in own.good("top", "--once")
    own.host.clients.found = clients({**OVER, "container": "trainer", "container_id": "a" * 64})
    for command in (["top", "--once"], ["status"]):
        assert "trainer: python train.py" in own.good(*command)


def test_it_is_printed_for_programs_too(own: Cli) -> None:
    own.env["TZ"] = "UTC"
    busy(own.host)
    answer, (header, one, two, three) = own.read("who")
    assert (answer["total"], len(answer["uses"]), len(answer["waiting"])) == (3, 3, 1)
    first = answer["uses"][0]
    assert (first["devices"], first["lease"], first["memory_used_mib"]) == (["00:06.0-1"], LEASE["id"], 6000)
    assert [problem["hint"] for problem in answer["problems"]] == [
        "ask its owner, or terminate it: yunion-mps terminate 4260",
        "ask its owner, or terminate it: yunion-mps terminate 4711",
    ]
    rows = [dict(zip(header, row)) for row in (one, two, three)]
    assert [row["state"] for row in rows] == ["over budget", "idle", "outside MPS"]
    assert [row["devices"] for row in rows] == ["00:06.0-1", "00:06.0-2,00:06.0-3", ""]
    assert [row["memory_used_mib"] for row in rows] == ["6000", "0", "300"]
    assert rows[1]["lease"] == TWO["id"]


def test_a_lease_on_an_unavailable_device_says_so_with_the_reason(troubled: Cli) -> None:
    hold(troubled.host, LEASE)
    why = "its domain is failed: nvidia-cuda-mps-control is missing"
    answer, (header, row) = troubled.read("who")
    assert (answer["uses"][0]["state"], dict(zip(header, row))["state"]) == ("unavailable", "unavailable")
    assert troubled.good("who").splitlines()[-1] == f"00:06.0: {why}"
    shown = " ".join(troubled.good("lease", "show", LEASE["id"]).split())
    assert f"State: unavailable (GPU 00:06.0: {why})" in shown


def test_who_says_what_is_incomplete(own: Cli) -> None:
    own.host.clients.found = clients(errors=("domain host: it does not answer",))
    assert own.good("who").splitlines()[-1] == "Incomplete: domain host: it does not answer"


def test_a_client_that_names_no_device_is_no_device_s(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients({**CLIENT, "device": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["devices"], row["gpu"], row["state"]) == ([], "00:06.0", "no device")


def test_memory_that_the_driver_does_not_tell_is_unknown_and_no_trouble(own: Cli) -> None:
    own.host.clients.found = clients({**OVER, "memory_by_gpu_mib": [None], "memory_used_mib": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["memory_used_mib"], row["state"]) == (None, "in use")
