"""What counts against which budget: devices, leases and processes matched."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.observe.holdings import (
    Holding,
    clients_of_lease,
    distribute,
    holdings,
    lease_states,
    memory_by_gpu,
)

from unit.cli.busy_host import OUTSIDE_MPS, TWO_DEVICES
from unit.http.fake_services import CLIENT, ENDED_CLIENT, LEASE, clients, lease_of


def device(address: str, memory_mib: int = 5760, state: str = "free") -> Any:
    shown = {"addr": address, "memory_mib": memory_mib, "thread_percentage": 25, "state": state}
    return {**shown, "lease": None, "free_for": None, "not_free_for": []}


DEVICES = [device(f"00:06.0-{slot}") for slot in range(4)]


def changed(answer: Any, **fields: Any) -> Any:
    return {**answer, **fields}


def used(found: list[Holding]) -> dict[str, int]:
    """What is used of each holding that is in use, in MiB, by the names of its devices or its GPU."""
    return {one.named or one.gpu: one.used_mib for one in found if one.in_use}


def test_a_process_counts_against_the_lease_of_its_device() -> None:
    found = holdings(DEVICES, [LEASE], [CLIENT])
    assert used(found) == {"00:06.0-1": 512}
    assert [one.named for one in found] == [f"00:06.0-{slot}" for slot in range(4)]


def test_a_process_without_a_device_counts_against_the_lease_of_its_pid() -> None:
    assert used(holdings(DEVICES, [LEASE], [changed(CLIENT, device=None)])) == {"00:06.0-1": 512}


def test_two_processes_of_a_device_are_over_budget_together() -> None:
    half = changed(CLIENT, memory_by_gpu_mib=[3000])
    found = holdings(DEVICES, [LEASE], [half, changed(half, pid=4261)])
    assert [one.over_mib for one in found] == [0, 240, 0, 0]


def test_several_devices_of_a_lease_are_one_budget() -> None:
    client = changed(CLIENT, device="00:06.0-2,00:06.0-3", memory_by_gpu_mib=[7000])
    found = holdings(DEVICES, [TWO_DEVICES], [client])
    assert used(found) == {"00:06.0-2,00:06.0-3": 7000}
    (held,) = (one for one in found if one.lease)
    assert (held.budget_mib, held.over_mib) == (11520, 0)
    parts = distribute(held.devices, held.used_mib, {"00:06.0-2": 5760, "00:06.0-3": 5760})
    assert list(parts) == [("00:06.0-2", 5760), ("00:06.0-3", 1240)]


def test_a_lease_over_two_gpus_has_a_budget_on_each() -> None:
    lease = changed(LEASE, **lease_of({"00:06.0-1": 5760, "00:07.0-0": 1000}))
    client = changed(CLIENT, device="00:06.0-1,00:07.0-0")
    client |= {"gpus": ["00:06.0", "00:07.0"], "memory_by_gpu_mib": [10, 1001]}
    found = holdings([*DEVICES, device("00:07.0-0", 1000)], [lease], [client])
    assert used(found) == {"00:06.0-1": 10, "00:07.0-0": 1001}
    assert {one.named: one.over_mib for one in found if one.over_mib} == {"00:07.0-0": 1}
    assert memory_by_gpu([client]) == {"00:06.0": 10, "00:07.0": 1001}


def test_a_process_counts_against_its_lease_although_the_card_was_moved() -> None:
    """Its environment names the slot from before, where another card is now."""
    moved = changed(LEASE, **lease_of({"00:07.0-1": 5760}))
    client = changed(CLIENT, lease=LEASE["id"], gpus=["00:07.0"])
    assert used(holdings([*DEVICES, device("00:07.0-1")], [moved], [client])) == {"00:07.0-1": 512}


def test_the_leases_of_a_replaced_card_and_of_the_new_one_are_told_apart() -> None:
    """Both cards have had this address, and both devices are leased."""
    other = changed(LEASE, id="another", pid=7)
    rows = [changed(device("00:06.0-1"), lease=one["id"]) for one in (LEASE, other)]
    found = holdings(rows, [LEASE, other], [])
    assert lease_states(found) == {LEASE["id"]: "idle", "another": "idle"}


def test_processes_outside_mps_count_against_no_device() -> None:
    found = holdings(DEVICES, [LEASE], [changed(OUTSIDE_MPS, device="00:06.0-1"), CLIENT])
    assert used(found) == {"00:06.0-1": 512, "00:06.0": 300}
    assert [one.outside_mps for one in found] == [False, False, False, False, True]


def test_a_process_without_memory_yet_is_shown_at_its_device() -> None:
    found = holdings(DEVICES, [], [changed(CLIENT, gpus=[], memory_by_gpu_mib=[])])
    assert used(found) == {"00:06.0-1": 0}


def test_memory_is_unknown_on_a_gpu_that_reports_no_processes() -> None:
    lost = [device(f"00:06.0-{slot}", state="unavailable") for slot in range(4)]
    _, held, *_ = holdings(lost, [LEASE], [])
    assert ([one.memory_mib for one in held.holders], held.known_mib) == ([None], None)
    _, idle, *_ = holdings(DEVICES, [LEASE], [])
    assert ([one.memory_mib for one in idle.holders], idle.known_mib) == ([0], 0)


def test_a_process_that_has_ended_uses_nothing() -> None:
    assert used(holdings(DEVICES, [], [ENDED_CLIENT])) == {}


def test_a_lease_of_an_unlisted_device_is_included() -> None:
    assert used(holdings([], [LEASE], [CLIENT])) == {"00:06.0-1": 512}


def test_a_holding_is_as_busy_as_its_processes_together_up_to_100_percent() -> None:
    found = holdings(
        DEVICES,
        [LEASE],
        [changed(CLIENT, sm_utilization_by_gpu=[70]), changed(CLIENT, pid=1, sm_utilization_by_gpu=[40])],
    )
    assert [one.sm for one in found] == [None, 100, None, None]
    unknown = holdings(DEVICES, [LEASE], [changed(CLIENT, sm_utilization_by_gpu=[None])])
    assert unknown[1].sm is None


def test_the_peak_of_a_lease_is_that_of_its_devices_on_the_gpu() -> None:
    memory_mib = {"00:06.0-1": 5760, "00:06.0-2": 5760, "00:07.0-0": 1000}
    lease = changed(LEASE, **lease_of(memory_mib, [(5760, None), (40, None), (None, None)]))
    found = holdings([*DEVICES, device("00:07.0-0", 1000)], [lease], [])
    assert {one.gpu: one.peak_mib for one in found if one.lease} == {"00:06.0": 5800, "00:07.0": None}
    assert {one.peak_mib for one in found if not one.lease} == {None}


@pytest.mark.parametrize(
    ("fields", "is_ours"),
    [
        ({"lease": LEASE["id"], "device": None}, True),
        ({"lease": None, "pid": LEASE["pid"]}, True),
        ({"lease": None}, False),
        ({"lease": None, "container_id": "c" * 64}, False),
        ({"lease": "another", "container_id": "c" * 64}, False),
    ],
    ids=["lease", "holder", "device only", "id of the container", "another lease"],
)
def test_only_processes_that_belong_to_a_lease_are_its_clients(fields: Any, is_ours: bool) -> None:
    """A process that only names the device may be a neighbour: the lease's end is not its end."""
    lease = changed(LEASE, container_id="c" * 64)
    client = changed(CLIENT, **{"pid": 4261, "device": "00:06.0-1", **fields})
    assert clients_of_lease(lease, clients(client)) == ([client] if is_ours else [])


@pytest.mark.parametrize(
    ("fields", "restriction"),
    [
        ({}, ""),
        ({"free_for": "alice"}, "for alice only"),
        ({"free_for": ""}, "for no user now"),
        ({"not_free_for": ["bob", "eve"]}, "not for bob, eve"),
    ],
)
def test_a_holding_says_which_users_can_lease_it(fields: dict[str, Any], restriction: str) -> None:
    (holding,) = holdings([changed(DEVICES[0], **fields)], [], [])
    assert holding.restriction == restriction
