"""GPUs that are time-sliced beside GPUs that are shared through MPS, and the change from one to the other."""

from __future__ import annotations

import pytest
from yunion_mps.core.enums import MPS, NOT_SHARED, TIME_SLICING
from yunion_mps.core.mig import MigLayout
from yunion_mps.core.models import Device, DirectGpu, Plan
from yunion_mps.core.reasons import COMPUTE_MODE_EXCLUSIVE, GPU_LOST, LEASES_PENDING, Reason
from yunion_mps.core.settings import DeviceEntry
from yunion_mps.planning.environment import client_environment
from yunion_mps.planning.kept_sharing import keep_sharing, ways_of_sharing
from yunion_mps.planning.plan import make_plan
from yunion_mps.planning.without_mps import divide_directly

from unit.builders import MACHINE_ID, config, entry, gpu, inventory, planned

FIRST, SECOND = gpu(1), gpu(2)
LOST = Reason("it is lost", GPU_LOST)
FOUND = inventory(FIRST, SECOND)


def time_sliced_entry(path: str, number: int) -> DeviceEntry:
    return entry(path, number)._replace(sharing=TIME_SLICING)


def plan_of(*entries: DeviceEntry, scope: str = "host") -> Plan:
    return planned(config(*entries, cuda_mps_scope=scope), FOUND)


BOTH = plan_of(entry("01:00.0", 2), entry("02:00.0", 2))
MIXED = plan_of(entry("01:00.0", 2), time_sliced_entry("02:00.0", 3))
SLICED = plan_of(time_sliced_entry("01:00.0", 2), time_sliced_entry("02:00.0", 3))


def devices_of(plan: Plan, sharing: str) -> list[Device]:
    return [device for device in plan.devices if device.sharing == sharing]


