"""The record of leases: one owner of each device, no request served twice, and previous divisions."""

from __future__ import annotations

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import Device, Holder, Lease
from yunion_mps.core.reasons import LEASE_EXISTS
from yunion_mps.host.proc import user_name
from yunion_mps.leases.ledger import Ledger, needs_mib
from yunion_mps.leases.request import LeaseRequest, QueuedRequest

from unit.leases.lease_builders import GPU_MIB, HOLDER, device, lease, pool

HALVES, QUARTERS = (
    [device(0, slot, number)._replace(id=f"id-{slot}") for slot in range(number)] for number in (2, 4)
)


def waiting(devices: list[Device], *leased: Device) -> dict[str, tuple[int, int]]:
    """Of how many devices each GPU has, how many are pending: first these, then all."""
    ledger = Ledger([lease(f"lease-{place}", one) for place, one in enumerate(leased)])
    return {uuid: (len(wait.pending), wait.total) for uuid, wait in ledger.lease_waits(devices).items()}


def test_devices_that_conflict_with_former_leases_are_pending() -> None:
    assert waiting(QUARTERS, *QUARTERS) == {}, "of the same division"
    assert waiting(HALVES, *QUARTERS) == {"GPU-0": (4, 4)}
    assert waiting(HALVES, QUARTERS[3]) == {"GPU-0": (2, 3)}
    assert waiting(QUARTERS, HALVES[0]) == {"GPU-0": (2, 4)}
    assert waiting(QUARTERS, *HALVES) == {"GPU-0": (4, 4)}
    assert waiting(QUARTERS, pool(0).make(6, 0)) == {"GPU-0": (3, 5)}


def test_another_percentage_is_another_division_of_that_gpu_alone() -> None:
    fewer = QUARTERS[1]._replace(thread_percentage=12.5)
    other = [one._replace(gpu_uuid="GPU-1", id=f"other-{one.id}") for one in QUARTERS]
    assert waiting([*QUARTERS, *other], fewer, other[0]) == {"GPU-0": (1, 4)}


def test_leases_are_named_by_name_or_id_with_their_holder() -> None:
    ledger = Ledger([lease(f"{slot}c1f0e7a-0000", one) for slot, one in enumerate(QUARTERS)])
    ledger.replace(
        ledger.leases["0c1f0e7a-0000"]._replace(holder=Holder("name", 0, name="job-17", ttl_s=60.0))
    )
    (wait,) = ledger.lease_waits(HALVES).values()
    rest = ", ".join(f"lease {slot}c1f0e7a of {user_name(1000)} (PID 4260)" for slot in (1, 2))
    assert str(wait.users) == f"lease job-17 of root, {rest} and 1 more"


def test_a_lease_follows_an_instance_that_was_created_again() -> None:
    old = device(0, 0)._replace(id="place", addr="00:00.0-g3-0", gpu_uuid="MIG-old", domain="00:00.0-g3")
    environment = {
        "CUDA_VISIBLE_DEVICES": "MIG-old",
        "CUDA_MPS_PIPE_DIRECTORY": "/pipe/MIG-old",
        "YUNION_MPS_DEVICE": old.addr,
    }
    new = old._replace(gpu_uuid="MIG-new", addr="00:00.0-g5-0", domain="00:00.0-g5", memory_limit_mib=1)
    ledger = Ledger([lease("a", old)._replace(environment=environment)])
    assert ledger.moved([new._replace(sharing="time-slicing")]) == [], "it is of another kind now"
    assert ledger.moved([old]) == ledger.moved([]) == []
    (found,) = ledger.moved([new])
    assert found.devices == (new._replace(memory_limit_mib=old.memory_limit_mib),), "its budget remains"
    assert found.environment == {
        "CUDA_VISIBLE_DEVICES": "MIG-new",
        "CUDA_MPS_PIPE_DIRECTORY": "/pipe/MIG-new",
        "YUNION_MPS_DEVICE": new.addr,
    }
    ledger.replace(found)
    other = new._replace(id="other", memory_limit_mib=GPU_MIB - needs_mib(old) + 1)
    assert ledger.free_by_gpu([other]) == {}, "the rest of the new one is smaller"
    assert ledger.free_by_gpu([other._replace(gpu_uuid="MIG-old")]), "nothing is leased of the old one"
    assert ledger.moved([new]) == []


def test_a_lease_follows_its_card_to_another_slot() -> None:
    old = device(0, 0)._replace(domain="00:00.0")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": "/pipe/GPU-0", "YUNION_MPS_DEVICE": old.addr}
    new = old._replace(addr="07:00.0-0", domain="07:00.0")
    ledger = Ledger([lease("a", old)._replace(environment=environment)])
    (found,) = ledger.moved([new])
    assert found.devices == (new,)
    assert found.environment == {**environment, "YUNION_MPS_DEVICE": new.addr}


def test_a_device_has_one_owner() -> None:
    ledger = Ledger([lease("a", device(0, 0))])
    with pytest.raises(AssertionError, match=r"00:00\.0-0 is already leased: lease a"):
        ledger.add(lease("b", device(0, 1), device(0, 0)))
    assert (ledger.lease_of, list(ledger.leases)) == ({"id-0-4-0": "a"}, ["a"]), "and nothing was entered"


