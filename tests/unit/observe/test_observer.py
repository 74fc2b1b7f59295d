"""Who uses how much, and how long an observation waits for a driver that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, Optional

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.models import DomainPlan, PlannedGpu, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.leases.ledger import Ledger
from yunion_mps.observe.observer import (
    DRIVER_TIMEOUT_S,
    DomainUsage,
    GpuUsage,
    HostUsage,
    Observation,
    Observer,
    ProcessFacts,
    host_usage,
)
from yunion_mps.observe.process_list import GpuProcesses, ObservedDomain
from yunion_mps.observe.usage import Budget, DeviceUsage, ProcessDevices, UsageHistory

from clocks import SkippingLoop
from unit.described_supervisor import DescribedSupervisor, ListingDriver

A, B = "GPU-a", "GPU-b"
SERVER, TRAIN, INFER, STRANGER = 100, 201, 202, 300
BUDGETS = {"00:06.0-0": Budget(A, 1000), "00:06.0-1": Budget(A, 1000), "00:07.0-0": Budget(B, 2000)}


ON_GPUS = GpuProcesses({A: {SERVER: 30, TRAIN: 900, INFER: 400}, B: {}}, {A: {TRAIN, INFER}, B: set()})
DEVICES_OF = {TRAIN: ("00:06.0-0",), INFER: ("00:06.0-1",)}


def observed_use(
    *,
    devices: Mapping[int, tuple[str, ...]] = DEVICES_OF,
    others: frozenset[int] = frozenset(),
    **on_gpus: Any,
) -> HostUsage:
    """The use by a server and two jobs on the first of two GPUs, or by what is given instead."""
    plan = DomainPlan("host", "/pipe", "/log", (PlannedGpu(A), PlannedGpu(B)), 25.0)
    domain = ObservedDomain(plan, 99, 3.0, (SERVER,))
    return host_usage(ProcessFacts(7.0, [domain], ON_GPUS._replace(**on_gpus), devices, others), BUDGETS)


def test_each_process_counts_on_the_gpu_of_its_device() -> None:
    found = observed_use()
    assert found.devices == {"00:06.0-0": DeviceUsage(900, 1), "00:06.0-1": DeviceUsage(400, 1)}
    assert found.gpus == {A: GpuUsage(2, 0), B: GpuUsage(0, 0)}
    assert found.domains == {"host": DomainUsage(1, 2, 3.0)}


def test_a_job_on_two_gpus_counts_its_memory_on_each() -> None:
    found = observed_use(
        memory={A: {TRAIN: 900}, B: {TRAIN: 1500}},
        through_mps={A: {TRAIN}, B: {TRAIN}},
        devices={TRAIN: ("00:06.0-0", "00:07.0-0")},
    )
    assert found.devices == {"00:06.0-0": DeviceUsage(900, 1), "00:07.0-0": DeviceUsage(1500, 1)}
    assert found.domains["host"].clients == 1


def test_a_job_without_a_device_counts_on_its_gpu_alone() -> None:
    found = observed_use(devices={})
    assert found.devices == {}
    assert found.gpus[A] == GpuUsage(2, 0)


def test_a_process_that_is_not_a_client_counts_as_outside_mps() -> None:
    found = observed_use(memory={A: {SERVER: 30, TRAIN: 900, STRANGER: 50}}, through_mps={A: {TRAIN}})
    assert found.gpus[A] == GpuUsage(1, 1)


def test_an_ended_process_or_unknown_server_is_not_outside_mps() -> None:
    found = observed_use(memory={A: {STRANGER: 50}}, through_mps={A: set()}, others=frozenset({STRANGER}))
    assert found.gpus[A] == GpuUsage(0, 0)


def test_no_process_counts_as_outside_mps_if_the_driver_names_no_clients() -> None:
    found = observed_use(through_mps={})
    assert found.gpus[A] == GpuUsage(2, None)


def test_memory_that_the_driver_does_not_report_counts_as_0() -> None:
    found = observed_use(memory={A: {TRAIN: None}})
    assert found.devices["00:06.0-0"] == DeviceUsage(0, 1)


def test_a_gpu_that_does_not_answer_is_missing() -> None:
    found = observed_use(memory={B: {}}, through_mps={B: set()})
    assert set(found.gpus) == {B}
    assert found.devices == {}


NvmlProcesses = dict[str, dict[int, Optional[int]]]


def no_processes_after(gate: threading.Event) -> NvmlProcesses:
    """The answer of a driver that hangs until the gate is open."""
    gate.wait()
    return {}


def observer_of(nvml: Nvml) -> Observer:
    """An observer of a host without domains and GPUs."""
    supervisor = DescribedSupervisor(nvml=nvml)
    return Observer(Paths("/"), supervisor, ProcessDevices(supervisor, Ledger()), UsageHistory(), Ledger())


def test_many_requests_wait_for_a_hanging_driver_no_longer_than_one() -> None:
    """More than the gateway's patience, and the daemon would be told to be down."""
    gate = threading.Event()
    observer = observer_of(ListingDriver(lambda: no_processes_after(gate)))
    loop = SkippingLoop()

    async def scrapes() -> list[Observation]:
        return [await observer.observe() for _ in range(8)]

    try:
        seen = loop.run_until_complete(scrapes())
        assert loop.time() < 2 * DRIVER_TIMEOUT_S
        late = "the driver is slow to answer, so the list of clients is out of date"
        assert [(one.clients["errors"], one.use) for one in seen] == [([late], None)] * 8
    finally:
        gate.set()
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
        loop.close()


