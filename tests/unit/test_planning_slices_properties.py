"""What holds of every division of every GPU, however it is written."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.models import (
    PRIORITIES,
    Config,
    DeviceEntry,
    Driver,
    Gpu,
    Inventory,
    Plan,
    Pool,
    SliceEntry,
    Source,
)
from yunion_mps.planning import client_environment, free_units, make_plan, max_clients, pool_device, units_for

from unit.builders import DEVICES, MACHINE_ID, config, gpu

percentages = st.one_of(st.none(), st.integers(1, 1000).map(lambda tenths: tenths / 10))
overcommits = st.one_of(st.none(), st.integers(100, 1000).map(lambda hundredths: hundredths / 100))


class Case(NamedTuple):
    """A host and a configuration of it, right or wrong."""

    settings: Config
    found: Inventory


@st.composite
def entries(draw: st.DrawFn, one: Gpu, line: int) -> DeviceEntry:
    """Any entry for the GPU that the parser lets pass; its memory may be far too little for it."""
    entry = DeviceEntry(one.pci_address, 0, Source(DEVICES, line), Source(DEVICES, line + 2))
    way = draw(st.sampled_from(["virtual_number", "slices", "memory_unit"]))
    if way == "virtual_number":
        return entry._replace(virtual_number=draw(st.integers(1, 60)))
    entry = entry._replace(thread_overcommit=draw(overcommits))
    if way == "memory_unit":
        return entry._replace(
            memory_unit_mib=draw(st.sampled_from([128, 1024])),
            memory_reserve_mib=draw(st.one_of(st.just(0), st.integers(0, 600), st.integers(0, 200_000))),
        )
    number = draw(st.integers(1, 20))
    largest = draw(st.sampled_from([1, 2]) if number > 1 else st.just(1)) * (one.memory_mib or 2048) // number
    parts = st.builds(SliceEntry, st.integers(1, max(1, largest)), percentages, st.sampled_from(PRIORITIES))
    return entry._replace(slices=tuple(draw(parts) for _ in range(number)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to four GPUs, divided in any way."""
    gpus = tuple(
        gpu(
            slot,
            memory_mib=draw(st.integers(1000, 200_000)),
            compute_capability=draw(st.sampled_from([None, (6, 1), (7, 0), (9, 0)])),
            reason=draw(st.sampled_from(["", "", "", "GPU is lost"])),
        )
        for slot in range(1, draw(st.integers(1, 4)) + 1)
    )
    settings = config(
        *[draw(entries(one, 2 + 3 * place)) for place, one in enumerate(gpus)],
        cuda_mps_scope=draw(st.sampled_from(["host", "gpu"])),
        cuda_mps_thread_percentage=draw(st.sampled_from(["equal", "double", "none"])),
    )
    return Case(settings, Inventory(Driver("535.261.03", None), gpus))


@st.composite
def right_cases(draw: st.DrawFn) -> Case:
    """As `cases`, without the entries that are wrong for their GPU."""
    case = draw(cases())
    wrong = {problem.line for problem in make_plan(*case, MACHINE_ID)[1]}
    kept = tuple(entry for entry in case.settings.devices if entry.divided_at.line not in wrong)
    return Case(case.settings._replace(devices=kept), case.found) if kept else draw(right_cases())


def planned(case: Case) -> Plan:
    plan, problems = make_plan(*case, MACHINE_ID)
    assert problems == []
    return plan


def free_beside(pool: Pool, held: list[int]) -> int:
    taken_mib = sum(units * pool.unit_mib + pool.reserve_mib for units in held)
    return free_units(pool, taken_mib, len(held))


@st.composite
def clients(draw: st.DrawFn, pool: Pool) -> list[int]:
    """The units of clients that come to a pool one after the other, until nobody fits or wants any more."""
    held: list[int] = []
    while (free := free_beside(pool, held)) and draw(st.integers(0, 20)):
        held.append(draw(st.integers(1, free)))
    return held


@given(cases())
def test_a_division_is_either_right_or_told_with_file_line_and_remedy(case: Case) -> None:
    lines = {entry.divided_at.line for entry in case.settings.devices}
    for problem in make_plan(*case, MACHINE_ID)[1]:
        assert (problem.file, problem.line in lines) == (DEVICES, True)
        assert "GPU 0" in problem.what
        assert problem.remedy.startswith(("write ", "take ", "lower "))
        assert "\n" not in str(problem)


