"""Unequal devices of a GPU, and memory in units."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core.errors import NotFoundError
from yunion_mps.core.models import Gpu, Pool
from yunion_mps.core.reasons import GPU_LOST, Reason
from yunion_mps.core.settings import DeviceEntry, SliceEntry, Source
from yunion_mps.planning.division import describe_division, free_units, pool_device, pools_of, units_for
from yunion_mps.planning.environment import client_environment

from unit.builders import DEVICES, P40, config, entry, gpu, inventory, messages, planned

V100 = gpu(1, name="Tesla V100", memory_mib=16384, compute_capability=(7, 0))


def slices(*parts: tuple[Any, ...], path: str = "01:00.0", **given: Any) -> DeviceEntry:
    """An entry in lines 2 to 4 with slices of (MiB, percentage, priority)."""
    return DeviceEntry(
        path, 0, Source(DEVICES, 2), Source(DEVICES, 4), tuple(SliceEntry(*part) for part in parts), **given
    )


def pool_entry(unit_mib: int = 1024, path: str = "01:00.0", **given: Any) -> DeviceEntry:
    """An entry in lines 2 to 4 that opens its GPU for any amount of memory."""
    return DeviceEntry(path, 0, Source(DEVICES, 2), Source(DEVICES, 4), memory_unit_mib=unit_mib, **given)


def pool_of(one: Gpu, given: DeviceEntry, **keys: Any) -> Pool:
    (pool,) = planned(config(given, **keys), inventory(one)).pools
    return pool


def free_beside(pool: Pool, held: list[int]) -> int:
    """What is free beside clients that hold so many units each."""
    taken_mib = sum(units * pool.unit_mib + pool.reserve_mib for units in held)
    return free_units(pool, taken_mib, len(held))


@pytest.mark.parametrize(
    ("division", "keys", "is_sliced"),
    [
        (slices((8192,), (4096,)), {}, True),
        (slices((8192,), (8192,)), {"cuda_mps_combine": 2}, True),
        (entry("01:00.0", 4), {}, False),
        (entry("01:00.0", 4), {"cuda_mps_combine": 2}, False),
    ],
)
def test_equal_shares_are_not_slices_even_if_they_may_be_combined(
    division: DeviceEntry, keys: dict[str, int], is_sliced: bool
) -> None:
    (domain,) = planned(config(division, **keys), inventory(V100)).domains
    assert [one.is_sliced for one in domain.gpus] == [is_sliced]


def test_slices_are_devices_with_budgets_of_their_own() -> None:
    plan = planned(config(slices((8192, 50.0), (4096, 25.0, "below_normal"), (2048, 25.0))), inventory(V100))
    assert [
        (device.addr, device.memory_limit_mib, device.thread_percentage, device.priority, device.slot)
        for device in plan.devices
    ] == [
        ("01:00.0-0", 8192, 50.0, "normal", 0),
        ("01:00.0-1", 4096, 25.0, "below_normal", 1),
        ("01:00.0-2", 2048, 25.0, "normal", 2),
    ]
    assert {device.memory_total_mib for device in plan.devices} == {16384}
    assert plan.pools == ()


@pytest.mark.parametrize(
    ("policy", "percentages"),
    [("equal", [50.0, 12.5, 6.2]), ("double", [100.0, 25.0, 12.5]), ("none", [100.0, 100.0, 100.0])],
)
def test_a_missing_percentage_follows_from_the_memory_and_the_policy(
    policy: str, percentages: list[float]
) -> None:
    settings = config(slices((8192,), (2048,), (1024,)), cuda_mps_thread_percentage=policy)
    devices = planned(settings, inventory(V100)).devices
    assert [device.thread_percentage for device in devices] == percentages


def test_an_overcommit_of_the_entry_replaces_the_policy() -> None:
    settings = config(slices((8192,), (2048,), thread_overcommit=1.5), cuda_mps_thread_percentage="none")
    devices = planned(settings, inventory(V100)).devices
    assert [device.thread_percentage for device in devices] == [75.0, 18.7]


def test_the_environment_has_the_lowest_priority_if_it_is_below_normal() -> None:
    plan = planned(config(slices((8192, 50.0, "normal"), (4096, 25.0, "below_normal"))), inventory(V100))
    normal, below, both = (
        client_environment(devices, plan.domains[0])
        for devices in (plan.devices[:1], plan.devices[1:], plan.devices)
    )
    assert "CUDA_MPS_CLIENT_PRIORITY" not in normal
    assert below["CUDA_MPS_CLIENT_PRIORITY"] == both["CUDA_MPS_CLIENT_PRIORITY"] == "1"
    assert both["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=12288M"


@pytest.mark.parametrize(
    ("given", "keys", "expected"),
    [
        (
            slices((8192,), (8193,)),
            {},
            [("the slices add up to 16385 MiB, more than the 16384 MiB of GPU 01:00.0 (Tesla V100):"
             " reduce them by 1 MiB")],
        ),
        (
            slices((1024, 60.0), (1024, 50.5)),
            {},
            [("the slices add up to 110.5 % of the threads of GPU 01:00.0 (Tesla V100), more than 100 %: "
"lower their thread_percentage, or overcommit the threads: thread_overcommit: 1.11")],
        ),
        (
            slices((1024, 90.0), (8192,)),
            {},
            [("the slices add up to 140 % of the threads of GPU 01:00.0 (Tesla V100), more than 100 %: "
"lower their thread_percentage, or overcommit the threads: thread_overcommit: 1.4")],
        ),
        (slices((1024, 60.0), (1024, 50.5), thread_overcommit=1.11), {}, []),
        (slices((1024, 100.0), (1024, 100.0)), {"cuda_mps_thread_percentage": "double"}, []),
        (slices(*[(1024, 100.0)] * 9), {"cuda_mps_thread_percentage": "none"}, []),
        (slices((16326,), *[(1,)] * 47), {}, []),  # with 0.1 % at least, they have more than 100 % by design
        (
            slices(*[(1,)] * 49),
            {},
            [("slices are 49, more than the 48 clients that MPS allows on GPU 01:00.0 (Tesla V100):"
             " write at most 48, or set cuda_mps_max_clients in host.conf if the driver allows more")],
        ),
        (
            pool_entry(1024, memory_reserve_mib=15361),
            {},
            [("memory_unit is 1024 MiB and memory_reserve 15361 MiB, together more than the 16384 MiB of"
             " GPU 01:00.0 (Tesla V100): write smaller ones, or divide the GPU by virtual_number")],
        ),
        (pool_entry(1024, memory_reserve_mib=15360), {}, []),
    ],
)  # fmt: skip
def test_exceeding_the_gpu_is_reported_with_the_line_and_a_hint(
    given: DeviceEntry, keys: dict[str, Any], expected: list[str]
) -> None:
    assert messages(config(given, **keys), inventory(V100)) == [
        f"{DEVICES}:4: {message}" for message in expected
    ]
    lost = V100._replace(reason=Reason("GPU is lost", GPU_LOST), memory_mib=None)
    assert messages(config(given, **keys), inventory(lost)) == []


def test_a_gpu_smaller_than_the_unit_is_named() -> None:
    assert messages(config(pool_entry()), inventory(gpu(1, memory_mib=1000))) == [
        (
            f"{DEVICES}:4: memory_unit is 1024 MiB, more than the 1000 MiB of GPU 01:00.0"
            " (NVIDIA H100 80GB HBM3): write a smaller one, or divide the GPU by virtual_number"
        )
    ]


def test_ack_s_example_is_2_gib_of_a_gpu_with_180_units_in_all() -> None:
    plan = planned(config(pool_entry(128, "00:06.0")), inventory(P40))
    (pool,) = plan.pools
    assert (plan.devices, plan.compute_modes) == ((), {P40.uuid: "Exclusive_Process"})
    assert (pool.gpu_uuid, pool.domain, pool.unit_mib, pool.memory_mib) == (P40.uuid, "host", 128, 23040)
    device = pool_device("", pool, 16, 3, (P40,))
    assert (device.addr, device.slot) == ("00:06.0-m3", 3)
    assert (device.memory_limit_mib, device.memory_total_mib) == (2048, 23040)
    assert (device.thread_percentage, device.budget_enforced, device.domain) == (8.8, False, "host")
    assert free_beside(pool, []) == 180
    assert free_beside(pool, [16] * 11) == 4
    assert free_beside(pool, [16] * 11 + [4]) == 0
    assert units_for(pool, 2048) == 16


def test_ids_of_a_pool_s_devices_are_the_same_in_every_release() -> None:
    plan = planned(config(pool_entry(128, "00:06.0")), inventory(P40))
    (pool,) = plan.pools
    assert [pool_device(plan.host_id, pool, 1 + slot, slot, (P40,)).id for slot in range(2)] == [
        "b1afb67d-2f48-53b0-a507-75618bcbea44",
        "4352fb4c-9a60-51d5-b5c3-ca01afcaf9d4",
    ]
    assert pool_device(plan.host_id, pool, 180, 1, (P40,)).id == "4352fb4c-9a60-51d5-b5c3-ca01afcaf9d4"
    equal = planned(config(entry("00:06.0", 2)), inventory(P40)).devices
    assert "b1afb67d-2f48-53b0-a507-75618bcbea44" not in {device.id for device in equal}


def test_each_client_takes_the_reserve_beside_its_units() -> None:
    pool = pool_of(V100, pool_entry(1024, memory_reserve_mib=100))
    assert pool.memory_mib == 15 * 1024
    assert free_beside(pool, []) == 15
    assert free_beside(pool, [15]) == 0
    assert free_beside(pool, [8]) == 7
    assert free_beside(pool, [1] * 10) == 4  # eleven reserves are more than another unit
    device = pool_device("", pool, 3, 0, (V100,))
    assert (device.memory_limit_mib, device.reserve_mib) == (3072, 100)


def test_devices_of_a_former_division_count_against_the_pool() -> None:
    pool = pool_of(V100, pool_entry(1024, memory_reserve_mib=100))
    assert free_units(pool, 4096, 1) == 11  # an equal device of the division before
    assert free_units(pool, 20000, 1) == 0


def test_a_pool_has_no_more_clients_than_mps_allows_on_its_gpu() -> None:
    pool = pool_of(P40, pool_entry(128, "00:06.0"))
    assert pool.clients == 16
    assert free_beside(pool, [1] * 15) == 165
    assert free_beside(pool, [1] * 16) == 0
    assert pool_of(V100, pool_entry(), cuda_mps_max_clients=50).clients == 50


@pytest.mark.parametrize(
    ("policy", "overcommit", "percentage"),
    [
        ("equal", None, 12.5),
        ("double", None, 25.0),
        ("none", None, 100.0),
        ("none", 1.0, 12.5),
        ("equal", 1.33, 16.6),
        ("equal", 8.0, 100.0),
        ("equal", 4096.0, 100.0),
    ],
)
def test_threads_of_a_pool_s_device_are_proportional_to_its_memory(
    policy: str, overcommit: float | None, percentage: float
) -> None:
    pool = pool_of(V100, pool_entry(thread_overcommit=overcommit), cuda_mps_thread_percentage=policy)
    assert pool_device("", pool, 2, 0, (V100,)).thread_percentage == percentage


def test_a_client_of_a_pool_with_a_thread_percentage_may_have_all_threads() -> None:
    given = pool_entry(memory_reserve_mib=64, thread_percentage=10)
    plan = planned(config(given), inventory(V100))
    assert [pool_device("", plan.pools[0], mib, 0, (V100,)).thread_percentage for mib in (1, 15)] == [10, 10]
    assert plan.domains[0].thread_percentage == 100
    assert (
        planned(config(given._replace(thread_percentage=0)), inventory(V100)).domains[0].thread_percentage
        < 100
    )


@pytest.mark.parametrize("wrong", [-1, 0, 17])
def test_a_device_larger_than_its_pool_is_not_created(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"{wrong} units of 1024 MiB out of a pool of 16384 MiB"):
        pool_device("", pool_of(V100, pool_entry()), wrong, 0, (V100,))


def test_a_device_of_a_missing_gpu_is_not_created() -> None:
    with pytest.raises(NotFoundError, match="is no longer present"):
        pool_device("", pool_of(V100, pool_entry()), 1, 0, (P40,))


def test_an_amount_between_two_units_takes_the_larger_one() -> None:
    pool = pool_of(V100, pool_entry())
    assert [units_for(pool, mib) for mib in (1, 1024, 1025, 2560)] == [1, 1, 2, 3]


def test_each_gpu_s_pool_is_served_by_its_own_domain_in_scope_gpu() -> None:
    other = gpu(2, memory_mib=16384)
    plan = planned(
        config(pool_entry(), pool_entry(path="02:00.0"), cuda_mps_scope="gpu"), inventory(V100, other)
    )
    assert [(pool.gpu_uuid, pool.domain) for pool in plan.pools] == [
        (V100.uuid, "01:00.0"),
        (other.uuid, "02:00.0"),
    ]
    assert [pools_of(domain, (V100,)) for domain in plan.domains] == [[plan.pools[0]], []]


@pytest.mark.parametrize(
    ("given", "keys", "words"),
    [
        (entry("01:00.0", 4), {}, "4 x 4096 MiB, 25 %"),
        (
            slices((8192, 50.0), (2048, 12.5), (2048, 12.5), (1024, 5.0, "below_normal")),
            {},
            "1 x 8192 MiB, 50 % + 2 x 2048 MiB, 12.5 % + 1 x 1024 MiB, 5 %, below normal",
        ),
        (pool_entry(128), {}, "128 units of 128 MiB"),
        (
            pool_entry(128, memory_reserve_mib=64, thread_overcommit=1.5),
            {},
            "127 units of 128 MiB, 64 MiB reserved for each client, threads overcommitted 1.5x",
        ),
        (pool_entry(), {"cuda_mps_thread_percentage": "none"}, "16 units of 1024 MiB, unlimited threads"),
        (
            pool_entry(thread_percentage=10, thread_overcommit=2.0),
            {},
            "16 units of 1024 MiB, 10 % of the threads for each client, threads overcommitted 2x",
        ),
        (
            pool_entry(thread_percentage=10),
            {"cuda_mps_thread_percentage": "none"},
            "16 units of 1024 MiB, 10 % of the threads for each client",
        ),
    ],
)
def test_a_division_in_words(given: DeviceEntry, keys: dict[str, Any], words: str) -> None:
    plan = planned(config(given, **keys), inventory(V100, P40))
    assert (describe_division(plan, V100.uuid), describe_division(plan, P40.uuid)) == (words, "")
