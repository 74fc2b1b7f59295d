"""`yunion-mps lease list` and `lease show`: the state of a lease."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.cli.calls import warn_unenforced
from yunion_mps.cli.lease import in_time
from yunion_mps.core.models import Holder, Lease

from unit.cli.busy_host import OVER_BUDGET, TWO_DEVICES, hold_leases
from unit.cli.conftest import Cli
from unit.http.fake_services import CLIENT, LEASE, clients

FAILED = "GPU 00:06.0: its domain is failed: nvidia-cuda-mps-control is missing"


def listed(cli: Cli) -> list[dict[str, Any]]:
    answer, (header, *rows) = cli.read("lease", "list")
    assert [row[header.index("id")] for row in rows] == [one["id"] for one in answer["leases"]]
    return list(answer["leases"])


def states(cli: Cli) -> list[str | None]:
    return [one["state"] for one in listed(cli)]


def test_a_lease_is_in_use_over_budget_or_idle(own_cli: Cli) -> None:
    hold_leases(own_cli.host, LEASE, TWO_DEVICES)
    for client, state in ((CLIENT, "in use"), (OVER_BUDGET, "over budget")):
        own_cli.host.clients.listed = clients(client)
        assert states(own_cli) == [state, "idle"]
    own_cli.host.clients.listed = clients()
    assert states(own_cli) == ["idle", "idle"]
    header, *rows = own_cli.good("lease", "list").splitlines()
    assert [row[header.index("STATE") :].split("  ")[0] for row in rows] == ["idle", "idle"]


def test_a_lease_is_not_idle_if_clients_are_unknown(own_cli: Cli) -> None:
    hold_leases(own_cli.host, LEASE, TWO_DEVICES)
    own_cli.host.clients.listed = clients(CLIENT, errors=("domain host: it does not answer",))
    assert states(own_cli) == ["in use", None]
    assert own_cli.good("lease", "list").splitlines()[-1] == "Incomplete: domain host: it does not answer"


def test_a_lease_on_an_unavailable_device_is_unavailable_with_the_reason(troubled_cli: Cli) -> None:
    hold_leases(troubled_cli.host, LEASE, TWO_DEVICES)
    assert [(one["state"], one["reason"]) for one in listed(troubled_cli)] == [("unavailable", FAILED)] * 2
    assert troubled_cli.good("lease", "list").count(f"{FAILED}\n") == 1


def test_a_lease_of_a_former_division_is_pending_until_it_ends(own_cli: Cli) -> None:
    hold_leases(own_cli.host, LEASE, TWO_DEVICES)
    own_cli.host.clients.listed = clients(CLIENT)
    former = own_cli.host.snapshot.plan.devices[1]._replace(memory_limit_mib=2880)
    own_cli.host.service.ledger.add(Lease(LEASE["id"], (former,), Holder("process", 0), 0.0))
    first, second = listed(own_cli)
    assert (first["state"], second["state"], second["reason"]) == ("pending", "idle", "")
    waits = "the new division of the GPU waits for lease 7c1f0e7a of root to end"
    assert first["reason"] == f"GPU 00:06.0: {waits}"


@pytest.mark.parametrize(
    ("left_s", "shown"), [(3599.5, "in 1h"), (3600, "in 1h"), (3000, "in 50m"), (59.5, "in 59s")]
)
def test_the_time_to_the_end_is_rounded_to_minutes(left_s: float, shown: str) -> None:
    assert in_time(left_s) == shown


def test_a_notice_names_all_gpus_that_enforce_no_budget(capsys: pytest.CaptureFixture[str]) -> None:
    warn_unenforced(["00:06.0", "00:07.0"], "time-slicing")
    gpus = "GPUs 00:06.0, 00:07.0, which are time-sliced: a job can use all of their memory"
    assert capsys.readouterr().err == f"yunion-mps: budgets are not enforced on {gpus}\n"
