"""Names in requests: what finds a lease."""

from __future__ import annotations

import pytest
from yunion_mps.core.errors import NotAllowedError, NotFoundError
from yunion_mps.core.models import Holder, Lease, Owner
from yunion_mps.http.operations import TAKE_LEASE
from yunion_mps.leases.request import LeaseRequest, find_lease, refuse_too_long

from unit.leases.lease_builders import device, lease

ALICE, BOB, ROOT = Owner(1000), Owner(66), Owner(0)
#: Two jobs, which have one user between them.
TRAIN, TEST = Owner(61184, "yunion-mps-job@train.service"), Owner(61184, "yunion-mps-job@test.service")


def leases_of_owners(*leases: tuple[str, Owner, str]) -> dict[str, Lease]:
    """Leases by id, each of its owner, who has called it so."""
    return {
        lease_id: lease(lease_id, device(0, slot))._replace(
            holder=Holder("name", owner.uid, name=name, unit=owner.unit)
        )
        for slot, (lease_id, owner, name) in enumerate(leases)
    }


LEASES = leases_of_owners(
    ("12345678-a", ALICE, "night"), ("12345678-b", ALICE, "12345678"), ("98765432-c", ALICE, "noon")
)
#: A job's lease, and another owner's that is named after it, by its name and by its id.
THEIRS = leases_of_owners(
    ("12345678-a", ALICE, "job"),
    ("98765432-c", BOB, "job"),
    ("44444444-b", BOB, "12345678"),
    ("55555555-d", BOB, "sole"),
    ("66666666-e", TRAIN, "model"),
    ("77777777-f", TEST, "model"),
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("12345678-a", "12345678-a"),
        ("night", "12345678-a"),
        ("12345678", "12345678-b"),
        ("98765432", "98765432-c"),
        ("12345678-b", "12345678-b"),
    ],
)
def test_a_lease_is_found_by_id_holder_name_and_prefix_of_the_id(name: str, found: str) -> None:
    assert find_lease(name, LEASES, ALICE).id == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("9876543", "there is no lease 9876543"),
        ("day", "there is no lease day"),
        ("12345678-", "12345678- matches 2 leases"),
    ],
)
def test_an_unknown_or_ambiguous_lease_name_is_an_error(name: str, message: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        find_lease(name, LEASES, ALICE)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        (ALICE, "job", "12345678-a"),
        (BOB, "job", "98765432-c"),
        (ALICE, "12345678", "12345678-a"),
        (TRAIN, "model", "66666666-e"),
        (TEST, "model", "77777777-f"),
        (ROOT, "12345678", "12345678-a"),
        (ROOT, "98765432-c", "98765432-c"),
    ],
)
def test_a_name_finds_own_leases_and_an_id_finds_any(owner: Owner, name: str, found: str) -> None:
    assert find_lease(name, THEIRS, owner).id == found


@pytest.mark.parametrize(
    ("owner", "name"), [(ROOT, "job"), (ROOT, "sole"), (ALICE, "sole"), (Owner(61184), "model")]
)
def test_a_name_never_finds_another_owner_s_lease(owner: Owner, name: str) -> None:
    """Else root, whose own lease has expired, would end that of a user who has called it the same."""
    with pytest.raises(NotFoundError, match=f"there is no lease {name}") as caught:
        find_lease(name, THEIRS, owner)
    assert caught.value.hint == "refer to another owner's lease by its id: yunion-mps lease list"


@pytest.mark.parametrize(
    ("ttl_s", "asked"),
    [(61, "61s"), (90 * 60, "90m"), (1000 * 86_400, "1000d"), (100_000 * 86_400, "100000d")],
)
def test_host_conf_alone_limits_the_time_to_live(ttl_s: int, asked: str) -> None:
    sent = TAKE_LEASE.encode({"holder": {"name": "job", "ttl_s": ttl_s}})
    holder = TAKE_LEASE.arguments("", {"content-type": "application/json"}, sent.body)["holder"]
    assert isinstance(holder, dict)
    assert holder["ttl_s"] == ttl_s
    with pytest.raises(NotAllowedError) as caught:
        refuse_too_long(Holder("name", 0, name="job", ttl_s=ttl_s), 60)
    assert caught.value.message == f"a time to live of {asked} exceeds the limit of 1m"
    expected = "request at most 1m and renew the lease, or raise max_lease_ttl_s in host.conf"
    assert caught.value.hint == expected


def test_a_device_of_unknown_memory_matches_no_request_for_memory() -> None:
    one = device(0, 0)._replace(memory_limit_mib=None, memory_total_mib=None)
    assert LeaseRequest().matches(one)
    assert not LeaseRequest(memory_mib=1).matches(one)