def test_nothing_else_is_leased_of_a_gpu_beside_an_unknown_budget() -> None:
    """The lease's row cannot be read: as much as the whole GPU may be its."""
    unknown = device(0, 0)._replace(id="a", memory_limit_mib=None, memory_total_mib=None)
    ledger = Ledger([lease("a", unknown)])
    assert ledger.free_by_gpu([*QUARTERS, device(1, 0)]) == {"GPU-1": [device(1, 0)]}
    assert ledger.free_singly(QUARTERS) == []
    assert ledger.free_mib(pool(0).pool) == 0
    ledger.remove("a")
    assert ledger.free_by_gpu(QUARTERS) == {"GPU-0": QUARTERS}


def test_nothing_is_leased_beside_a_lease_of_unknown_devices() -> None:
    ledger = Ledger([lease("a", device(0, 0))])
    ledger.set_unreadable({"b": ["GPU-1"]})
    assert ledger.unknown == {"b"}
    with pytest.raises(HostError, match="it is not known which devices these leases have: b") as caught:
        ledger.refuse_if_any_is_unknown()
    assert caught.value.hint.startswith("as root, once its job has ended: yunion-mps lease release b")
    ledger.forget_unknown("b")
    ledger.refuse_if_any_is_unknown()


def test_every_change_is_a_new_version() -> None:
    ledger = Ledger()
    ledger.add(lease("a", device(0, 0)))
    assert ledger.version == 1
    ledger.remove("a")
    assert (ledger.version, ledger.lease_of, ledger.leases) == (2, {}, {})


NIGHT = Holder("name", 1000, name="night")
LEASES = [
    lease("a", device(0, 0))._replace(idempotency_key="a-request-of-1000", request="[]"),
    lease("b", device(0, 1))._replace(holder=NIGHT, request="[]"),
    lease("c", device(0, 2)),
]


def test_the_same_request_of_the_same_holder_has_its_lease() -> None:
    def find_repeated(holder: Holder, key: str, sent: str = "[]") -> Lease | None:
        return Ledger(LEASES).find_repeated(QueuedRequest(LeaseRequest(), holder, key, sent=sent))

    assert find_repeated(HOLDER, "a-request-of-1000") is LEASES[0]
    assert find_repeated(HOLDER, "a-request-of-1000", "[2]") is None
    assert find_repeated(HOLDER._replace(pid=1), "a-request-of-1000") is None
    assert find_repeated(HOLDER, "another-request") is None
    assert find_repeated(HOLDER, "") is None, "without a key, a process has another lease"
    assert find_repeated(NIGHT, "") is LEASES[1], "a name has one lease"
    assert find_repeated(NIGHT, "", "[2]") is None


@pytest.mark.parametrize(
    ("holder", "key", "message"),
    [
        (NIGHT, "", "night: a lease with this name already exists, from a different request: b"),
        (
            HOLDER._replace(pid=1),
            "a-request-of-1000",
            "this idempotency key already belongs to a lease from a different request: a",
        ),
    ],
)
def test_a_second_lease_for_a_name_or_a_request_is_refused(holder: Holder, key: str, message: str) -> None:
    with pytest.raises(HostError) as caught:
        Ledger(LEASES).refuse_duplicate(holder, key)
    assert (caught.value.message, caught.value.code) == (message, LEASE_EXISTS)


@pytest.mark.parametrize(
    ("holder", "key"),
    [
        (NIGHT._replace(uid=1001), "a-request-of-1000"),
        (NIGHT._replace(unit="yunion-mps-job@train.service"), "a-request-of-1000"),
        (NIGHT._replace(name="day"), ""),
        (HOLDER, "another-request"),
        (HOLDER, ""),
    ],
)
def test_names_and_keys_of_another_owner_do_not_conflict(holder: Holder, key: str) -> None:
    Ledger(LEASES).refuse_duplicate(holder, key)


def test_a_cleared_ledger_is_empty_and_those_who_listen_are_told() -> None:
    ledger, told = Ledger([lease("a", unknown(0, 0))]), list[int]()
    ledger.set_unreadable({"b": ["GPU-1"]})
    ledger.listen(lambda: told.append(ledger.version))
    before = ledger.version
    ledger.clear()
    assert (ledger.leases, ledger.holds(), ledger.unknown) == ({}, [], set())
    assert ledger.free_by_gpu([unknown(0, 0)]) == {"GPU-0": [unknown(0, 0)]}
    assert told == [before + 1]


def unknown(gpu: int, slot: int) -> Device:
    """A device of a time-sliced GPU whose memory the driver does not report."""
    shared = device(gpu, slot)._replace(domain="", sharing="time-slicing", budget_enforced=False)
    return shared._replace(memory_limit_mib=None, memory_total_mib=None)


def test_devices_of_unknown_memory_are_free_until_each_is_leased() -> None:
    devices = [unknown(0, slot) for slot in range(3)]
    ledger = Ledger([lease("a", devices[0])])
    assert ledger.free_by_gpu(devices) == {"GPU-0": devices[1:]}
    assert ledger.free_singly(devices) == devices[1:]
    assert ledger.lease_waits(devices) == {}


def test_the_used_share_of_unknown_memory_is_that_of_the_devices() -> None:
    devices = [unknown(gpu, slot) for gpu in range(2) for slot in range(4)]
    ledger = Ledger([lease("a", devices[0])])
    assert ledger.used_shares([*devices, device(2, 0)]) == {"00:00.0": 0.25, "01:00.0": 0.0, "02:00.0": 0.0}
