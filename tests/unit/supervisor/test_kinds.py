"""A made-up kind of setting: one module and one registration, and the daemon treats it like the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from yunion_mps.core.enums import ABOUT_SETTING, MPS, PENDING, READY, REFUSED, WARNING
from yunion_mps.core.errors import DriverError
from yunion_mps.core.models import Gpu, Holder, Lease, Plan
from yunion_mps.core.reasons import (
    COMPUTE_MODE_CHANGED,
    COMPUTE_MODE_REFUSED,
    DRIVER_HUNG,
    SETTING_IN_USE,
    SETTING_NOT_RESTORED,
    SETTING_PENDING,
)
from yunion_mps.gpus import kinds
from yunion_mps.gpus.blockers import WITHOUT_MPS, Needs
from yunion_mps.gpus.kind import Kind, Step
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.service import offline

from simhost import SimHost
from unit.supervised import StartSupervised, Supervised

TWO = [{"kind": "v100"}, {"kind": "v100"}]


class PowerLimit(Kind):
    """The power limit of GPUs that have devices, in watts; kept in a dict instead of in the driver."""

    name, label = "power_limit", "power limit"
    refused_code, changed_code = COMPUTE_MODE_REFUSED, COMPUTE_MODE_CHANGED

    def __init__(self) -> None:
        self.watts: dict[str, str] = {}
        self.refuses = False
        self.refusal = COMPUTE_MODE_REFUSED
        #: What a change to the desired value waits for.
        self.needs_to_set = Needs()

    def desired(self, plan: Plan, gpu: Gpu) -> str | None:
        return "200" if gpu.uuid in plan.gpu_uuids else None

    def needs(self, step: Step) -> Needs:
        return Needs(leases=WITHOUT_MPS, processes=True) if step.restores else self.needs_to_set

    def observe(self, nvml: Nvml, uuid: str) -> str:
        return self.watts.get(uuid, "300")

    def carry_out(self, nvml: Nvml, uuid: str, step: Step) -> None:
        if self.refuses:
            raise DriverError("the driver refuses it", "", self.refusal)
        self.watts[uuid] = step.target

    def command(self, uuid: str, value: str) -> str:
        return f"nvidia-smi -i {uuid} -pl {value}"


class PolledPowerLimit(PowerLimit):
    """The same, as a kind that polls read."""

    def polled(self, gpu: Gpu) -> str | None:
        return self.watts.get(gpu.uuid or "", "300")


@pytest.fixture(params=[PowerLimit, PolledPowerLimit])
def limit(request: pytest.FixtureRequest) -> Iterator[PowerLimit]:
    kind: PowerLimit = request.param()
    kinds.KINDS.append(kind)
    yield kind
    kinds.KINDS.remove(kind)


def watts(limit: PowerLimit, host: SimHost) -> list[str]:
    return [limit.watts.get(gpu.uuid, "300") for gpu in host.gpus]


def of_settings(made: Supervised) -> list[tuple[str, str]]:
    """The conditions of power limits, as subjects and statuses."""
    found = [condition for condition in made.snapshot.conditions if condition.kind == ABOUT_SETTING]
    return [(condition.subject, condition.status) for condition in found]


def give_up_the_second(made: Supervised) -> None:
    made.host.divide(4)
    made.reload()
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    made.poll_later(0.0)


def recorded(made: Supervised) -> dict[str, str]:
    return made.supervisor.state_file.originals().of("power_limit")


def test_a_start_sets_it_a_reload_follows_and_a_stop_restores_it(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    assert watts(limit, host) == ["200", "200"]
    assert recorded(made) == {gpu.uuid: "300" for gpu in host.gpus}
    assert ("gpu", "power limit 200") in [(event.kind, event.what) for event in made.events]
    host.divide(4)
    shown = [change for change in made.reload() if change.kind == "power limit"]
    assert [(change.subject, change.before, change.after) for change in shown] == [
        ("00:07.0", "200", "original")
    ]
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    made.reconcile()
    assert watts(limit, host) == ["200", "300"]
    host.divide(4, 4)
    made.reload()
    assert watts(limit, host) == ["200", "200"]
    made.stop(restore=False)
    assert made.supervisor.close()
    assert watts(limit, host) == ["300", "300"]


def test_a_restart_restores_what_is_no_longer_configured(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    host, first = start_supervised(TWO, 4, 4)
    first.stop(restore=False)
    host.divide(4)
    made = first.start_next()
    assert watts(limit, host) == ["200", "300"]
    assert recorded(made) == {host.gpus[0].uuid: "300"}


def test_restore_after_a_kill_sets_what_it_was_before(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    made.stop(restore=False)
    made.supervisor.release()
    assert offline.restore(made.paths) == 0
    assert watts(limit, host) == ["300", "300"]


def test_what_keeps_it_is_named_and_restore_says_how(
    limit: PowerLimit, start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.gpus[1].add_process(os.getpid(), 100)
    host.divide(4)
    made.reload()
    made.until(lambda: len(made.snapshot.domains[0].plan.gpu_uuids) == 1)
    made.reconcile()
    assert watts(limit, host) == ["200", "200"]
    (waiting,) = made.snapshot.conditions
    assert (waiting.kind, waiting.subject, waiting.status) == (ABOUT_SETTING, "00:07.0", PENDING)
    assert (waiting.reason.code, waiting.waits_for.processes) == (SETTING_IN_USE, (os.getpid(),))
    made.stop()
    assert watts(limit, host) == ["300", "200"]
    assert "GPU 00:07.0 keeps its power limit, because jobs without MPS use it" in caplog.text
    assert offline.restore(made.paths) == 1
    assert "the power limit of GPU 00:07.0 differs from the original; jobs may still need" in caplog.text
    host.gpus[1].remove_process(os.getpid())
    assert offline.restore(made.paths) == 0
    assert watts(limit, host) == ["300", "300"]


def test_a_refused_value_is_a_warning_and_the_gpus_serve(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    limit.refuses = True
    host, made = start_supervised(TWO, 4, 4)
    assert watts(limit, host) == ["300", "300"]
    refused = [condition for condition in made.snapshot.conditions if condition.kind == ABOUT_SETTING]
    assert [condition.subject for condition in refused] == ["00:06.0", "00:07.0"]
    assert {condition.level for condition in refused} == {WARNING}
    assert {status.state for status in made.snapshot.domains} == {READY}


@pytest.mark.parametrize("code", [COMPUTE_MODE_REFUSED, DRIVER_HUNG])
def test_a_refused_value_is_told_once_and_set_when_the_driver_lets_it(
    limit: PowerLimit, start_supervised: StartSupervised, code: str
) -> None:
    limit.refuses, limit.refusal = True, code
    host, made = start_supervised(TWO, 4)
    host.divide(4, 4)
    made.reload()
    for _ in range(4):
        made.poll_later()
    assert of_settings(made) == [("00:06.0", REFUSED), ("00:07.0", REFUSED)]
    told = [event.subject for event in made.events if "power limit" in event.what]
    assert sorted(told) == ["00:06.0", "00:07.0"]
    limit.refuses = False
    made.poll_later()
    assert (watts(limit, host), of_settings(made)) == (["200", "200"], [])


def test_a_restoration_that_is_refused_is_told_once_and_tried_again(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    limit.refuses = True
    give_up_the_second(made)
    for _ in range(3):
        made.poll_later()
    assert of_settings(made) == [("00:07.0", REFUSED)]
    refused = [event for event in made.events if event.code == SETTING_NOT_RESTORED]
    assert [event.subject for event in refused] == ["00:07.0"]
    limit.refuses = False
    made.poll_later()
    assert (watts(limit, host), of_settings(made)) == (["200", "300"], [])


def test_a_value_that_needs_an_idle_gpu_waits_for_processes(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    """Also for one that began after the last poll."""
    limit.needs_to_set = Needs(processes=True)
    host, made = start_supervised(TWO, 4)
    host.gpus[1].add_process(os.getpid(), 100)
    host.divide(4, 4)
    made.reload()
    made.poll_later(0.0)
    assert (watts(limit, host), of_settings(made)) == (["200", "300"], [("00:07.0", PENDING)])
    host.gpus[1].remove_process(os.getpid())
    made.poll_later(0.0)
    assert (watts(limit, host), of_settings(made)) == (["200", "200"], [])


def test_a_value_that_needs_a_free_gpu_waits_for_leases(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    limit.needs_to_set = Needs(leases=frozenset({MPS}))
    leased = made.snapshot.plan.devices[-1]
    made.hold([Lease("0" * 36, (leased,), Holder("name", 0, name="job"), time.time())])
    limit.watts[host.gpus[1].uuid] = "250"
    made.supervisor.settings.reconciler.compare()
    made.poll_later(0.0)
    assert (watts(limit, host), of_settings(made)) == (["200", "250"], [("00:07.0", PENDING)])
    assert made.snapshot.conditions[0].reason.code == SETTING_PENDING
    made.hold()
    made.poll_later(0.0)
    assert (watts(limit, host), of_settings(made)) == (["200", "200"], [])


@pytest.mark.parametrize("limit", [PowerLimit], indirect=True)
def test_another_programs_change_is_corrected_at_the_next_comparison(
    limit: PowerLimit, start_supervised: StartSupervised
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    limit.watts[host.gpus[0].uuid] = "250"
    made.reconcile()
    assert watts(limit, host) == ["250", "200"]
    made.supervisor.settings.reconciler.compare()
    made.reconcile()
    assert watts(limit, host) == ["200", "200"]
    assert made.events[-1].code == COMPUTE_MODE_CHANGED


def test_restore_names_and_keeps_the_original_of_an_unknown_kind(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a downgrade."""
    later = PowerLimit()
    kinds.KINDS.append(later)
    try:
        host, made = start_supervised(TWO, 4)
        made.stop(restore=False)
        made.supervisor.release()
    finally:
        kinds.KINDS.remove(later)
    assert offline.restore(made.paths) == 1
    what = "GPU 00:06.0: power_limit 300 is not restored: a later version has changed it"
    assert what in caplog.text
    assert "everything is restored" not in caplog.text
    kinds.KINDS.append(later)
    try:
        assert offline.restore(made.paths) == 0
        assert watts(later, host) == ["300", "300"]
    finally:
        kinds.KINDS.remove(later)


def test_a_stop_names_the_original_of_an_unknown_kind(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO, 4)
    originals = made.supervisor.state_file.originals()
    originals.remember("power_limit", {host.gpus[0].uuid: "300"})
    made.stop()
    assert "GPU 00:06.0: power_limit 300 is not restored" in caplog.text
