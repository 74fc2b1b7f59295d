"""Compute modes: set where we serve, and restored to what each was, also after a daemon that died."""

from __future__ import annotations

import logging
import time

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.reasons import COMPUTE_MODE_UNSUPPORTED
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.store import Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.mps.processes import our_processes
from yunion_mps.views.devices import devices_json

from unit.supervised import MakeHost, StartSupervised, Supervise, modes

V100 = [{"kind": "v100"}]
TWO = [{"kind": "v100"}, {"kind": "a100", "compute_mode": "prohibited"}]
FIRST = "0000:00:06.0"


def test_the_mode_of_a_gpu_no_longer_configured_is_restored_at_a_start(
    start_supervised: StartSupervised,
) -> None:
    host, first = start_supervised(TWO)
    first.stop(restore=False)
    host.divide(2)
    made = first.start_next()
    assert modes(host) == ["exclusive_process", "prohibited"]
    made.stop()
    assert modes(host) == ["default", "prohibited"]


def test_keep_changes_no_mode_and_notes_none(start_supervised: StartSupervised) -> None:
    two = [*V100, {"kind": "v100", "compute_mode": "exclusive_process"}]
    host, made = start_supervised(two, cuda_mps_compute_mode="keep")
    assert made.available == 8
    assert modes(host) == ["default", "exclusive_process"]
    made.stop()
    assert modes(host) == ["default", "exclusive_process"]
    store = Store(made.paths)
    assert Originals(store).of("compute_mode") == {}
    assert our_processes() == []
    store.close()


