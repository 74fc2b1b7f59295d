"""What `reload --now` ends or removes, and that nothing else is lost than what was listed."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core.errors import NotConfirmedError
from yunion_mps.service.reload_losses import (
    Listings,
    ReloadLosses,
    UnknownClients,
    losses_of_clients,
    refuse_unconfirmed,
)
from yunion_mps.supervisor import Change

from unit.http import fake_services, snapshots

TWO = snapshots.snapshot(snapshots.P40, snapshots.H100, scope="gpu")
ADDRESSES = {str(gpu.uuid): gpu.address for gpu in TWO.inventory.gpus}
FIRST: Any = {**fake_services.CLIENT, "domain": "00:06.0"}
SECOND = {**fake_services.CLIENT, "pid": 4270, "domain": "0001:e1:00.0"}
LEASED = fake_services.EXAMPLES["Loss"]
FOREIGN: Any = {"subject": "00:06.0-g5", "lease": None, "holder": "another program (3g.40gb)"}


def change(subject: str, effect: str = "once the MPS server has ended") -> Change:
    return Change("budget", subject, "", "", effect)


def pids_in_the_way(waiting: str, changes: list[Change], *clients: Any) -> list[int]:
    """The clients that delay these changes, or what the `waiting` domain waits for: the server 4250."""
    domains = [
        domain._replace(pending="x", waits_for=(4250,)) if domain.plan.name == waiting else domain
        for domain in TWO.domains
    ]
    found = losses_of_clients(fake_services.clients(*clients), changes, domains, ADDRESSES)
    return [client["pid"] for client in found.clients]


@pytest.mark.parametrize(
    ("subject", "waiting", "expected"),
    [
        ("00:06.0", "", [4260]),
        ("0001:e1:00.0", "", [4270]),
        ("0001:e1:00.0", "00:06.0", [4260, 4270]),
        ("", "00:06.0", [4260]),
        ("", "", []),
    ],
)
def test_jobs_that_delay_a_late_or_pending_change_are_in_the_way(
    subject: str, waiting: str, expected: list[int]
) -> None:
    changes = [change("cuda_mps_stop_timeout_s", "at once")]
    if subject:
        changes.append(change(subject))
    assert pids_in_the_way(waiting, changes, FIRST, SECOND) == expected


def test_a_job_on_a_server_that_has_the_new_limits_is_not_in_the_way() -> None:
    """A new control daemon has started its server meanwhile; an unknown server could be the old one."""
    old, new, unknown = (
        {**FIRST, "pid": pid, "server": server} for pid, server in ((4260, 4250), (4270, 4251), (4280, None))
    )
    assert pids_in_the_way("00:06.0", [], old, new, unknown) == [4260, 4280]


def test_a_process_outside_mps_is_not_in_the_way() -> None:
    assert pids_in_the_way("", [change("00:06.0")], {**FIRST, "mps": False, "server": None}) == []


UNKNOWN = UnknownClients("host", 4250, "domain host: it does not answer")


@pytest.mark.parametrize(("changes", "servers"), [([], [4250]), ([change("00:06.0")], [4250, 4251])])
def test_clients_are_unknown_only_where_a_server_has_to_end(
    changes: list[Change], servers: list[int]
) -> None:
    """A new control daemon beside an orphan: its own server is in the way of a change only."""
    first, second = TWO.domains
    orphaned = first._replace(pending="x", waits_for=(4250,), orphans=(4250,))
    server: Any = {**fake_services.SERVER, "domain": "00:06.0"}
    listed = fake_services.clients(servers=({**server, "pid": 4250}, {**server, "pid": 4251}))
    found = losses_of_clients(listed, changes, [orphaned, second], ADDRESSES)
    assert [unknown.server for unknown in found.unknown] == servers


LISTED = ReloadLosses([FIRST], [LEASED, FOREIGN], [UNKNOWN])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"clients": [FIRST, SECOND]}, "PID 4270 of alice (python train.py)"),
        (
            {"devices": [LEASED, FOREIGN, {**LEASED, "lease": "b0b0b0b0-1111", "holder": "bob (job-17)"}]},
            f"lease b0b0b0b0 on {LEASED['subject']} of bob (job-17)",
        ),
        (
            {"devices": [LEASED, FOREIGN, {**LEASED, "subject": "00:07.0-m2"}]},
            f"lease {LEASED['lease'][:8]} on 00:07.0-m2 of {LEASED['holder']}",
        ),
        (
            {"devices": [LEASED, FOREIGN, {**FOREIGN, "subject": "00:06.0-g6"}]},
            "instance 00:06.0-g6 of another program (3g.40gb)",
        ),
        (
            {"devices": [LEASED, FOREIGN, {**FOREIGN, "holder": "another program (7g.80gb)"}]},
            "instance 00:06.0-g5 of another program (7g.80gb)",
        ),
        (
            {"unknown": [UNKNOWN, UNKNOWN._replace(server=4251)]},
            "clients of the MPS server (PID 4251) that are not known (domain host: it does not answer)",
        ),
    ],
    ids=["job", "lease", "device", "instance", "profile", "server"],
)
def test_what_was_not_listed_is_not_lost(more: dict[str, Any], named: str) -> None:
    listings = Listings()
    confirmed = listings.confirmed_by(listings.remember(LISTED))
    refuse_unconfirmed(LISTED, confirmed, "nothing was changed")
    with pytest.raises(NotConfirmedError) as refused:
        refuse_unconfirmed(LISTED._replace(**more), confirmed, "nothing was changed")
    what = "nothing was changed, because the reload would also end or remove: "
    assert refused.value.message == what + named


def test_unknown_clients_have_to_be_confirmed() -> None:
    listings = Listings()
    confirmed = listings.confirmed_by(listings.remember(LISTED._replace(unknown=())))
    with pytest.raises(NotConfirmedError, match=r"clients of the MPS server \(PID 4250\) that are not known"):
        refuse_unconfirmed(LISTED, confirmed, "nothing was changed")


def test_a_confirmed_pid_that_another_job_has_now_is_not_confirmed() -> None:
    listings = Listings()
    confirmed = listings.confirmed_by(listings.remember(ReloadLosses([FIRST])))
    reused: Any = {**FIRST, "started": "2026-08-29T11:00:00.000Z"}
    with pytest.raises(NotConfirmedError, match="PID 4260"):
        refuse_unconfirmed(ReloadLosses([reused]), confirmed, "nothing was changed")


def test_what_has_ended_since_the_list_needs_no_new_confirmation() -> None:
    listings = Listings()
    confirmed = listings.confirmed_by(listings.remember(LISTED))
    refuse_unconfirmed(ReloadLosses([], [FOREIGN]), confirmed, "nothing was changed")
    assert listings.remember(ReloadLosses()) == ""


def test_a_confirmation_is_forgotten_after_many_other_lists() -> None:
    listings = Listings()
    token = listings.remember(LISTED)
    for pid in range(5000, 5064):
        other: Any = {**FIRST, "pid": pid}
        listings.remember(ReloadLosses([other]))
    assert listings.confirmed_by(token) == frozenset()
