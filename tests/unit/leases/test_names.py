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


@pytest.mark.parametrize(
    ("name", "found"),
    [("1234-a", "1234-a"), ("night", "1234-a"), ("1234", "1234-b"), ("9876", "9876-c"), ("1234-b", "1234-b")],
)
def test_a_lease_has_its_id_its_holders_name_and_the_beginning_of_its_id(name: str, found: str) -> None:
    assert lease_named(name, LEASES).id == found


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
        lease_named(name, LEASES)
    assert caught.value.message == message