def test_a_gpu_whose_mode_is_right_already_is_not_touched(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host([{"kind": "v100", "compute_mode": "exclusive_process"}])
    host.fail("nvmlDeviceSetComputeMode", "no_permission")
    made = supervise(host).start()
    assert made.available == 4
    made.stop()
    assert modes(host) == ["exclusive_process"]


def test_a_mode_that_is_already_set_is_recorded_as_the_original(start_supervised: StartSupervised) -> None:
    host, made = start_supervised([{"kind": "v100", "compute_mode": "exclusive_process"}])
    host.gpus[0].compute_mode = "default"
    made.rescan()
    made.reconcile()
    made.stop()
    assert modes(host) == ["exclusive_process"]


def test_a_gpu_with_its_original_mode_is_given_up_without_a_change(start_supervised: StartSupervised) -> None:
    two = [*V100, {"kind": "v100", "compute_mode": "exclusive_process"}]
    host, made = start_supervised(two)
    host.divide(2)
    made.reload()
    assert Originals(made.supervisor.store()).of("compute_mode").keys() == {host.gpus[0].uuid}
    assert modes(host) == ["exclusive_process", "exclusive_process"]
    assert "00:07.0" not in {event.subject for event in made.events if event.kind == "compute_mode"}


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_gpu_whose_mode_cannot_be_set_is_not_served_and_the_others_are(
    make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture, scope: str
) -> None:
    caplog.set_level(logging.INFO)
    host = make_host(TWO, cuda_mps_scope=scope)
    host.fail("nvmlDeviceSetComputeMode", "no_permission", gpu=0)
    made = supervise(host).start()
    why = "compute mode cannot be set: NVML: permission denied"
    assert made.snapshot.plan.unavailable == {FIRST: f"its {why}; it is tried again"}
    assert {device["gpu_uuid"] for device in devices_json(made.snapshot, Ledger())} == {host.gpus[1].uuid}
    assert made.available == 4
    assert [domain.plan.gpu_uuids for domain in made.snapshot.domains] == [(host.gpus[1].uuid,)]
    assert f"GPU 00:06.0: {why}" in caplog.text
    made.rescan()
    assert made.snapshot.plan.unavailable == {FIRST: f"its {why}; it is tried again"}
    made.stop()
    assert modes(host) == ["default", "prohibited"]
    assert "cannot be restored" not in caplog.text
    assert "is available again" not in caplog.text


VGPU = [{"kind": "t4", "name": "GRID T4-8C"}, {"kind": "t4"}]
KEEPS = "virtual_number: 2; cuda_mps_compute_mode: keep"


@pytest.mark.parametrize("refusing", [(0,), (0, 1)])
def test_a_gpu_whose_driver_supports_no_other_mode_serves(
    make_host: MakeHost, supervise: Supervise, refusing: tuple[int, ...]
) -> None:
    host = make_host(VGPU)
    for gpu in refusing:
        host.fail("nvmlDeviceSetComputeMode", "not_supported", gpu=gpu)
    made = supervise(host).start()
    assert made.available == 8
    assert modes(host) == ["default" if gpu in refusing else "exclusive_process" for gpu in (0, 1)]
    indices = {gpu.address: gpu.nvml_index for gpu in made.snapshot.inventory.gpus}
    assert [(warning.reason.code, indices[warning.gpu]) for warning in made.warnings] == [
        (COMPUTE_MODE_UNSUPPORTED, gpu) for gpu in refusing
    ]
    assert made.warnings[0].text == (
        "GPU 00:06.0 (GRID T4-8C): its compute mode stays Default, because the driver does not support "
        "changing it; a process that bypasses the control daemon could use it without limits"
    )
    of_modes = [event for event in made.events if event.kind == "compute_mode"]
    refused = [event for event in of_modes if event.code == COMPUTE_MODE_UNSUPPORTED]
    assert [event.severity for event in refused] == ["warning"] * len(refusing)


def test_a_mode_that_is_not_supported_is_tried_once_and_restored_by_nobody(
    make_host: MakeHost, supervise: Supervise, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host(VGPU)
    host.fail("nvmlDeviceSetComputeMode", "not_supported", gpu=0)
    made = supervise(host).start()
    made.rescan()
    assert made.supervisor.reconciliation.settings_due() is None
    assert [change.kind for change in made.reload()] == []
    assert made.supervisor.reconciliation.settings_due() is None
    assert made.available == 8
    assert caplog.text.count("cannot be set") == 1
    made.stop()
    assert modes(host) == ["default", "default"]
    assert "cannot be restored" not in caplog.text
    store = Store(made.paths)
    assert Originals(store).of("compute_mode") == {}
    store.close()


def test_a_gpu_that_does_not_report_its_mode_serves_and_keeps_it(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(VGPU)
    host.fail("nvmlDeviceGetComputeMode", "not_supported", gpu=0)
    made = supervise(host).start()
    assert made.available == 8
    assert modes(host) == ["default", "exclusive_process"]
    (warning,) = made.warnings
    assert warning.reason.code == COMPUTE_MODE_UNSUPPORTED
    assert "is not changed, because the driver does not report it" in warning.text


def test_keep_in_an_entry_leaves_only_that_gpu_alone(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(VGPU, KEEPS, 2)
    assert modes(host) == ["default", "exclusive_process"]
    assert made.available == 4
    assert made.warnings == []
    host.divide(2, KEEPS)
    changes = {(change.subject, change.before, change.after) for change in made.reload()}
    assert changes == {
        ("00:06.0", "original", "Exclusive_Process"),
        ("00:07.0", "Exclusive_Process", "original"),
    }


def test_keep_in_an_entry_silences_the_warning_of_an_unsupported_mode(
    start_supervised: StartSupervised,
) -> None:
    host, made = start_supervised(VGPU, KEEPS, 2)
    host.fail("nvmlDeviceSetComputeMode", "not_supported", gpu=0)
    assert made.start_next().warnings == []


def test_a_gpu_that_was_lost_meanwhile_has_not_refused_its_mode(
    make_host: MakeHost, supervise: Supervise
) -> None:
    host = make_host(TWO)
    host.fail("nvmlDeviceSetComputeMode", "gpu_is_lost", gpu=0, times=1)
    made = supervise(host).start()
    made.rescan()
    made.reconcile()
    assert made.snapshot.plan.unavailable == {}
    assert modes(host) == ["exclusive_process"] * 2


def test_a_gpu_that_is_prohibited_for_good_is_unavailable(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host(VGPU)
    host.gpus[0].compute_mode = "prohibited"
    host.fail("nvmlDeviceSetComputeMode", "not_supported", gpu=0)
    made = supervise(host).start()
    made.rescan()
    assert made.available == 4
    (reason,) = made.snapshot.plan.unavailable.values()
    assert "Prohibited, and the driver does not support changing it" in reason


def test_the_mode_of_a_gpu_that_is_not_there_waits(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.gpus[1].bind("vfio-pci")
    host.divide(4)
    made.rescan()
    made.reload()
    made.rescan()
    assert made.supervisor.reconciliation.settings_due() is None
    assert "cannot be restored" not in caplog.text


def test_when_no_gpus_mode_can_be_set_nothing_is_started(make_host: MakeHost, supervise: Supervise) -> None:
    host = make_host(TWO)
    host.fail("nvmlDeviceSetComputeMode", "no_permission")
    made = supervise(host)
    with pytest.raises(DriverError) as caught:
        made.supervisor.start(time.monotonic())
    assert caught.value.message == "no GPU's compute mode can be set: NVML: permission denied"
    assert caught.value.hint == "run as root: systemctl start yunion-mps-daemon"
    assert not (host.root / "tmp/nvidia-mps/log/control.log").exists()
    assert modes(host) == ["default", "prohibited"]


def test_a_mode_that_another_program_changes_is_warned_of(start_supervised: StartSupervised) -> None:
    host, made = start_supervised(TWO)
    assert made.warnings == []
    host.gpus[0].compute_mode = "default"
    made.rescan()
    (warning,) = made.warnings
    assert warning.text == (
        "GPU 00:06.0 (Tesla V100-SXM2-16GB): its compute mode is Default, not Exclusive_Process; "
        "a process that bypasses the control daemon could use it without limits"
    )


def test_a_gpu_that_is_lost_at_the_stop_is_restored_by_the_next_daemon(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO)
    host.gpus[1].lose()
    made.stop()
    assert "GPU 00:07.0: its compute mode cannot be restored now" in caplog.text
    host.gpus[1].restore()
    assert modes(host) == ["default", "exclusive_process"]
    made.start_next().stop()
    assert modes(host) == ["default", "prohibited"]


def test_no_mode_is_set_after_a_stop_has_begun(start_supervised: StartSupervised) -> None:
    """A poll of the GPUs may be under way on a thread, and come to its end after the modes were restored."""
    host, made = start_supervised(V100)
    host.gpus[0].compute_mode = "default"
    made.rescan()
    settings, nvml = made.supervisor.settings, made.supervisor.nvml
    due = made.supervisor.reconciliation.settings_due()
    assert due
    decision = settings.decide(due, settings.observe(due, nvml))
    assert [step.target for step in decision.steps.values()] == ["Exclusive_Process"]
    made.stop()
    results = settings.carry_out(decision, nvml)
    assert results.has_ended
    assert settings.note(due, decision, results, 0.0) == []
    assert modes(host) == ["default"]
