"""Whose memory counts for which device."""

from __future__ import annotations

from yunion_mps.service.usage import Budget, DeviceUse, use_by_device

A, B = "GPU-a", "GPU-b"
BUDGETS = {
    "00:06.0-0": Budget(A, 100),
    "00:06.0-1": Budget(A, 50),
    "00:06.0-2": Budget(A, 100),
    "00:07.0-0": Budget(B, 200),
}


def test_memory_counts_for_the_devices_of_the_gpu_that_it_is_on() -> None:
    memory: dict[str, dict[int, int | None]] = {A: {1: 70, 2: None, 3: 7}, B: {1: 30, 9: 1000}}
    devices = {1: ("00:07.0-0", "00:06.0-0"), 2: ("00:06.0-2",)}
    assert use_by_device(memory, devices, BUDGETS) == {
        "00:06.0-0": DeviceUse(70, 1),
        "00:06.0-2": DeviceUse(0, 1),
        "00:07.0-0": DeviceUse(30, 1),
    }


def test_several_devices_are_filled_in_their_order_and_the_last_takes_what_is_over() -> None:
    three = ("00:06.0-1", "00:06.0-0", "00:06.0-2")
    for mib, parts in ((20, (20, 0, 0)), (60, (50, 10, 0)), (400, (50, 100, 250))):
        used = use_by_device({A: {1: mib}}, {1: three}, BUDGETS)
        assert used == {name: DeviceUse(part, 1) for name, part in zip(three, parts)}


def test_processes_with_the_same_devices_fill_them_together() -> None:
    two = ("00:06.0-0", "00:06.0-1")
    used = use_by_device({A: {1: 80, 2: 60, 3: 5}}, {1: two, 2: two, 3: two[1:]}, BUDGETS)
    assert used == {"00:06.0-0": DeviceUse(100, 2), "00:06.0-1": DeviceUse(45, 3)}


def test_a_device_that_is_not_there_is_passed_over_and_the_others_have_it_all() -> None:
    used = use_by_device({A: {1: 400}}, {1: ("00:06.0-9", "00:06.0-0")}, BUDGETS)
    assert used == {"00:06.0-0": DeviceUse(400, 1)}
