"""`yunion-mps lease list` and `lease show`: the state of a lease."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.cli.calls import warn_unenforced
from yunion_mps.cli.lease import in_time
from yunion_mps.core.models import Holder, Lease

from unit.cli.conftest import Cli
from unit.cli.held import OVER, TWO, hold
from unit.http.by_hand import CLIENT, LEASE, clients

FAILED = "GPU 00:06.0: its domain is failed: nvidia-cuda-mps-control is missing"


def listed(cli: Cli) -> list[dict[str, Any]]:
    answer, (header, *rows) = cli.read("lease", "list")
    assert [row[header.index("id")] for row in rows] == [one["id"] for one in answer["leases"]]
    return list(answer["leases"])


def states(cli: Cli) -> list[str | None]:
    return [one["state"] for one in listed(cli)]


def test_a_lease_is_in_use_over_budget_or_idle(own: Cli) -> None:
    hold(own.host, LEASE, TWO)
    for client, state in ((CLIENT, "in use"), (OVER, "over budget")):
        own.host.clients.found = clients(client)
        assert states(own) == [state, "idle"]
    own.host.clients.found = clients()
    assert states(own) == ["idle", "idle"]
    header, *rows = own.good("lease", "list").splitlines()
    assert [row[header.index("STATE") :].split("  ")[0] for row in rows] == ["idle", "idle"]


def test_a_lease_is_not_idle_if_clients_are_unknown(own: Cli) -> None:
    hold(own.host, LEASE, TWO)
    own.host.clients.found = clients(CLIENT, errors=("domain host: it does not answer",))
    assert states(own) == ["in use", None]
    assert own.good("lease", "list").splitlines()[-1] == "Incomplete: domain host: it does not answer"


def test_a_lease_on_an_unavailable_device_is_unavailable_with_the_reason(troubled: Cli) -> None:
    hold(troubled.host, LEASE, TWO)
    assert [(one["state"], one["reason"]) for one in listed(troubled)] == [("unavailable", FAILED)] * 2
    assert troubled.good("lease", "list").count(f"{FAILED}\n") == 1


def test_a_lease_of_a_former_division_is_pending_until_it_ends(own: Cli) -> None:
    hold(own.host, LEASE, TWO)
    own.host.clients.found = clients(CLIENT)
    former = own.host.snapshot.plan.devices[1]._replace(memory_limit_mib=2880)
    own.host.service.ledger.add(Lease(LEASE["id"], (former,), Holder("process", 0), 0.0))
    first, second = listed(own)
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
