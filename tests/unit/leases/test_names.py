"""What people may call a lease."""

from __future__ import annotations

import pytest
from yunion_mps.errors import NotFoundError
from yunion_mps.leases.names import lease_named
from yunion_mps.models import Holder

from unit.leases.shares import device, lease

LEASES = {
    name: lease(name, device(0, slot))._replace(holder=Holder("name", 1000, name=holder))
    for slot, (name, holder) in enumerate((("1234-a", "night"), ("1234-b", "1234"), ("9876-c", "noon")))
}

#: A job's, and what somebody else has called after it, by its name and by its id.
THEIRS = {
    "1234-a": lease("1234-a", device(0, 0))._replace(holder=Holder("name", 1000, name="job")),
    "9876-c": lease("9876-c", device(0, 1))._replace(holder=Holder("name", 66, name="job")),
    "4444-b": lease("4444-b", device(0, 2))._replace(holder=Holder("name", 66, name="1234")),
    "5555-d": lease("5555-d", device(0, 3))._replace(holder=Holder("name", 66, name="sole")),
}


@pytest.mark.parametrize(
    ("name", "found"),
    [("1234-a", "1234-a"), ("night", "1234-a"), ("1234", "1234-b"), ("9876", "9876-c"), ("1234-b", "1234-b")],
)
def test_a_lease_has_its_id_its_holders_name_and_the_beginning_of_its_id(name: str, found: str) -> None:
    assert lease_named(name, LEASES, 1000).id == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("987", "there is no lease 987"),
        ("day", "there is no lease day"),
        ("1234-", "1234- names 2 leases"),
    ],
)
def test_what_names_none_or_several_is_said(name: str, message: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        lease_named(name, LEASES, 1000)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("uid", "name", "found"),
    [(1000, "job", "1234-a"), (66, "job", "9876-c"), (1000, "1234", "1234-a"), (0, "sole", "5555-d")],
)
def test_the_asker_s_own_lease_is_meant_whatever_others_call_theirs(uid: int, name: str, found: str) -> None:
    assert lease_named(name, THEIRS, uid).id == found


@pytest.mark.parametrize("name", ["job", "1234"])
def test_whose_lease_is_meant_is_not_guessed_for_who_has_none_of_them(name: str) -> None:
    """Else root would end, by the id that `who` shows, the lease of a user who has called it so."""
    with pytest.raises(NotFoundError, match=f"{name} names 2 leases"):
        lease_named(name, THEIRS, 0)
