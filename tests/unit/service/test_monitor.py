"""The GPUs are polled regularly, and at once when one of them changes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import groupby

import pytest
from yunion_mps.core.models import Gpu, Plan
from yunion_mps.core.reasons import (
    COMPUTE_MODE_REFUSED,
    DRIVER_NOT_LOADED,
    GPU_FAULT,
    GPU_LOST,
    TIME_SLICE_CHANGED,
)
from yunion_mps.core.tasks import cancel
from yunion_mps.gpus import kinds
from yunion_mps.gpus.blockers import Needs
from yunion_mps.gpus.kind import Kind, Step
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.observe.usage import LatestPoll, UsageHistory
from yunion_mps.service import monitor
from yunion_mps.service.monitor import Monitor
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.reload import LoopControl
from yunion_mps.service.services import Services
from yunion_mps.supervisor.preflight import run_preflight

from unit.supervised import MakeHost, Supervise, Supervised

pytestmark = pytest.mark.processes  # whether a control daemon listens is seen by its socket

TWO = [{"kind": "v100"}, {"kind": "a100"}]
PATIENCE_S = 60.0


def monitor_of(made: Supervised, poll_now: asyncio.Event, polled: asyncio.Event) -> Monitor:
    return measuring_monitor(made, poll_now, polled)[0]


def measuring_monitor(
    made: Supervised, poll_now: asyncio.Event, polled: asyncio.Event
) -> tuple[Monitor, UsageHistory]:
    """A monitor, and what it measures."""
    paths, supervisor = made.paths, made.supervisor
    control = LoopControl((), poll_now, polled.set, lambda: None)
    services = Services.of(paths, supervisor, CdiPublisher(paths, supervisor), control, started_s=0.0)
    return Monitor(paths, services, control), services.queries.usage


def test_without_any_event_the_gpus_are_polled_regularly(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 0.01)
    host = make_host(TWO)
    made = supervise(host).start()

    async def follow() -> None:
        polled = asyncio.Event()
        task = asyncio.create_task(monitor_of(made, asyncio.Event(), polled).run())
        for _ in range(3):
            host.gpus[0].compute_mode = "default"
            while host.gpus[0].compute_mode == "default":
                await asyncio.wait_for(polled.wait(), PATIENCE_S)
                polled.clear()
        await cancel([task])

    asyncio.run(follow())


def test_time_slices_are_compared_now_and_then(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 0.01)
    monkeypatch.setattr(monitor, "COMPARE_S", 0.05)
    host = make_host(TWO)
    host.divide("type: NVIDIA_GPU_SHARE\n  virtual_number: 2\n  time_slice: short")
    made = supervise(host).start()

    async def follow() -> None:
        polled = asyncio.Event()
        task = asyncio.create_task(monitor_of(made, asyncio.Event(), polled).run())
        for _ in range(2):
            host.gpus[0].time_slice = "long"
            while host.gpus[0].time_slice == "long":
                await asyncio.wait_for(polled.wait(), PATIENCE_S)
                polled.clear()
        await cancel([task])

    asyncio.run(follow())
    assert TIME_SLICE_CHANGED in {event.code for event in made.events}


def test_a_gpu_that_returns_and_is_lost_again_is_noticed_at_once(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 3600.0)
    host = make_host(TWO)
    made = supervise(host).start()

    async def follow() -> None:
        poll_now, polled = asyncio.Event(), asyncio.Event()

        async def until(available: int) -> None:
            end_s = time.monotonic() + PATIENCE_S
            # A fault that only an Xid reported is kept: the poll has to see that the GPU is lost.
            while made.available != available or made.snapshot.inventory.gpus[1].reason.code == GPU_FAULT:
                assert time.monotonic() < end_s, made.snapshot
                await asyncio.wait_for(polled.wait(), PATIENCE_S)
                polled.clear()
                made.supervisor.tick(time.monotonic())

        task = asyncio.create_task(monitor_of(made, poll_now, polled).run())
        poll_now.set()
        await asyncio.wait_for(polled.wait(), PATIENCE_S)
        host.gpus[1].lose()
        poll_now.set()  # the driver's events may not be registered yet
        await until(4)
        for _ in range(2):
            host.gpus[1].restore()
            await until(8)
            host.gpus[1].lose()
            await until(4)
        await cancel([task])

    asyncio.run(follow())
    told = [event.what for event in made.events if event.kind == "gpu" and "Xid" not in event.what]
    changes = [what for what, _ in groupby(told)]  # an Xid may be its first reason, before it is lost
    assert changes == ["unavailable", *["available", "unavailable"] * 2]


class SlowSetting(Kind):
    """A setting of GPUs that have devices; its step does not end before the test lets it."""

    name, label = "slow", "slow setting"
    refused_code = changed_code = COMPUTE_MODE_REFUSED

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        return "new" if gpu.uuid in plan.gpu_uuids else None

    def needs(self, step: Step) -> Needs:
        return Needs()

    def observe(self, nvml: Nvml, uuid: str) -> str:
        return "old"

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        self.has_begun.set()
        self.may_end.wait(PATIENCE_S)

    def command(self, uuid: str, value: str) -> str:
        return "none"


@pytest.fixture
def slow() -> Iterator[SlowSetting]:
    kind = SlowSetting()
    kind.may_end.set()
    kinds.KINDS.append(kind)
    yield kind
    kind.may_end.set()
    kinds.KINDS.remove(kind)


def test_a_gpu_that_is_lost_is_noticed_while_a_step_is_at_work(
    slow: SlowSetting, make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 0.01)
    monkeypatch.setattr(monitor, "STEPS_WITHIN_S", 0.01)
    host = make_host(TWO)
    host.divide(4, 4)
    made = supervise(host).start()
    slow.may_end.clear()
    slow.has_begun.clear()
    made.supervisor.settings.reconciler.check_again()

    async def follow() -> None:
        polled = asyncio.Event()

        async def until_reason(code: str) -> None:
            while made.snapshot.inventory.gpus[1].reason.code != code:
                await asyncio.wait_for(polled.wait(), PATIENCE_S)
                polled.clear()

        task = asyncio.create_task(monitor_of(made, asyncio.Event(), polled).run())
        assert await asyncio.to_thread(slow.has_begun.wait, PATIENCE_S)
        host.gpus[1].lose()
        await until_reason(GPU_LOST)
        host.gpus[1].restore()
        await until_reason("")
        slow.may_end.set()
        await cancel([task])

    asyncio.run(follow())


def test_a_poll_begins_steps_once_the_slow_ones_before_have_ended(
    slow: SlowSetting, make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "STEPS_WITHIN_S", 0.01)
    host = make_host(TWO)
    host.divide(4, 4)
    made = supervise(host).start()
    slow.may_end.clear()
    made.supervisor.settings.reconciler.check_again()

    async def follow() -> None:
        polled = asyncio.Event()
        made_monitor = monitor_of(made, asyncio.Event(), polled)
        await made_monitor.poll()
        polled.clear()
        slow.may_end.set()
        await asyncio.wait_for(polled.wait(), PATIENCE_S)  # the steps request a tick at their end
        await asyncio.sleep(0)
        monkeypatch.setattr(monitor, "STEPS_WITHIN_S", PATIENCE_S)
        host.gpus[0].compute_mode = "default"
        await made_monitor.poll()

    asyncio.run(follow())
    assert host.gpus[0].compute_mode == "exclusive_process"


def test_polls_beside_a_mig_step_tell_nothing_of_its_gpu(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 0.01)
    monkeypatch.setattr(monitor, "FAST_POLL_S", 0.01)
    monkeypatch.setattr(monitor, "STEPS_WITHIN_S", 0.01)
    host = make_host([{"kind": "h100"}, {"kind": "v100"}])
    host.divide("type: NVIDIA_GPU_SHARE; mig: [3g.40gb, 3g.40gb]", 4)
    made = supervise(host).start()
    made.bring_about()
    before = made.snapshot.inventory.gpus
    assert len(before) == 4
    host.divide("type: NVIDIA_GPU_SHARE; mig: [3g.40gb, 2g.20gb]", 4)
    made.supervisor.accept(run_preflight(made.paths, made.supervisor.nvml))
    host.fail("nvmlGpuInstanceDestroy", "success", delay_ms=3_600_000)

    async def follow() -> None:
        polled = asyncio.Event()

        async def until(is_so: Callable[[], bool]) -> None:
            end_s = time.monotonic() + PATIENCE_S
            while not is_so():
                assert time.monotonic() < end_s, made.snapshot.inventory
                await asyncio.wait_for(polled.wait(), PATIENCE_S)
                polled.clear()

        async def poll_again() -> None:
            for _ in range(3):  # the first may have begun before
                polled.clear()
                await asyncio.wait_for(polled.wait(), PATIENCE_S)

        task = asyncio.create_task(monitor_of(made, asyncio.Event(), polled).run())
        await until(lambda: len(host.gpus[0].mig_devices()) == 1)
        host.fail("nvmlDeviceGetGpuInstances", "invalid_argument")
        await poll_again()
        assert made.snapshot.inventory.gpus == before
        host.gpus[0].lose(xid=None)
        host.gpus[1].lose(xid=None)
        await until(lambda: made.snapshot.inventory.gpus[3].reason.code == GPU_LOST)
        await poll_again()
        assert made.snapshot.inventory.gpus[:3] == before[:3]
        host.clear()
        await until(lambda: made.snapshot.inventory.gpus[0].reason.code == GPU_LOST)
        await cancel([task])

    asyncio.run(follow())


def test_the_load_is_known_at_the_start_and_0_for_idle_processes(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 3600.0)
    host = make_host([{"kind": "v100", "processes": [{"pid": os.getpid(), "used_mib": 5}]}])
    made = supervise(host).start()
    uuid = host.gpus[0].uuid

    async def follow() -> LatestPoll:
        made_monitor, history = measuring_monitor(made, asyncio.Event(), asyncio.Event())
        task = asyncio.create_task(made_monitor.run())
        end_s = time.monotonic() + PATIENCE_S
        while history.latest == LatestPoll():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
        await cancel([task])
        return history.latest

    latest = asyncio.run(follow())
    assert latest.load.gpus[uuid].utilization == 0
    assert latest.load.processes == {uuid: {os.getpid(): 0}}


def test_a_poll_measures_and_a_driver_that_fails_makes_it_unknown(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host([{"kind": "v100", "processes": [{"pid": os.getpid(), "used_mib": 5, "sm": 40}]}])
    made = supervise(host).start()
    uuid = host.gpus[0].uuid

    async def follow() -> None:
        poll_now, polled = asyncio.Event(), asyncio.Event()

        async def poll() -> None:
            polled.clear()
            poll_now.set()
            await asyncio.wait_for(polled.wait(), PATIENCE_S)

        made_monitor, history = measuring_monitor(made, poll_now, polled)
        task = asyncio.create_task(made_monitor.run())
        await poll()
        assert history.latest.load.gpus[uuid].utilization == 40
        assert history.latest.load.processes == {uuid: {os.getpid(): 40}}
        host.fail("nvmlDeviceGetCount", "unknown")
        await poll()
        assert history.latest == LatestPoll()
        host.clear()
        await poll()
        assert history.latest.load.gpus[uuid].utilization == 40
        await cancel([task])

    asyncio.run(follow())


def test_a_gpu_that_is_added_to_the_bus_is_served_without_a_restart(
    make_host: MakeHost, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 3600.0)
    monkeypatch.setattr(monitor, "SYSFS_POLL_S", 0.01)
    host = make_host([{"kind": "v100"}, {"kind": "a100", "present": False}], cuda_mps_replicas="4")
    (host.root / "etc/yunion/host_container_device.yml").unlink()
    made = supervise(host).start()
    assert made.available == 4

    async def follow() -> None:
        polled = asyncio.Event()
        task = asyncio.create_task(monitor_of(made, asyncio.Event(), polled).run())
        host.gpus[1].restore()
        while len(made.snapshot.plan.gpu_uuids) != 2:
            await asyncio.wait_for(polled.wait(), PATIENCE_S)
            polled.clear()
        await cancel([task])

    asyncio.run(follow())
    made.until(lambda: made.available == 8)


def test_a_driver_that_is_loaded_late_is_used(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host(TWO)
    host.unload_driver()
    made = supervise(host).start()
    assert made.snapshot.notice.code == DRIVER_NOT_LOADED
    host.load_driver()

    async def follow() -> None:
        poll_now, polled = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(monitor_of(made, poll_now, polled).run())
        poll_now.set()
        await asyncio.wait_for(polled.wait(), PATIENCE_S)
        await cancel([task])

    asyncio.run(follow())
    made.until(lambda: made.available == 8)
    assert made.snapshot.notice == ""