@pytest.fixture
def patient_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are waited for, however slow the machine is."""
    monkeypatch.setattr("yunion_mps.observe.observer.DRIVER_TIMEOUT_S", 60.0)


@pytest.mark.usefixtures("patient_observer")
def test_an_observation_begins_after_the_request() -> None:
    """What a job did before the request is in the answer, even if another observation was under way."""
    gate, asked = threading.Event(), threading.Semaphore(0)

    def processes() -> NvmlProcesses:
        asked.release()
        return no_processes_after(gate)

    observer = observer_of(ListingDriver(processes))

    async def two() -> None:
        first = asyncio.ensure_future(observer.observe())
        await asyncio.to_thread(asked.acquire)
        second = asyncio.ensure_future(observer.observe())
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, second)

    asyncio.run(two())
    assert asked.acquire(blocking=False), "the driver was asked again"


@pytest.mark.usefixtures("patient_observer")
def test_the_last_list_is_kept_with_an_error_while_the_driver_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    nvml = ListingDriver()
    observer = observer_of(nvml)

    async def three() -> tuple[Observation, Observation, Observation]:
        before = await observer.observe()
        nvml.list_processes = lambda: no_processes_after(gate)
        with monkeypatch.context() as impatient:
            impatient.setattr("yunion_mps.observe.observer.DRIVER_TIMEOUT_S", 0.0)
            during = await observer.observe()
        nvml.list_processes = dict
        gate.set()
        return before, during, await observer.observe()

    before, during, after = asyncio.run(three())
    assert (before.clients["errors"], after.clients["errors"]) == ([], [])
    assert during.use is before.use is not None
    assert len(during.clients["errors"]) == 1


@pytest.mark.usefixtures("patient_observer")
def test_an_error_of_the_driver_is_in_the_list_and_the_last_use_is_kept() -> None:
    def refuse() -> NvmlProcesses:
        raise DriverError("the driver is gone", "reboot")

    nvml = ListingDriver()
    observer = observer_of(nvml)
    before = asyncio.run(observer.observe())
    nvml.list_processes = refuse
    after = asyncio.run(observer.observe())
    assert (after.clients["errors"], after.use) == (["the driver is gone"], before.use)


class FailingSupervisor(DescribedSupervisor):
    """A supervisor without a snapshot as long as it `fails`."""

    fails = True

    def snapshot(self) -> Snapshot:
        if self.fails:
            raise RuntimeError("no snapshot")
        return super().snapshot()


def test_an_observation_that_fails_at_once_blocks_no_later_one() -> None:
    supervisor = FailingSupervisor(nvml=ListingDriver())
    devices = ProcessDevices(DescribedSupervisor(), Ledger())
    observer = Observer(Paths("/"), supervisor, devices, UsageHistory(), Ledger())
    assert asyncio.run(observer.observe()).use is None
    supervisor.fails = False
    assert asyncio.run(observer.observe()).use is not None
