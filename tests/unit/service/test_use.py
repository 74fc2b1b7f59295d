"""Who uses how much of which device."""

from __future__ import annotations

from typing import Any

from yunion_mps.service.metrics import DomainUse, GpuUse, Observation, ServedDomain, Use, use_of
from yunion_mps.service.usage import Budget, DeviceUse

A, B = "GPU-a", "GPU-b"
SERVER, TRAIN, INFER, STRANGER = 100, 201, 202, 300
BUDGETS = {"00:06.0-0": Budget(A, 1000), "00:06.0-1": Budget(A, 1000), "00:07.0-0": Budget(B, 2000)}
MIB = 1 << 20


def seen(**given: Any) -> Observation:
    """A server and two jobs on the first of two GPUs."""
    found = Observation(
        7.0,
        (ServedDomain("host", (A, B), frozenset({SERVER}), 3.0),),
        {A: {SERVER: 30, TRAIN: 900, INFER: 400}, B: {}},
        {A: {TRAIN, INFER}, B: set()},
        {TRAIN: ("00:06.0-0",), INFER: ("00:06.0-1",)},
    )
    return found._replace(**given)


def use(**given: Any) -> Use:
    return use_of(seen(**given), BUDGETS)


def test_each_process_counts_where_it_has_its_device() -> None:
    found = use()
    assert found.devices == {"00:06.0-0": DeviceUse(900, 1), "00:06.0-1": DeviceUse(400, 1)}
    assert found.gpus == {A: GpuUse(1330, 2, 0), B: GpuUse(0, 0, 0)}
    assert found.domains == {"host": DomainUse(1, 2, 3.0)}


def test_two_processes_of_one_device_count_together() -> None:
    found = use(devices={TRAIN: ("00:06.0-0",), INFER: ("00:06.0-0",)})
    assert found.devices == {"00:06.0-0": DeviceUse(1300, 2)}


def test_several_devices_of_one_job_are_filled_in_their_order_and_the_last_takes_what_is_over() -> None:
    both = ("00:06.0-0", "00:06.0-1")
    found = use(memory={A: {TRAIN: 1700, INFER: 600}}, devices={TRAIN: both, INFER: both})
    assert found.devices == {"00:06.0-0": DeviceUse(1000, 2), "00:06.0-1": DeviceUse(1300, 2)}


def test_a_job_on_two_gpus_counts_on_each_with_what_it_has_there() -> None:
    found = use(
        memory={A: {TRAIN: 900}, B: {TRAIN: 1500}},
        through_mps={A: {TRAIN}, B: {TRAIN}},
        devices={TRAIN: ("00:06.0-0", "00:07.0-0")},
    )
    assert found.devices == {"00:06.0-0": DeviceUse(900, 1), "00:07.0-0": DeviceUse(1500, 1)}
    assert found.domains["host"].clients == 1


def test_a_job_without_a_device_counts_on_its_gpu_alone() -> None:
    found = use(devices={})
    assert found.devices == {}
    assert found.gpus[A] == GpuUse(1330, 2, 0)


def test_a_device_that_is_not_there_any_more_is_passed_over() -> None:
    assert use(devices={TRAIN: ("00:06.0-9",), INFER: ()}).devices == {}


def test_a_process_that_is_no_client_is_past_mps_and_no_client() -> None:
    found = use(memory={A: {SERVER: 30, TRAIN: 900, STRANGER: 50}}, through_mps={A: {TRAIN}})
    assert found.gpus[A] == GpuUse(980, 1, 1)


def test_one_that_has_ended_or_is_a_server_nobody_knows_is_not_past_mps() -> None:
    found = use(memory={A: {STRANGER: 50}}, through_mps={A: set()}, others=frozenset({STRANGER}))
    assert found.gpus[A] == GpuUse(50, 0, 0)


def test_where_the_driver_does_not_tell_clients_apart_nobody_is_past_mps() -> None:
    found = use(through_mps={})
    assert found.gpus[A] == GpuUse(1330, 2, None)


def test_memory_that_the_driver_does_not_tell_counts_as_none() -> None:
    found = use(memory={A: {TRAIN: None}})
    assert found.devices["00:06.0-0"] == DeviceUse(0, 1)
    assert found.gpus[A].mib == 0


def test_a_gpu_that_does_not_answer_is_missing() -> None:
    found = use(memory={B: {}}, through_mps={B: set()})
    assert set(found.gpus) == {B}
    assert found.devices == {}
