"""The facts of the metrics: who uses how much, and how long a scrape waits for a driver that hangs."""

from __future__ import annotations

import asyncio
import selectors
import threading
from types import SimpleNamespace
from typing import Any

from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.metrics import (
    DRIVER_TIMEOUT_S,
    DomainUsage,
    GpuUsage,
    HostUsage,
    MetricsCollector,
    Observation,
    ServedDomain,
    host_usage,
)
from yunion_mps.service.usage import Budget, DeviceUsage, ProcessDevices

from unit.leases.shares import device

A, B = "GPU-a", "GPU-b"
SERVER, TRAIN, INFER, STRANGER = 100, 201, 202, 300
BUDGETS = {"00:06.0-0": Budget(A, 1000), "00:06.0-1": Budget(A, 1000), "00:07.0-0": Budget(B, 2000)}


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


def use(**given: Any) -> HostUsage:
    return host_usage(seen(**given), BUDGETS)


def test_each_process_counts_where_it_has_its_device() -> None:
    found = use()
    assert found.devices == {"00:06.0-0": DeviceUsage(900, 1), "00:06.0-1": DeviceUsage(400, 1)}
    assert found.gpus == {A: GpuUsage(2, 0), B: GpuUsage(0, 0)}
    assert found.domains == {"host": DomainUsage(1, 2, 3.0)}


def test_a_job_on_two_gpus_counts_on_each_with_what_it_has_there() -> None:
    found = use(
        memory={A: {TRAIN: 900}, B: {TRAIN: 1500}},
        through_mps={A: {TRAIN}, B: {TRAIN}},
        devices={TRAIN: ("00:06.0-0", "00:07.0-0")},
    )
    assert found.devices == {"00:06.0-0": DeviceUsage(900, 1), "00:07.0-0": DeviceUsage(1500, 1)}
    assert found.domains["host"].clients == 1


def test_a_job_without_a_device_counts_on_its_gpu_alone() -> None:
    found = use(devices={})
    assert found.devices == {}
    assert found.gpus[A] == GpuUsage(2, 0)


def test_a_process_that_is_no_client_is_outside_mps_and_no_client() -> None:
    found = use(memory={A: {SERVER: 30, TRAIN: 900, STRANGER: 50}}, through_mps={A: {TRAIN}})
    assert found.gpus[A] == GpuUsage(1, 1)


def test_an_ended_process_or_unknown_server_is_not_outside_mps() -> None:
    found = use(memory={A: {STRANGER: 50}}, through_mps={A: set()}, others=frozenset({STRANGER}))
    assert found.gpus[A] == GpuUsage(0, 0)


def test_no_process_counts_as_outside_mps_if_the_driver_names_no_clients() -> None:
    found = use(through_mps={})
    assert found.gpus[A] == GpuUsage(2, None)


def test_memory_that_the_driver_does_not_tell_counts_as_none() -> None:
    found = use(memory={A: {TRAIN: None}})
    assert found.devices["00:06.0-0"] == DeviceUsage(0, 1)


def test_a_gpu_that_does_not_answer_is_missing() -> None:
    found = use(memory={B: {}}, through_mps={B: set()})
    assert set(found.gpus) == {B}
    assert found.devices == {}


class Clock(selectors.DefaultSelector):
    """A selector that waits for nothing: its clock is set to when the wait would have ended."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0 if timeout is not None else None)
        if not found:
            self.now_s += timeout or 0.0
        return found


def test_several_who_scrape_wait_for_a_hanging_driver_no_longer_than_one() -> None:
    """More than the gateway's patience, and the daemon would be told to be down."""
    gate = threading.Event()
    nvml = SimpleNamespace(processes=gate.wait, mps_clients=dict)
    plan = SimpleNamespace(devices=[device(0, 0)])
    supervisor: Any = SimpleNamespace(nvml=nvml, domains=(), snapshot=lambda: SimpleNamespace(plan=plan))
    nothing: Any = None
    ledger = Ledger()
    devices = ProcessDevices(supervisor, ledger)
    metrics = MetricsCollector(supervisor, nothing, ledger, nothing, devices, nothing, nothing)
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]

    async def scrapes() -> None:
        for _ in range(8):
            await metrics.observe()

    try:
        loop.run_until_complete(scrapes())
        assert clock.now_s < 2 * DRIVER_TIMEOUT_S
    finally:
        gate.set()
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
        loop.close()
