from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from yunion_mps.models import Config, DeviceEntry, Driver, Gpu, Inventory, Plan, Source
from yunion_mps.planning import difference, find_gpu, make_plan, max_clients

from unit.builders import MACHINE_ID, config, gpu


class Case(NamedTuple):
    """A host and a configuration for it, without a problem."""

    settings: Config
    found: Inventory


@st.composite
def gpus(draw: st.DrawFn) -> tuple[Gpu, ...]:
    """Up to eight GPUs of all ages, at different addresses, some of them broken or in another state."""
    addresses = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 1, 0x10000]), st.integers(0, 255), st.integers(0, 31)),
            max_size=8,
            unique=True,
        )
    )
    return tuple(
        gpu(
            slot,
            pci_address=f"{domain:04x}:{bus:02x}:{device:02x}.0",
            memory_mib=draw(st.one_of(st.integers(2048, 200_000), st.none())),
            compute_capability=draw(st.sampled_from([None, (3, 0), (3, 7), (6, 1), (7, 0), (9, 0), (12, 0)])),
            compute_mode=draw(st.sampled_from([None, "Default", "Prohibited", "Exclusive_Process"])),
            mig_enabled=draw(st.sampled_from([None, False, False, True])),
            render_node=draw(st.sampled_from([None, f"/dev/dri/renderD{128 + slot}"])),
            reason=draw(st.sampled_from(["", "", "", "GPU is lost"])),
        )
        for slot, (domain, bus, device) in enumerate(sorted(addresses))
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any host with any configuration that is right for it, by entries or by `cuda_mps_replicas`."""
    driver = Driver(draw(st.sampled_from(["535.261.03", "590.44.01"])), None)
    found = Inventory(driver, draw(gpus()))
    override = draw(st.sampled_from([None, None, None, 200]))
    chosen = draw(st.lists(st.sampled_from(found.gpus), unique=True)) if found.gpus else []
    entries = []
    for number, one in enumerate(chosen):
        spellings = [one.pci_address, str(one.uuid), one.render_node or one.address]
        line = 2 + 3 * number
        most = max_clients(one, driver, override)
        entries.append(
            DeviceEntry(
                draw(st.sampled_from(spellings)),
                draw(st.integers(1, most)),
                Source("devices.yml", line),
                Source("devices.yml", line + 2),
            )
        )
    settings = config(
        *entries,
        cuda_mps_scope=draw(st.sampled_from(["host", "gpu"])),
        cuda_mps_compute_mode=draw(st.sampled_from(["exclusive_process", "keep"])),
        cuda_mps_thread_percentage=draw(st.sampled_from(["equal", "double", "none"])),
        cuda_mps_replicas=draw(st.integers(1, 16)),
        cuda_mps_max_clients=override,
    )
    return Case(settings, found)


def planned(case: Case) -> Plan:
    plan, problems = make_plan(*case, MACHINE_ID)
    assert problems == []
    return plan


def devices_of(plan: Plan, one: Gpu) -> list[int]:
    return [device.memory_limit_mib for device in plan.devices if device.gpu_uuid == one.uuid]


@given(cases())
def test_the_budgets_of_a_gpu_never_add_up_to_more_than_its_memory(case: Case) -> None:
    plan = planned(case)
    for one in case.found.gpus:
        limits = devices_of(plan, one)
        if limits:
            assert one.memory_mib is not None
            assert sum(limits) <= one.memory_mib < sum(limits) + len(limits)
            assert min(limits) > 0


@given(cases())
def test_equal_percentages_of_a_gpu_never_add_up_to_more_than_100(case: Case) -> None:
    assume(case.settings.cuda_mps_thread_percentage == "equal")
    plan = planned(case)
    for one in case.found.gpus:
        tenths = [
            round(device.thread_percentage * 10) for device in plan.devices if device.gpu_uuid == one.uuid
        ]
        assert sum(tenths) <= 1000


@given(cases())
def test_every_device_has_an_id_and_an_address_of_its_own(case: Case) -> None:
    devices = planned(case).devices
    assert len({device.id for device in devices}) == len(devices)
    assert len({device.addr for device in devices}) == len(devices)


@given(cases(), st.randoms(use_true_random=False))
def test_no_device_changes_when_gpus_or_entries_change_places(case: Case, chance: random.Random) -> None:
    entries, found = list(case.settings.devices), list(case.found.gpus)
    chance.shuffle(entries)
    chance.shuffle(found)
    other = Case(case.settings._replace(devices=tuple(entries)), case.found._replace(gpus=tuple(found)))
    before, after = planned(case), planned(other)
    assert sorted(after.devices) == sorted(before.devices)
    assert after.compute_modes == before.compute_modes
    assert after.unavailable == before.unavailable


@given(cases())
def test_a_device_keeps_its_id_when_other_gpus_go(case: Case) -> None:
    plan = planned(case)
    for one in case.found.gpus:
        own = [entry for entry in case.settings.devices if find_gpu(entry.path, [one])]
        if not own and case.settings.devices:
            continue
        alone = Case(case.settings._replace(devices=tuple(own)), case.found._replace(gpus=(one,)))
        assert [device.id for device in planned(alone).devices] == [
            device.id for device in plan.devices if device.gpu_uuid == one.uuid
        ]


@given(cases(), cases())
def test_once_the_difference_is_applied_there_is_no_difference(case: Case, before: Case) -> None:
    plan, running = planned(case), planned(before).domains
    changes = difference(plan, case.found, running)
    after = {change.gpu_uuid: change.after for change in changes.compute_modes}
    applied = case.found._replace(
        gpus=tuple(
            one._replace(compute_mode=after.get(str(one.uuid), one.compute_mode)) for one in case.found.gpus
        )
    )
    domains = [domain for domain in running if domain not in changes.stop] + list(changes.start)
    assert sorted(domains) == sorted(plan.domains)
    assert planned(Case(case.settings, applied)) == plan
    assert difference(plan, applied, domains).nothing


@given(cases())
def test_every_device_has_one_domain_that_serves_its_gpu_and_allows_its_budget(case: Case) -> None:
    plan = planned(case)
    for device in plan.devices:
        (domain,) = [domain for domain in plan.domains if domain.name == device.domain]
        place = domain.gpu_uuids.index(device.gpu_uuid)
        assert domain.memory_limits_mib[place] == device.memory_limit_mib
        assert domain.thread_percentage >= device.thread_percentage
    served = [uuid for domain in plan.domains for uuid in domain.gpu_uuids]
    assert sorted(served) == sorted({device.gpu_uuid for device in plan.devices})
    assert len({domain.pipe_directory for domain in plan.domains}) == len(plan.domains)


@given(cases())
def test_a_configured_gpu_has_either_devices_or_a_reason(case: Case) -> None:
    plan = planned(case)
    for one in case.found.gpus:
        named = any(find_gpu(entry.path, case.found.gpus) == one for entry in case.settings.devices)
        configured = named or not case.settings.devices
        has = bool(devices_of(plan, one)), one.pci_address in plan.unavailable
        assert has in ([(True, False), (False, True)] if configured else [(False, False)])


@pytest.mark.parametrize("number", range(1, 61))
def test_up_to_60_equal_percentages_never_add_up_to_more_than_100(number: int) -> None:
    plan, _ = make_plan(
        config(cuda_mps_replicas=number), Inventory(Driver("590.44", None), (gpu(1),)), MACHINE_ID
    )
    assert sum(round(device.thread_percentage * 10) for device in plan.devices) <= 1000
    assert len(plan.devices) == number
