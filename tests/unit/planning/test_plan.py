"""The plan of a host: which GPUs the entries divide, into what, and what is wrong with them."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal
from typing import Any
from uuid import UUID

import pytest
from yunion_mps.core.enums import TIME_SLICING
from yunion_mps.core.models import DomainPlan, Driver, Gpu, Plan, PlannedGpu
from yunion_mps.core.reasons import COMPUTE_MODE_FIXED, GPU_LOST, MEMORY_UNKNOWN, Reason
from yunion_mps.core.settings import Config, SliceEntry, Source
from yunion_mps.planning.division import describe_division, max_clients, share_percentage
from yunion_mps.planning.environment import client_environment, decimal
from yunion_mps.planning.plan import make_plan, mode_changes

from unit.builders import DEVICES, HOST, MACHINE_ID, P40, config, entry, gpu, inventory, messages, planned

NO_MEMORY = "the driver does not report the memory of this GPU, which shares the host's memory"
NO_MEMORY += ", so MPS cannot limit it"


def test_the_reference_case_is_four_devices_of_5760_mib_and_25_percent() -> None:
    plan = planned(config(entry("/dev/dri/renderD128", 4)), inventory(P40))
    assert [device.addr for device in plan.devices] == ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]
    assert {device[2:3] + device[4:] for device in plan.devices} == {
        (P40.uuid, 5760, 23040, 25.0, False, "host", "normal", 0, "mps")
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


@pytest.mark.parametrize("overcommit", [1, 2])
def test_every_percentage_is_the_exact_share_rounded_down_to_one_decimal(overcommit: int) -> None:
    for number in range(1, 4097):
        exact = (Decimal(100 * overcommit) / number).quantize(Decimal("0.1"), rounding=ROUND_FLOOR)
        expected = min(Decimal(100), max(Decimal("0.1"), exact))
        assert Decimal(decimal(share_percentage(1, number, overcommit))) == expected, number


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


def test_modes_that_differ_from_the_plan_are_changed() -> None:
    found = inventory(gpu(1, compute_mode="Exclusive_Process"), gpu(2, compute_mode=None), gpu(3))
    plan = planned(config(entry("02:00.0", 2), entry("03:00.0", 2, 5), entry("01:00.0", 4, 8)), found)
    assert mode_changes(plan, found.gpus) == (
        (gpu(2).uuid, "Default", "Exclusive_Process"),
        (gpu(3).uuid, "Default", "Exclusive_Process"),
    )


def reasons(found: Gpu, settings: Config) -> str:
    plan = planned(settings, inventory(found))
    assert (plan.devices, plan.domains, plan.compute_modes) == ((), (), {})
    return plan.unavailable[found.pci_address]


@pytest.mark.parametrize(
    ("capability", "driver", "clients"),
    [
        ((3, 5), "470.256.02", 16),
        ((6, 1), "535.261.03", 16),
        ((6, 1), "590.44.01", 16),
        ((7, 0), "535.261.03", 48),
        ((9, 0), "589.99", 48),
        ((9, 0), "590.44.01", 60),
        ((12, 0), "615.10", 60),
        ((7, 5), "", 48),
        ((7, 5), "unknown", 48),
        ((3, 0), "535.261.03", 16),
        (None, "615.10", 16),
    ],
)
def test_how_many_clients_mps_serves_on_a_gpu(capability: tuple[int, int], driver: str, clients: int) -> None:
    assert max_clients(gpu(compute_capability=capability), Driver(driver, None), None) == clients


@pytest.mark.parametrize("override", [4, 128])
def test_the_override_decides_from_volta_on(override: int) -> None:
    driver = Driver("535", None)
    assert max_clients(gpu(compute_capability=(7, 0)), driver, override) == override
    assert max_clients(gpu(compute_capability=(9, 0)), driver, override) == override
    for older in ((6, 2), (6, 1), (3, 5), None):
        assert max_clients(gpu(compute_capability=older), driver, override) == 16


P40_HAS_16 = "more than the 16 clients that MPS allows on GPU 00:06.0 (Tesla P40): write at most 16"
RAISE = "or set cuda_mps_max_clients in host.conf if the driver allows more"


def test_the_override_allows_no_more_devices_on_a_gpu_before_volta() -> None:
    settings = config(entry("00:06.0", 17), entry("01:00.0", 64, 5), cuda_mps_max_clients=64)
    found = inventory(P40, gpu(1))
    assert messages(settings, found) == [f"{DEVICES}:4: virtual_number is 17, {P40_HAS_16}"]


def test_too_many_devices_are_refused_with_the_maximum() -> None:
    settings = config(entry("00:06.0", 17), entry("01:00.0", 49, 5))
    many = "virtual_number is 49, more than the 48 clients that MPS allows on GPU 01:00.0"
    assert messages(settings, inventory(P40, gpu(1))) == [
        f"{DEVICES}:4: virtual_number is 17, {P40_HAS_16}",
        f"{DEVICES}:7: {many} (NVIDIA H100 80GB HBM3): write at most 48, {RAISE}",
    ]
    allowed = config(entry("00:06.0", 16), entry("01:00.0", 48, 5))
    assert messages(allowed, inventory(P40, gpu(1))) == []
    assert messages(config(entry("01:00.0", 60)), inventory(gpu(1), driver="590.44.01")) == []


def test_too_many_replicas_are_named_at_their_line_of_host_conf() -> None:
    what = f"{HOST}:9: cuda_mps_replicas is 20, {P40_HAS_16}"
    assert messages(config(cuda_mps_replicas=20), inventory(gpu(1), P40)) == [what]


def test_an_override_below_the_default_replicas_is_named_at_its_line() -> None:
    many = "cuda_mps_replicas is 10, more than the 4 clients that MPS allows on GPU 01:00.0"
    assert messages(config(cuda_mps_max_clients=4), inventory(P40, gpu(1))) == [
        f"{HOST}:9: {many} (NVIDIA H100 80GB HBM3): write at most 4, {RAISE}"
    ]


def test_a_broken_gpu_is_not_checked_against_a_client_limit() -> None:
    broken = gpu(1, compute_capability=None, reason=Reason("GPU is lost", GPU_LOST))
    plan = planned(config(entry("01:00.0", 48)), inventory(broken))
    assert plan.unavailable == {broken.pci_address: "GPU is lost"}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"reason": Reason("the GPU is lost", GPU_LOST)}, "the GPU is lost"),
        ({"uuid": None}, "the driver does not report the GPU's UUID"),
        (
            {"memory_mib": None},
            NO_MEMORY,
        ),
        ({"mig_enabled": True}, "the GPU is in MIG mode, so MPS cannot serve it as a whole"),
        ({"compute_capability": (3, 0)}, "MPS requires compute capability 3.5, but the GPU has 3.0"),
        ({"compute_capability": (2, 1)}, "MPS requires compute capability 3.5, but the GPU has 2.1"),
    ],
)
def test_a_gpu_that_cannot_serve_gets_a_reason_instead_of_devices(
    given: dict[str, object], reason: str
) -> None:
    assert reasons(gpu(1, **given), config(entry("01:00.0", 2))) == reason


def test_a_prohibited_gpu_cannot_serve_if_compute_modes_are_kept() -> None:
    prohibited = gpu(1, compute_mode="Prohibited")
    assert reasons(prohibited, config(entry("01:00.0", 2), cuda_mps_compute_mode="keep")) == (
        "the GPU's compute mode is Prohibited, and cuda_mps_compute_mode is keep"
    )
    plan = planned(config(entry("01:00.0", 2)), inventory(prohibited))
    assert (len(plan.devices), plan.compute_modes) == (2, {prohibited.uuid: "Exclusive_Process"})


def test_a_gpu_of_capability_3_5_is_the_oldest_that_serves() -> None:
    plan = planned(config(entry("01:00.0", 2)), inventory(gpu(1, compute_capability=(3, 5))))
    assert len(plan.devices) == 2


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_gpu_that_cannot_serve_does_not_affect_the_others(scope: str) -> None:
    settings = config(cuda_mps_replicas=2, cuda_mps_scope=scope)
    found = inventory(gpu(1, mig_enabled=True), gpu(2), gpu(3, reason=Reason("GPU is lost", GPU_LOST)))
    plan = planned(settings, found)
    assert {device.gpu_uuid for device in plan.devices} == {gpu(2).uuid}
    assert [domain.gpu_uuids for domain in plan.domains] == [(gpu(2).uuid,)]
    assert set(plan.unavailable) == {"0000:01:00.0", "0000:03:00.0"}


def test_more_than_32_gpus_in_one_domain_are_an_error() -> None:
    gpus = [gpu(slot) for slot in range(33)]
    wrong = "cuda_mps_scope is host, and one control daemon cannot limit more than 32 GPUs"
    assert messages(config(cuda_mps_scope="host"), inventory(*gpus)) == [
        f"{HOST}:9: {wrong}: write cuda_mps_scope: gpu"
    ]
    assert messages(config(), inventory(*gpus)) == [f"{HOST}: {wrong}: write cuda_mps_scope: gpu"]
    assert messages(config(), inventory(*gpus[1:])) == []
    assert messages(config(), inventory(gpus[0]._replace(mig_enabled=True), *gpus[1:])) == []
    assert messages(config(cuda_mps_scope="gpu"), inventory(*gpus)) == []


def test_over_budget_of_an_entry_overrides_host_conf() -> None:
    first, second = gpu(1), gpu(2)
    entries = entry(first.address, 2), entry(second.address, 2)._replace(over_budget="report")
    plan = planned(config(*entries, over_budget="terminate"), inventory(first, second))
    assert plan.over_budget == {first.uuid: "terminate", second.uuid: "report"}
    same = planned(config(*entries), inventory(first, second))
    assert same.domains == plan.domains, "no control daemon depends on it"


@pytest.mark.parametrize(("of_host", "of_entry"), [("exclusive_process", "keep"), ("keep", "")])
def test_an_entry_overrides_the_compute_mode_of_host_conf(of_host: str, of_entry: str) -> None:
    kept = entry("/dev/dri/renderD128", 4)._replace(cuda_mps_compute_mode=of_entry)
    other = entry("/dev/dri/renderD129", 4, 5)._replace(cuda_mps_compute_mode="exclusive_process")
    plan = planned(config(kept, other, cuda_mps_compute_mode=of_host), inventory(gpu(0), gpu(1)))
    assert plan.compute_modes == {gpu(1).uuid: "Exclusive_Process"}
    assert plan.kept_modes == {gpu(0).pci_address}
    assert len(plan.devices) == 8


@pytest.mark.parametrize("mode", ["Default", "Exclusive_Process", None])
def test_a_gpu_whose_mode_cannot_change_is_divided_as_it_is(mode: str | None) -> None:
    fixed = gpu(0, compute_mode=mode, mode_is_fixed=True)
    plan = planned(config(), inventory(fixed, gpu(1)))
    assert plan.compute_modes == {gpu(1).uuid: "Exclusive_Process"}
    assert plan.unavailable == {}
    assert plan.kept_modes == frozenset()


def test_a_mode_that_cannot_change_and_keeps_jobs_out_is_a_reason() -> None:
    fixed = gpu(0, compute_mode="Prohibited", mode_is_fixed=True)
    plan = planned(config(), inventory(fixed))
    (reason,) = plan.unavailable.values()
    what = "the GPU's compute mode is Prohibited, and the driver does not support changing it"
    assert (reason, reason.code) == (what, COMPUTE_MODE_FIXED)
    keeps = config(entry("/dev/dri/renderD128", 4), cuda_mps_compute_mode="keep")
    assert planned(keeps, inventory(fixed)).unavailable[fixed.pci_address].code == COMPUTE_MODE_FIXED
    sliced = entry("/dev/dri/renderD128", 4)._replace(sharing=TIME_SLICING)
    exclusive = gpu(0, compute_mode="Exclusive_Process", mode_is_fixed=True)
    settings = config(sliced, cuda_mps_pipe_directory="/run/mps/pipe")
    (reason,) = planned(settings, inventory(exclusive)).unavailable.values()
    what = "time-slicing requires compute mode Default, but it is Exclusive_Process, and the driver does not "
    assert (reason, reason.code) == (f"{what}support changing it", COMPUTE_MODE_FIXED)


#: A GPU that shares the host's memory.
UNIFIED = gpu(0, memory_mib=None)


def test_a_gpu_of_unknown_memory_is_time_sliced_without_budgets() -> None:
    sliced = entry("/dev/dri/renderD128", 4)._replace(sharing=TIME_SLICING)
    settings = config(sliced, cuda_mps_pipe_directory="/run/mps/pipe")
    plan = planned(settings, inventory(UNIFIED))
    assert plan.unavailable == {}
    assert [device.addr for device in plan.devices] == [f"00:00.0-{slot}" for slot in range(4)]
    assert {(one.memory_limit_mib, one.memory_total_mib) for one in plan.devices} == {(None, None)}
    assert describe_division(plan, UNIFIED.uuid) == "4 x unknown memory, time-slicing"
    lost = UNIFIED._replace(reason=Reason("lost", GPU_LOST))
    again = planned(settings, inventory(lost)._replace(served=(str(UNIFIED.uuid),)))
    assert again.devices == plan.devices, "its devices are listed while it is lost"


def test_mps_needs_the_memory_of_a_gpu_and_says_so() -> None:
    for settings in (config(entry("/dev/dri/renderD128", 4)), config()):
        plan = planned(settings, inventory(UNIFIED))
        (reason,) = plan.unavailable.values()
        assert reason.code == MEMORY_UNKNOWN
        assert "the driver does not report the memory of this GPU, which shares the host's memory" in reason
        assert plan.devices == ()


DIVIDED: dict[str, dict[str, Any]] = {
    "virtual_number": {"virtual_number": 4},
    "slices": {"virtual_number": 0, "slices": (SliceEntry(49152), SliceEntry(24576))},
    "memory_unit": {"virtual_number": 0, "memory_unit_mib": 1024},
}


@pytest.mark.parametrize("division", DIVIDED)
@pytest.mark.parametrize("reported", [None, 131072])
def test_the_configured_memory_of_a_gpu_is_what_is_divided(reported: int | None, division: str) -> None:
    sized = entry("/dev/dri/renderD128", 4)._replace(memory_mib=98304, **DIVIDED[division])
    plan = planned(config(sized), inventory(gpu(0, memory_mib=reported)))
    assert plan.unavailable == {}
    assert plan.memory_mib == {gpu(0).pci_address: 98304}
    if division == "memory_unit":
        assert (plan.pools[0].memory_mib, plan.pools[0].memory_total_mib) == (98304, 98304)
        return
    assert {device.memory_total_mib for device in plan.devices} == {98304}
    of_each = {"virtual_number": [24576] * 4, "slices": [49152, 24576]}
    assert [device.memory_limit_mib for device in plan.devices] == of_each[division]


def test_configured_memory_gives_a_time_sliced_gpu_budgets() -> None:
    sliced = entry("/dev/dri/renderD128", 4)._replace(sharing=TIME_SLICING, memory_mib=98304)
    plan = planned(config(sliced, cuda_mps_pipe_directory="/run/mps/pipe"), inventory(UNIFIED))
    assert {(one.memory_limit_mib, one.memory_total_mib) for one in plan.devices} == {(24576, 98304)}


def test_more_memory_than_the_driver_reports_is_a_problem() -> None:
    at = Source(DEVICES, 7)
    sized = entry("/dev/dri/renderD128", 4)._replace(memory_mib=98304, memory_at=at)
    what = "memory is 98304 MiB, more than the 81559 MiB of GPU 00:00.0 (NVIDIA H100 80GB HBM3)"
    assert messages(config(sized), inventory(gpu(0))) == [
        f"{DEVICES}:7: {what}: write at most 81559MiB, or remove it"
    ]
    assert messages(config(sized._replace(memory_mib=81559)), inventory(gpu(0))) == []


def test_slices_must_fit_the_configured_memory() -> None:
    slices = (SliceEntry(65536), SliceEntry(65536))
    sized = entry("/dev/dri/renderD128", 0)._replace(memory_mib=98304, slices=slices)
    (message,) = messages(config(sized), inventory(UNIFIED))
    assert "the slices add up to 131072 MiB, more than the 98304 MiB" in message