def test_a_time_sliced_gpu_has_devices_without_domain_and_enforcement() -> None:
    devices = devices_of(MIXED, TIME_SLICING)
    assert [device.addr for device in devices] == ["02:00.0-0", "02:00.0-1", "02:00.0-2"]
    assert {device[5:9] for device in devices} == {(81559, 100.0, False, "")}
    assert {device.memory_limit_mib for device in devices} == {81559 // 3}
    assert {device.dev_type for device in devices} == {"NVIDIA_GPU_SHARE"}
    assert [domain.gpu_uuids for domain in MIXED.domains] == [(FIRST.uuid,)]
    assert MIXED.direct == (DirectGpu(str(SECOND.uuid), 27186, 3),)
    assert MIXED.compute_modes == {FIRST.uuid: "Exclusive_Process", SECOND.uuid: "Default"}


def test_a_device_has_the_same_id_in_both_ways_of_sharing() -> None:
    assert [device.id for device in SLICED.devices[:2]] == [device.id for device in BOTH.devices[:2]]


def test_an_old_gpu_can_be_time_sliced_and_more_often_than_mps_allows() -> None:
    old = gpu(1, compute_capability=(3, 0))
    plan = planned(config(time_sliced_entry("01:00.0", 200)), inventory(old))
    assert (len(plan.devices), plan.unavailable) == (200, {})


@pytest.mark.parametrize("mode", ["Exclusive_Process", "Prohibited"])
def test_with_keep_a_mode_that_admits_one_process_is_a_reason(mode: str) -> None:
    settings = config(time_sliced_entry("01:00.0", 2), cuda_mps_compute_mode="keep")
    plan = planned(settings, inventory(gpu(1, compute_mode=mode)))
    (reason,) = plan.unavailable.values()
    assert (reason.code, plan.devices, plan.compute_modes) == (COMPUTE_MODE_EXCLUSIVE, (), {})
    assert planned(settings, inventory(gpu(1))).unavailable == {}


def test_replicas_of_host_conf_apply_only_if_no_entry_is_ours() -> None:
    assert [gpu.uuid for gpu in SLICED.direct] == [FIRST.uuid, SECOND.uuid]
    only = plan_of(time_sliced_entry("02:00.0", 3))
    assert (only.domains, len(only.devices)) == ((), 3)


def test_a_lost_gpu_that_was_time_sliced_is_listed() -> None:
    lost = inventory(FIRST._replace(reason=LOST), SECOND)._replace(served=(str(FIRST.uuid),))
    plan, _ = make_plan(config(time_sliced_entry("01:00.0", 2), entry("02:00.0", 2)), lost, MACHINE_ID)
    assert (len(plan.devices), list(plan.unavailable), plan.parked) == (4, ["0000:01:00.0"], ())


def test_the_environment_has_the_budget_and_nothing_of_mps() -> None:
    devices = devices_of(MIXED, TIME_SLICING)
    assert client_environment(devices[:1], None) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": str(SECOND.uuid),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.333",
        "YUNION_MPS_DEVICE": "02:00.0-0",
        "YUNION_MPS_MEMORY_MIB": "27186",
    }
    both = client_environment([*devices[:2], *devices_of(SLICED, TIME_SLICING)[:1]], None)
    assert (both["YUNION_MPS_MEMORY_MIB"], both["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("40779", "0.499")


def test_an_unknown_amount_of_memory_is_no_advice_for_frameworks() -> None:
    (unknown, other) = devices_of(SLICED, TIME_SLICING)[:2]
    unknown = unknown._replace(memory_limit_mib=None, memory_total_mib=None)
    advice = {"YUNION_MPS_MEMORY_MIB", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    assert not advice & client_environment([unknown], None).keys()
    known = client_environment([other], None)
    both = client_environment([unknown._replace(gpu_uuid="GPU-other"), other], None)
    assert {name: both[name] for name in advice} == {name: known[name] for name in advice}


def test_a_budget_that_mps_enforces_is_not_repeated_for_frameworks() -> None:
    environment = client_environment(devices_of(MIXED, MPS)[:1], MIXED.domains[0])
    assert not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "YUNION_MPS_MEMORY_MIB"} & environment.keys()


# -- the change of a GPU that is leased


def plan_kept(plan: Plan, former: Plan, leased: dict[str, str]) -> Plan:
    return keep_sharing(plan, former, leased, FOUND.gpus)


def served_domains(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    return [(domain.name, domain.gpu_uuids) for domain in plan.domains]


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_gpu_leaves_its_control_daemon_once_its_leases_have_ended(scope: str) -> None:
    former = plan_of(entry("01:00.0", 2), entry("02:00.0", 4), scope=scope)
    target = plan_of(entry("01:00.0", 2), time_sliced_entry("02:00.0", 3), scope=scope)
    plan = plan_kept(target, former, {str(SECOND.uuid): MPS})
    assert (served_domains(plan), plan.direct) == (served_domains(former), ())
    assert plan.domains == former.domains
    assert plan.compute_modes == former.compute_modes
    assert plan.sharing == former.sharing
    assert {uuid: reason.code for uuid, reason in plan.pending.items()} == {SECOND.uuid: LEASES_PENDING}
    assert plan_kept(target, plan, {}) == target


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_gpu_gets_a_control_daemon_once_its_leases_have_ended(scope: str) -> None:
    former = plan_of(entry("01:00.0", 2), time_sliced_entry("02:00.0", 3), scope=scope)
    target = plan_of(entry("01:00.0", 2), entry("02:00.0", 4), scope=scope)
    plan = plan_kept(target, former, {str(SECOND.uuid): TIME_SLICING, str(FIRST.uuid): MPS})
    assert (plan.domains, plan.direct) == (former.domains, former.direct)
    assert plan.compute_modes == former.compute_modes
    assert ways_of_sharing(plan) == {FIRST.uuid: MPS, SECOND.uuid: TIME_SLICING}
    assert plan_kept(target, plan, {}) == target


def test_a_gpu_that_a_layout_splits_keeps_its_way_until_its_leases_end() -> None:
    layout = MigLayout(str(SECOND.uuid), enabled=True)
    target = plan_of(entry("01:00.0", 2))._replace(layouts=(layout,))
    for way, former in ((MPS, BOTH), (TIME_SLICING, MIXED)):
        plan = plan_kept(target, former, {str(SECOND.uuid): way})
        assert (plan.domains, plan.direct) == (former.domains, former.direct)
        assert plan.pending[str(SECOND.uuid)].startswith("its MIG layout waits for")
        assert plan.compute_modes == former.compute_modes
    assert plan_kept(target, BOTH, {str(SECOND.uuid): NOT_SHARED}) == target
    without_entry = plan_kept(plan_of(entry("01:00.0", 2)), BOTH, {str(SECOND.uuid): MPS})
    assert without_entry.pending[str(SECOND.uuid)].startswith("the removal of its devices waits for")


def test_a_gpu_that_waits_for_its_control_daemon_is_shared_through_mps() -> None:
    assert ways_of_sharing(Plan("host", parked=BOTH.domains)) == {FIRST.uuid: MPS, SECOND.uuid: MPS}


def test_a_whole_instance_has_its_share_of_the_sms() -> None:
    whole = entry("01:00.0", 1)._replace(sharing=NOT_SHARED)
    part = FIRST._replace(memory_mib=20096, sm_percentage=24.2)
    assert divide_directly(whole, part) == DirectGpu(str(FIRST.uuid), 20096, 1, NOT_SHARED, 24.2)


def test_kept_gpus_and_control_daemons_stay_in_the_order_of_the_gpus() -> None:
    for scope in ("host", "gpu"):
        former = plan_of(entry("01:00.0", 2), entry("02:00.0", 2), scope=scope)
        plan = plan_kept(
            plan_of(time_sliced_entry("01:00.0", 3), entry("02:00.0", 2), scope=scope),
            former,
            {str(FIRST.uuid): MPS},
        )
        assert plan.domains == former.domains


def test_a_time_sliced_gpu_is_in_no_control_daemon_that_it_will_have() -> None:
    former = plan_of(entry("01:00.0", 4), time_sliced_entry("02:00.0", 3))
    target = plan_of(entry("01:00.0", 4), entry("02:00.0", 1))
    assert target.domains[0].thread_percentage == 100.0
    for plan in (target, target._replace(domains=(), parked=target.domains)):
        changed = plan_kept(plan, former, {str(SECOND.uuid): TIME_SLICING})
        (domain,) = (*changed.domains, *changed.parked)
        assert (domain.gpu_uuids, domain.thread_percentage) == ((FIRST.uuid,), 25.0)


def test_after_a_restart_a_leased_gpu_has_no_other_devices() -> None:
    plan = plan_kept(BOTH, BOTH, {str(SECOND.uuid): TIME_SLICING})
    assert plan.direct == (DirectGpu(str(SECOND.uuid), 0, 0),)
    assert served_domains(plan) == [("host", (FIRST.uuid,))]


@pytest.mark.parametrize(("before", "after"), [(NOT_SHARED, TIME_SLICING), (TIME_SLICING, NOT_SHARED)])
def test_a_leased_mig_instance_is_divided_in_one_way_at_a_time(before: str, after: str) -> None:
    former, target = (
        Plan("host", direct=(DirectGpu(str(FIRST.uuid), 81559, 1, way),)) for way in (before, after)
    )
    plan = plan_kept(target, former, {str(FIRST.uuid): before})
    assert (plan.direct, list(plan.pending)) == (former.direct, [FIRST.uuid])
    assert plan_kept(target, plan, {}) == target


def test_a_control_daemon_of_an_earlier_run_needs_no_plan() -> None:
    assert plan_kept(SLICED, SLICED, {str(SECOND.uuid): MPS}) == SLICED


def test_leases_of_the_same_way_and_of_unused_gpus_hold_nothing() -> None:
    leased = {str(FIRST.uuid): MPS, "GPU-gone": TIME_SLICING}
    assert plan_kept(MIXED, MIXED, leased) == MIXED


def test_the_largest_device_of_a_kept_gpu_counts_for_its_control_daemon() -> None:
    former = plan_of(entry("01:00.0", 4), entry("02:00.0", 1))
    plan = plan_kept(
        plan_of(entry("01:00.0", 4), time_sliced_entry("02:00.0", 3)), former, {str(SECOND.uuid): MPS}
    )
    assert [domain.thread_percentage for domain in plan.domains] == [100.0]
