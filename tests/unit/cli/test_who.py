"""`yunion-mps who`: who has what, matched to leases, and counted against budgets."""

from __future__ import annotations

import json

from unit.cli.conftest import Cli
from unit.cli.held import OVER, hold
from unit.http.by_hand import CLIENT, LEASE, clients


def test_without_leases_and_processes_who_says_so(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients()
    assert own.good("who") == "No devices are in use.\n"


def test_a_lease_on_an_unavailable_device_says_so_with_the_reason(troubled: Cli) -> None:
    hold(troubled.host, LEASE)
    why = "its domain is failed: nvidia-cuda-mps-control is missing"
    answer, (header, row) = troubled.read("who")
    assert (answer["uses"][0]["state"], dict(zip(header, row))["state"]) == ("unavailable", "unavailable")
    assert troubled.good("who").splitlines()[-1] == f"00:06.0: {why}"
    shown = " ".join(troubled.good("lease", "show", LEASE["id"]).split())
    assert f"State: unavailable (GPU 00:06.0: {why})" in shown


def test_a_client_that_names_no_device_is_no_device_s(own: Cli) -> None:
    hold(own.host)
    own.host.clients.found = clients({**CLIENT, "device": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["devices"], row["gpu"], row["state"]) == ([], "00:06.0", "no device")


def test_memory_that_the_driver_does_not_tell_is_unknown_and_no_trouble(own: Cli) -> None:
    own.host.clients.found = clients({**OVER, "memory_by_gpu_mib": [None], "memory_used_mib": None})
    (row,) = json.loads(own.good("who", "-o", "json"))["uses"]
    assert (row["memory_used_mib"], row["state"]) == (None, "in use")
