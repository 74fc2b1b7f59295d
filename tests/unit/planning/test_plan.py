from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal
from uuid import UUID

import pytest
from yunion_mps.models import DomainPlan, Plan, PlannedGpu
from yunion_mps.planning.division import client_environment, decimal, thread_percentage
from yunion_mps.planning.plan import make_plan, mode_changes

from unit.builders import MACHINE_ID, P40, config, entry, gpu, inventory, planned


def test_the_reference_case_is_four_devices_of_5760_mib_and_25_percent() -> None:
    plan = planned(config(entry("/dev/dri/renderD128", 4)), inventory(P40))
    assert [device.addr for device in plan.devices] == ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]
    assert {device[2:3] + device[4:] for device in plan.devices} == {
        (P40.uuid, 5760, 23040, 25.0, False, "host", "normal", 0)
    }
    assert [device.slot for device in plan.devices] == [0, 1, 2, 3]
    assert plan.domains == (
        DomainPlan(
            "host",
            "/tmp/nvidia-mps/pipe",
            "/tmp/nvidia-mps/log",
            (PlannedGpu(str(P40.uuid), 5760, 4, 25.0),),
            25.0,
        ),
    )
    assert plan.compute_modes == {P40.uuid: "Exclusive_Process"}
    assert plan.unavailable == {}


def test_nothing_is_planned_if_mps_is_not_enabled() -> None:
    plan, problems = make_plan(
        config(entry("/dev/no/gpu", 4), enable_cuda_mps=False), inventory(P40), MACHINE_ID
    )
    assert (plan, problems) == (Plan("24854d54-6fb6-5ac9-9cb0-857b92bf9c53"), [])


def test_ids_are_the_same_in_every_release() -> None:
    plan = planned(config(entry("00:06.0", 2)), inventory(P40))
    assert plan.host_id == "24854d54-6fb6-5ac9-9cb0-857b92bf9c53"
    assert [device.id for device in plan.devices] == [
        "3a37e90e-e84d-597e-a39b-8938802c956e",
        "961a45e2-522d-5a71-895d-195026c520c6",
    ]


def test_the_ids_are_version_5_uuids_and_differ_between_hosts() -> None:
    settings = config(entry("00:06.0", 4))
    here = planned(settings, inventory(P40))
    there, _ = make_plan(settings, inventory(P40), "0" * 32)
    ids = [UUID(plan.host_id) for plan in (here, there)]
    ids += [UUID(device.id) for plan in (here, there) for device in plan.devices]
    assert len(set(ids)) == 10
    assert {found.version for found in ids} == {5}


@pytest.mark.parametrize("number", [1, 48])
def test_the_policy_none_limits_no_threads(number: int) -> None:
    assert thread_percentage("none", number) == 100.0


@pytest.mark.parametrize(("policy", "numerator"), [("equal", 100), ("double", 200)])
def test_every_percentage_is_the_exact_share_rounded_down_to_one_decimal(policy: str, numerator: int) -> None:
    for number in range(1, 4097):
        exact = (Decimal(numerator) / number).quantize(Decimal("0.1"), rounding=ROUND_FLOOR)
        wanted = min(Decimal(100), max(Decimal("0.1"), exact))
        assert Decimal(decimal(thread_percentage(policy, number))) == wanted, number


@pytest.mark.parametrize(
    ("percentage", "text"), [(25.0, "25"), (33.3, "33.3"), (100.0, "100"), (0.1, "0.1"), (10.0, "10")]
)
def test_a_percentage_is_written_as_nvidia_s_programs_take_it(percentage: float, text: str) -> None:
    assert decimal(percentage) == text


def test_one_domain_serves_all_gpus_with_the_largest_percentage() -> None:
    gpus = gpu(1, memory_mib=1000), gpu(2, memory_mib=1001), gpu(3)
    plan = planned(
        config(entry("01:00.0", 8), entry("02:00.0", 2, 5), entry("03:00.0", 7, 8)), inventory(*gpus)
    )
    (domain,) = plan.domains
    assert domain.gpu_uuids == tuple(str(one.uuid) for one in gpus)
    assert domain.memory_limits_mib == (125, 500, 11651)
    assert domain.thread_percentage == 50.0
    own = {device.gpu_uuid: device.thread_percentage for device in plan.devices}
    assert list(own.values()) == [12.5, 50.0, 14.2]
    assert len(plan.devices) == 17


def test_each_gpu_has_a_domain_with_directories_of_its_own_in_scope_gpu() -> None:
    gpus = gpu(1), gpu(2, pci_address="0001:02:00.0")
    settings = config(entry("01:00.0", 2), entry("0001:02:00.0", 4, 5), cuda_mps_scope="gpu")
    plan = planned(settings, inventory(*gpus))
    assert plan.domains == tuple(
        DomainPlan(
            name,
            f"/tmp/nvidia-mps/pipe/{one.uuid}",
            f"/tmp/nvidia-mps/log/{one.uuid}",
            (PlannedGpu(str(one.uuid), memory, number, percentage),),
            percentage,
        )
        for one, name, memory, percentage, number in zip(
            gpus, ("01:00.0", "0001:02:00.0"), (40779, 20389), (50.0, 25.0), (2, 4)
        )
    )
    assert {device.domain for device in plan.devices} == {"01:00.0", "0001:02:00.0"}


def test_cuda_mps_replicas_divides_every_gpu_if_the_file_divides_none() -> None:
    plan = planned(config(cuda_mps_replicas=3), inventory(gpu(1), gpu(2)))
    assert [device.addr for device in plan.devices] == [
        f"{address}-{slot}" for address in ("01:00.0", "02:00.0") for slot in range(3)
    ]


def test_no_compute_mode_is_planned_if_the_operator_keeps_them() -> None:
    plan = planned(config(entry("01:00.0", 3), cuda_mps_compute_mode="keep"), inventory(gpu(1)))
    assert plan.compute_modes == {}
    assert len(plan.devices) == 3


@pytest.mark.parametrize(
    ("capability", "enforced"),
    [((3, 7), False), ((6, 2), False), ((7, 0), True), ((12, 0), True), (None, False)],
)
def test_budgets_are_enforced_from_volta_on(capability: tuple[int, int], enforced: bool) -> None:
    plan = planned(config(entry("01:00.0", 2)), inventory(gpu(1, compute_capability=capability)))
    assert {device.budget_enforced for device in plan.devices} == {enforced}


def test_a_client_s_environment_carries_its_own_device_s_budget() -> None:
    settings = config(entry("01:00.0", 8), entry("02:00.0", 3, 5), cuda_mps_pipe_directory="/run/mps")
    plan = planned(settings, inventory(gpu(1), gpu(2)))
    assert client_environment(plan.devices[-1:], plan.domains[0]) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33.3",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=27186M",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/mps",
        "CUDA_VISIBLE_DEVICES": str(gpu(2).uuid),
        "YUNION_MPS_DEVICE": "02:00.0-2",
    }


def test_the_modes_that_differ_from_the_plan_are_to_be_changed() -> None:
    found = inventory(gpu(1, compute_mode="Exclusive_Process"), gpu(2, compute_mode=None), gpu(3))
    plan = planned(config(entry("02:00.0", 2), entry("03:00.0", 2, 5), entry("01:00.0", 4, 8)), found)
    assert mode_changes(plan, found.gpus) == (
        (gpu(2).uuid, "Default", "Exclusive_Process"),
        (gpu(3).uuid, "Default", "Exclusive_Process"),
    )