@given(right_cases())
def test_the_devices_of_a_gpu_never_add_up_to_more_than_its_memory(case: Case) -> None:
    plan = planned(case)
    for one in case.found.gpus:
        limits = [device.memory_limit_mib for device in plan.devices if device.gpu_uuid == one.uuid]
        assert sum(limits) <= (one.memory_mib or 0)
        assert all(limit > 0 for limit in limits)
        assert len(limits) <= max_clients(one, case.found.driver, None)


@given(right_cases(), st.data())
def test_what_clients_get_out_of_a_pool_never_adds_up_to_more_than_its_gpu_s_memory(
    case: Case, data: st.DataObject
) -> None:
    plan = planned(case)
    for pool in plan.pools:
        held = data.draw(clients(pool))
        devices = [
            pool_device(plan.host_id, pool, units, slot, case.found.gpus) for slot, units in enumerate(held)
        ]
        taken = sum(device.memory_limit_mib + device.reserve_mib for device in devices)
        assert taken <= pool.memory_total_mib
        if not free_beside(pool, held) and len(held) < pool.clients:
            assert pool.memory_total_mib - taken < pool.unit_mib + pool.reserve_mib
        ids = [device.id for device in (*plan.devices, *devices)]
        assert len(set(ids)) == len(ids)


@given(right_cases())
def test_no_memory_of_a_pool_is_lost_but_what_is_less_than_a_unit(case: Case) -> None:
    for pool in planned(case).pools:
        assert pool.memory_mib % pool.unit_mib == 0
        assert 0 < pool.memory_mib <= pool.memory_total_mib - pool.reserve_mib
        assert pool.memory_total_mib - pool.reserve_mib - pool.memory_mib < pool.unit_mib
        assert free_units(pool) == units_for(pool, pool.memory_mib)


@given(right_cases(), st.data())
def test_every_client_s_budget_is_allowed_by_its_domain_and_carried_by_its_environment(
    case: Case, data: st.DataObject
) -> None:
    plan = planned(case)
    devices = list(plan.devices)
    for pool in plan.pools:
        units = data.draw(st.integers(1, free_units(pool)))
        devices.append(pool_device(plan.host_id, pool, units, 0, case.found.gpus))
    for device in devices:
        (domain,) = [domain for domain in plan.domains if domain.name == device.domain]
        limit = domain.memory_limits_mib[domain.gpu_uuids.index(device.gpu_uuid)]
        assert limit is not None
        assert device.memory_limit_mib <= limit
        assert 0.1 <= device.thread_percentage <= domain.thread_percentage <= 100
        environment = client_environment([device], domain)
        assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={device.memory_limit_mib}M"
        assert float(environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == device.thread_percentage
        assert ("CUDA_MPS_CLIENT_PRIORITY" in environment) == (device.priority != "normal")


@given(right_cases())
def test_some_client_may_get_just_what_its_domain_allows(case: Case) -> None:
    plan = planned(case)
    for domain in plan.domains:
        for one in domain.gpus:
            limits = [device.memory_limit_mib for device in plan.devices if device.gpu_uuid == one.uuid]
            assert one.memory_limit_mib == (one.pool.memory_mib if one.pool else max(limits))


@given(right_cases())
def test_the_same_files_and_gpus_make_the_same_plan(case: Case) -> None:
    assert planned(case) == planned(case)


@given(right_cases(), st.randoms(use_true_random=False))
def test_no_device_or_pool_changes_when_entries_change_places(case: Case, chance: random.Random) -> None:
    entries = list(case.settings.devices)
    chance.shuffle(entries)
    other = case._replace(settings=case.settings._replace(devices=tuple(entries)))
    assert planned(other) == planned(case)


@given(st.integers(1, 200_000), st.integers(1, 60), st.sampled_from(["equal", "double", "none"]))
def test_equal_slices_have_what_equal_devices_have_where_the_memory_is_divided_without_rest(
    share_mib: int, number: int, policy: str
) -> None:
    one = gpu(1, memory_mib=share_mib * number)
    driver = Driver("590.44", None)
    equal = DeviceEntry(one.pci_address, number, Source(DEVICES, 2), Source(DEVICES, 4))
    parts = equal._replace(virtual_number=0, slices=(SliceEntry(share_mib),) * number)
    plans = [
        planned(Case(config(entry, cuda_mps_thread_percentage=policy), Inventory(driver, (one,))))
        for entry in (equal, parts)
    ]
    assert plans[0].devices == plans[1].devices
    ((first,), (second,)) = ([one[:4] for one in plan.domains[0].gpus] for plan in plans)
    assert first == second
