"""What holds for every division of every GPU, however it is written."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.core.enums import PRIORITIES
from yunion_mps.core.models import Driver, Gpu, Inventory, Plan, Pool
from yunion_mps.core.reasons import GPU_LOST, NO_REASON, Reason
from yunion_mps.core.settings import Config, DeviceEntry, SliceEntry, Source
from yunion_mps.planning.division import free_units, max_clients, pool_device, units_for
from yunion_mps.planning.environment import client_environment, limit_mib
from yunion_mps.planning.plan import make_plan, mode_changes

from unit.builders import DEVICES, MACHINE_ID, config, find_gpu, gpu, planned

percentages = st.one_of(st.none(), st.integers(1, 1000).map(lambda tenths: tenths / 10))
overcommits = st.one_of(st.none(), st.integers(100, 1000).map(lambda hundredths: hundredths / 100))


class Case(NamedTuple):
    """A configuration, right or wrong, and a host for it."""

    settings: Config
    found: Inventory


@st.composite
def gpus(draw: st.DrawFn) -> tuple[Gpu, ...]:
    """Up to six GPUs of all ages, at different addresses, some of them broken or in another state."""
    places = st.tuples(st.sampled_from([0, 1, 0x10000]), st.integers(0, 255), st.integers(0, 31))
    return tuple(
        gpu(
            slot,
            pci_address=f"{domain:04x}:{bus:02x}:{device:02x}.0",
            memory_mib=draw(st.one_of(st.integers(1000, 200_000), st.none())),
            compute_capability=draw(st.sampled_from([None, (3, 0), (3, 7), (6, 1), (7, 0), (9, 0), (12, 0)])),
            compute_mode=draw(st.sampled_from([None, "Default", "Prohibited", "Exclusive_Process"])),
            mig_enabled=draw(st.sampled_from([None, False, False, True])),
            render_node=draw(st.sampled_from([None, f"/dev/dri/renderD{128 + slot}"])),
            reason=draw(st.sampled_from([NO_REASON, NO_REASON, NO_REASON, Reason("GPU is lost", GPU_LOST)])),
        )
        for slot, (domain, bus, device) in enumerate(sorted(draw(st.lists(places, max_size=6, unique=True))))
    )


@st.composite
def entries(draw: st.DrawFn, one: Gpu, line: int) -> DeviceEntry:
    """Any entry for the GPU that the parser lets pass; its memory may be far too little for it."""
    path = draw(st.sampled_from([one.pci_address, str(one.uuid), one.render_node or one.address]))
    entry = DeviceEntry(path, 0, Source(DEVICES, line), Source(DEVICES, line + 2))
    way = draw(st.sampled_from(["virtual_number", "slices", "memory_unit"]))
    if way == "virtual_number":
        return entry._replace(virtual_number=draw(st.integers(1, 60)))
    entry = entry._replace(thread_overcommit=draw(overcommits))
    if way == "memory_unit":
        return entry._replace(
            memory_unit_mib=draw(st.sampled_from([128, 1024])),
            memory_reserve_mib=draw(st.one_of(st.just(0), st.integers(0, 600), st.integers(0, 200_000))),
            thread_percentage=draw(st.sampled_from([0, 0, 1, 30, 100])),
        )
    number = draw(st.integers(1, 20))
    largest = draw(st.sampled_from([1, 2]) if number > 1 else st.just(1)) * (one.memory_mib or 2048) // number
    parts = st.builds(SliceEntry, st.integers(1, max(1, largest)), percentages, st.sampled_from(PRIORITIES))
    return entry._replace(slices=tuple(draw(parts) for _ in range(number)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any host with any configuration, by entries or by `cuda_mps_replicas`."""
    found = Inventory(Driver(draw(st.sampled_from(["535.261.03", "590.44.01"])), None), draw(gpus()))
    chosen = draw(st.lists(st.sampled_from(found.gpus), unique=True)) if found.gpus else []
    settings = config(
        *[draw(entries(one, 2 + 3 * place)) for place, one in enumerate(chosen)],
        cuda_mps_scope=draw(st.sampled_from(["host", "gpu"])),
        cuda_mps_compute_mode=draw(st.sampled_from(["exclusive_process", "keep"])),
        cuda_mps_thread_percentage=draw(st.sampled_from(["equal", "double", "none"])),
        cuda_mps_replicas=draw(st.integers(1, 16)),
        cuda_mps_max_clients=draw(st.sampled_from([None, None, None, 200])),
    )
    return Case(settings, found)


