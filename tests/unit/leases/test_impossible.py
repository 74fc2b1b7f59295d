"""What no waiting helps is refused at once, and nothing else."""

from __future__ import annotations

import pytest
from yunion_mps.errors import NothingFreeError
from yunion_mps.leases.impossible import refuse_impossible
from yunion_mps.leases.matching import least
from yunion_mps.leases.offers import Offers
from yunion_mps.leases.request import LeaseRequest

from unit.leases.shares import offers, pool


@pytest.mark.parametrize(
    ("wanted", "there"),
    [
        (LeaseRequest(5), "4 such devices on 1 GPU"),
        (LeaseRequest(2, across=True), "4 such devices on 1 GPU"),
        (LeaseRequest(device="nosuch"), "no such devices"),
    ],
)
def test_what_can_never_be_had_is_refused_at_once(wanted: LeaseRequest, there: str) -> None:
    with pytest.raises(NothingFreeError, match=f"can never be had: there are {there}"):
        refuse_impossible(wanted, offers(1))
    refuse_impossible(LeaseRequest(4), offers(1, reason="away"))


def test_devices_across_gpus_are_refused_where_memory_is_only_handed_out_in_units() -> None:
    wanted, handed_out = LeaseRequest(2, across=True), Offers((), [pool(0), pool(1)])
    assert list(least(wanted, handed_out)) == [], "nothing is to be judged, so nothing to be looked up"
    with pytest.raises(NothingFreeError, match="can never be had") as caught:
        refuse_impossible(wanted, handed_out)
    assert "--gpu-mem" in caught.value.hint


def test_where_a_host_offers_nothing_it_is_said_who_tells_why() -> None:
    with pytest.raises(NothingFreeError, match="there are no such devices") as caught:
        refuse_impossible(LeaseRequest(), Offers())
    assert caught.value.hint == "see why: yunion-mps status"
