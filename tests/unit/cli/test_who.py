"""`yunion-mps who`: who has what, matched to leases, and counted against budgets."""

from __future__ import annotations

import json

from unit.cli.busy_host import OVER_BUDGET, hold_leases
from unit.cli.conftest import Cli
from unit.http.fake_services import CLIENT, LEASE, clients


def test_without_leases_and_processes_who_says_so(own_cli: Cli) -> None:
    hold_leases(own_cli.host)
    own_cli.host.clients.listed = clients()
    assert own_cli.good("who") == "No devices are in use.\n"


def test_a_lease_on_an_unavailable_device_says_so_with_the_reason(troubled_cli: Cli) -> None:
    hold_leases(troubled_cli.host, LEASE)
    why = "its domain is failed: nvidia-cuda-mps-control is missing"
    answer, (header, row) = troubled_cli.read("who")
    assert (answer["uses"][0]["state"], dict(zip(header, row))["state"]) == ("unavailable", "unavailable")
    assert troubled_cli.good("who").splitlines()[-1] == f"00:06.0: {why}"
    shown = " ".join(troubled_cli.good("lease", "show", LEASE["id"]).split())
    assert f"State: unavailable (GPU 00:06.0: {why})" in shown


def test_a_client_that_names_no_device_is_no_device_s(own_cli: Cli) -> None:
    hold_leases(own_cli.host)
    own_cli.host.clients.listed = clients({**CLIENT, "device": None})
    (row,) = json.loads(own_cli.good("who", "-o", "json"))["uses"]
    assert (row["devices"], row["gpu"], row["state"]) == ([], "00:06.0", "no device")


def test_memory_that_the_driver_does_not_tell_is_unknown_and_no_trouble(own_cli: Cli) -> None:
    own_cli.host.clients.listed = clients(
        {**OVER_BUDGET, "memory_by_gpu_mib": [None], "memory_used_mib": None}
    )
    (row,) = json.loads(own_cli.good("who", "-o", "json"))["uses"]
    assert (row["memory_used_mib"], row["state"]) == (None, "in use")