@st.composite
def right_cases(draw: st.DrawFn) -> Case:
    """As `cases`, without the entries that are wrong for their GPU."""
    case = draw(cases())
    wrong = {problem.line for problem in make_plan(*case, MACHINE_ID)[1]}
    kept = tuple(entry for entry in case.settings.devices if entry.divided_at.line not in wrong)
    return Case(case.settings._replace(devices=kept), case.found)


def limits_of(plan: Plan, one: Gpu) -> list[int]:
    return [limit_mib(device) for device in plan.devices if device.gpu_uuid == one.uuid]


def entry_for(case: Case, one: Gpu) -> DeviceEntry | None:
    """The entry that divides the GPU; None if `cuda_mps_replicas` does, or nothing."""
    return next((entry for entry in case.settings.devices if find_gpu(entry.path, [one])), None)


def free_beside(pool: Pool, held: list[int]) -> int:
    taken_mib = sum(units * pool.unit_mib + pool.reserve_mib for units in held)
    return free_units(pool, taken_mib, len(held))


@st.composite
def clients(draw: st.DrawFn, pool: Pool) -> list[int]:
    """The units of clients that come to a pool one after the other, until none fits or none is drawn."""
    held: list[int] = []
    while (free := free_beside(pool, held)) and draw(st.integers(0, 20)):
        held.append(draw(st.integers(1, free)))
    return held


@given(cases())
def test_a_division_is_right_or_refused_with_file_line_and_hint(case: Case) -> None:
    lines = {entry.divided_at.line for entry in case.settings.devices}
    for problem in make_plan(*case, MACHINE_ID)[1]:
        assert (problem.file, problem.line in lines) == (DEVICES, True)
        assert "GPU " in problem.what
        assert problem.hint.startswith(("write ", "take ", "lower ", "reduce "))
        assert "\n" not in str(problem)


@given(right_cases())
def test_budgets_of_a_gpu_never_add_up_to_more_than_its_memory(case: Case) -> None:
    plan = planned(*case)
    for one in case.found.gpus:
        limits = limits_of(plan, one)
        if not limits:
            continue
        assert one.memory_mib is not None
        assert sum(limits) <= one.memory_mib
        assert min(limits) > 0
        assert len(limits) <= max_clients(one, case.found.driver, case.settings.cuda_mps_max_clients)
        entry = entry_for(case, one)
        if not entry or entry.virtual_number:
            assert one.memory_mib < sum(limits) + len(limits), "equal devices leave less than a MiB each"


@given(right_cases())
def test_equal_percentages_of_a_gpu_add_up_to_at_most_100(case: Case) -> None:
    settings = case.settings._replace(cuda_mps_thread_percentage="equal")
    equal = tuple(entry for entry in settings.devices if entry.virtual_number)
    plan = planned(settings._replace(devices=equal), case.found)
    for one in case.found.gpus:
        own = (device.thread_percentage for device in plan.devices if device.gpu_uuid == one.uuid)
        assert sum(round(percentage * 10) for percentage in own) <= 1000


@given(right_cases(), st.randoms(use_true_random=False))
def test_no_device_changes_if_gpus_or_entries_change_places(case: Case, chance: random.Random) -> None:
    entries, found = list(case.settings.devices), list(case.found.gpus)
    chance.shuffle(entries)
    other = case._replace(settings=case.settings._replace(devices=tuple(entries)))
    before = planned(*case)
    assert planned(*other) == before
    chance.shuffle(found)
    after = planned(*other._replace(found=case.found._replace(gpus=tuple(found))))
    assert sorted(after.devices) == sorted(before.devices)
    assert sorted(pool[:8] for pool in after.pools) == sorted(pool[:8] for pool in before.pools)
    assert after.compute_modes == before.compute_modes
    assert after.unavailable == before.unavailable


@given(right_cases())
def test_a_device_keeps_its_id_when_other_gpus_are_removed(case: Case) -> None:
    plan = planned(*case)
    for one in case.found.gpus:
        own = entry_for(case, one)
        if not own and case.settings.devices:
            continue
        settings = case.settings._replace(devices=(own,) if own else ())
        alone = planned(settings, case.found._replace(gpus=(one,)))
        ids = [device.id for device in plan.devices if device.gpu_uuid == one.uuid]
        assert [device.id for device in alone.devices] == ids


@given(right_cases())
def test_once_the_modes_are_changed_no_mode_has_to_change(case: Case) -> None:
    plan = planned(*case)
    after = {change.gpu_uuid: change.after for change in mode_changes(plan, case.found.gpus)}
    gpus = [one._replace(compute_mode=after.get(str(one.uuid), one.compute_mode)) for one in case.found.gpus]
    assert planned(case.settings, case.found._replace(gpus=tuple(gpus))) == plan
    assert mode_changes(plan, gpus) == ()


