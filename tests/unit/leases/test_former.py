"""Leases of a former division: what of the new one waits for them."""

from __future__ import annotations

from yunion_mps.host.proc import user_name
from yunion_mps.leases.ledger import Ledger
from yunion_mps.models import Device, Holder

from unit.leases.shares import device, lease, pool

HALVES, QUARTERS = (
    [device(0, slot, number)._replace(id=f"id-{slot}") for slot in range(number)] for number in (2, 4)
)


def waiting(devices: list[Device], *leased: Device) -> dict[str, int]:
    ledger = Ledger([lease(f"lease-{place}", one) for place, one in enumerate(leased)])
    return {uuid: wait.devices for uuid, wait in ledger.lease_waits(devices).items()}


def test_leases_of_the_division_keep_nothing_waiting() -> None:
    assert waiting(QUARTERS, *QUARTERS) == {}


def test_what_former_leases_have_or_leave_no_room_for_waits() -> None:
    assert waiting(HALVES, *QUARTERS) == {"GPU-0": 2}
    assert waiting(HALVES, QUARTERS[3]) == {"GPU-0": 1}
    assert waiting(QUARTERS, HALVES[0]) == {"GPU-0": 2}
    assert waiting(QUARTERS, *HALVES) == {"GPU-0": 4}
    assert waiting(QUARTERS, pool(0).make(6, 0)) == {"GPU-0": 2}


def test_other_threads_are_another_division_of_that_gpu_alone() -> None:
    fewer = QUARTERS[1]._replace(thread_percentage=12.5)
    other = [one._replace(gpu_uuid="GPU-1", id=f"other-{one.id}") for one in QUARTERS]
    assert waiting([*QUARTERS, *other], fewer, other[0]) == {"GPU-0": 1}


def test_leases_are_named_by_name_or_id_with_their_holder() -> None:
    ledger = Ledger([lease(f"{slot}c1f0e7a-0000", one) for slot, one in enumerate(QUARTERS)])
    ledger.replace(
        ledger.leases["0c1f0e7a-0000"]._replace(holder=Holder("name", 0, name="job-17", ttl_s=60.0))
    )
    (former,) = ledger.former_leases(HALVES).values()
    rest = ", ".join(f"lease {slot}c1f0e7a of {user_name(1000)} (PID 4260)" for slot in (1, 2))
    assert str(former) == f"lease job-17 of root, {rest} and 1 more"
