"""Nobody gets devices twice, and whoever asks again has what it was given."""

from __future__ import annotations

import pytest
from yunion_mps.errors import HostError
from yunion_mps.leases.once import given_before, refuse_a_second
from yunion_mps.models import Holder

from unit.leases.shares import HOLDER, device, lease

NIGHT = Holder("name", 1000, name="night")
LEASES = [
    lease("a", device(0, 0))._replace(idempotency_key="a-request-of-1000"),
    lease("b", device(0, 1))._replace(holder=NIGHT),
    lease("c", device(0, 2)),
]


def test_the_same_request_of_the_same_holder_has_its_lease() -> None:
    assert given_before(LEASES, HOLDER, "a-request-of-1000") is LEASES[0]
    assert given_before(LEASES, HOLDER._replace(pid=1), "a-request-of-1000") is None
    assert given_before(LEASES, HOLDER, "another-request") is None
    assert given_before(LEASES, HOLDER, "") is None, "who names no request asks for the first time"


@pytest.mark.parametrize(
    ("holder", "request_id", "message"),
    [
        (NIGHT, "", "night has a lease already: b"),
        (HOLDER._replace(pid=1), "a-request-of-1000", "this request has a lease already: a"),
    ],
)
def test_a_second_lease_for_a_name_or_a_request_is_refused(
    holder: Holder, request_id: str, message: str
) -> None:
    with pytest.raises(HostError) as caught:
        refuse_a_second(LEASES, holder, request_id)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("holder", "request_id"),
    [
        (NIGHT._replace(uid=1001), "a-request-of-1000"),
        (NIGHT._replace(unit="yunion-mps-job@train.service"), "a-request-of-1000"),
        (NIGHT._replace(name="day"), ""),
        (HOLDER, "another-request"),
        (HOLDER, ""),
    ],
)
def test_another_users_names_and_requests_are_in_nobodys_way(holder: Holder, request_id: str) -> None:
    refuse_a_second(LEASES, holder, request_id)