@given(right_cases())
def test_every_domain_has_directories_and_gpus_of_its_own(case: Case) -> None:
    plan = planned(*case)
    served = [uuid for domain in plan.domains for uuid in domain.gpu_uuids]
    divided = {one.gpu_uuid for one in plan.devices} | {pool.gpu_uuid for pool in plan.pools}
    assert sorted(served) == sorted(divided)
    assert len({domain.pipe_directory for domain in plan.domains}) == len(plan.domains)


@given(right_cases())
def test_a_configured_gpu_has_devices_a_pool_or_a_reason(case: Case) -> None:
    plan = planned(*case)
    pools = {pool.gpu_uuid for pool in plan.pools}
    for one in case.found.gpus:
        configured = entry_for(case, one) or not case.settings.devices
        ways = (bool(limits_of(plan, one)), one.uuid in pools, one.pci_address in plan.unavailable)
        assert sum(ways) == (1 if configured else 0)


@given(right_cases(), st.data())
def test_clients_of_a_pool_never_exceed_its_memory(case: Case, data: st.DataObject) -> None:
    plan = planned(*case)
    ids = [device.id for device in plan.devices]
    addresses = [device.addr for device in plan.devices]
    for pool in plan.pools:
        held = data.draw(clients(pool))
        devices = [
            pool_device(plan.host_id, pool, units, slot, case.found.gpus) for slot, units in enumerate(held)
        ]
        taken = sum(limit_mib(device) + device.reserve_mib for device in devices)
        assert taken <= pool.memory_total_mib
        if not free_beside(pool, held) and len(held) < pool.clients:
            assert pool.memory_total_mib - taken < pool.unit_mib + pool.reserve_mib
        ids += [device.id for device in devices]
        addresses += [device.addr for device in devices]
    assert len(set(ids)) == len(ids)
    assert len(set(addresses)) == len(addresses)


@given(right_cases())
def test_a_pool_loses_less_than_a_unit_of_memory(case: Case) -> None:
    for pool in planned(*case).pools:
        assert pool.memory_mib % pool.unit_mib == 0
        assert 0 < pool.memory_mib <= pool.memory_total_mib - pool.reserve_mib
        assert pool.memory_total_mib - pool.reserve_mib - pool.memory_mib < pool.unit_mib
        assert free_units(pool) == units_for(pool, pool.memory_mib)


@given(right_cases(), st.data())
def test_every_budget_is_within_the_domain_and_set_in_its_environment(
    case: Case, data: st.DataObject
) -> None:
    plan = planned(*case)
    devices = list(plan.devices)
    for pool in plan.pools:
        units = data.draw(st.integers(1, free_units(pool)))
        devices.append(pool_device(plan.host_id, pool, units, 0, case.found.gpus))
    for device in devices:
        (domain,) = [domain for domain in plan.domains if domain.name == device.domain]
        limit = domain.memory_limit_of(device.gpu_uuid)
        assert limit is not None
        assert limit_mib(device) <= limit
        assert 0.1 <= device.thread_percentage <= domain.thread_percentage <= 100
        environment = client_environment([device], domain)
        assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={device.memory_limit_mib}M"
        assert float(environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) == device.thread_percentage
        assert ("CUDA_MPS_CLIENT_PRIORITY" in environment) == (device.priority != "normal")


@given(right_cases())
def test_a_client_can_get_exactly_what_its_domain_allows(case: Case) -> None:
    plan = planned(*case)
    for domain in plan.domains:
        for one in domain.gpus:
            limits = [limit_mib(device) for device in plan.devices if device.gpu_uuid == one.uuid]
            assert one.memory_limit_mib == (one.pool.memory_mib if one.pool else max(limits))


@given(st.integers(1, 200_000), st.integers(1, 60), st.sampled_from(["equal", "double", "none"]))
def test_equal_slices_have_the_budgets_of_equal_devices(share_mib: int, number: int, policy: str) -> None:
    """If the memory can be divided without a remainder."""
    one = gpu(1, memory_mib=share_mib * number)
    driver = Driver("590.44", None)
    equal = DeviceEntry(one.pci_address, number, Source(DEVICES, 2), Source(DEVICES, 4))
    parts = equal._replace(virtual_number=0, slices=(SliceEntry(share_mib),) * number)
    plans = [
        planned(config(entry, cuda_mps_thread_percentage=policy), Inventory(driver, (one,)))
        for entry in (equal, parts)
    ]
    assert plans[0].devices == plans[1].devices
    ((first,), (second,)) = ([one[:4] for one in plan.domains[0].gpus] for plan in plans)
    assert first == second
