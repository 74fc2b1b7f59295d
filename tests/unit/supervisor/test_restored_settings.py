"""Stop and `--restore` on a host whose GPUs have gone, come back or been given to another driver."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
from yunion_mps.core.reasons import TIME_SLICE_REFUSED
from yunion_mps.inventory import compute_policy
from yunion_mps.inventory.compute_policy import NVIDIA_SMI
from yunion_mps.inventory.gpu_events import EventWatch
from yunion_mps.service import offline

from simhost import SimHost
from simhost.host import SHARED
from unit.supervised import StartSupervised, Supervised, modes

TWO = [{"kind": "v100"}, {"kind": "v100"}]
VFIO = "the GPU is bound to the driver vfio-pci, so the NVIDIA driver cannot use it"
ONCE_BOUND = "once it is bound to the NVIDIA driver again, run: yunion-mps-daemon --restore"
IF_BACK = "if it comes back, run: yunion-mps-daemon --restore"


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def about(caplog: pytest.LogCaptureFixture, gpu: str = "00:06.0") -> list[str]:
    """The messages about this GPU's settings that are not restored."""
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if gpu in text and re.search("cannot be restored|differs", text)]


def share_the_first(host: SimHost, made: Supervised) -> None:
    """Time-slice the first GPU, with a time slice, and divide the second."""
    slices = f"{SHARED[:-1]}2; time_slice: long"
    host.divide(slices, 2)
    made.reload()


@pytest.mark.parametrize("is_polled", [True, False])
def test_a_stop_says_which_driver_has_a_gpu_that_it_cannot_restore(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture, is_polled: bool
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    host.gpus[0].bind("vfio-pci")
    if is_polled:
        made.rescan()
    made.stop()
    assert modes(host)[1] == "default"
    assert about(caplog) == [f"GPU 00:06.0: its compute mode cannot be restored now: {VFIO}; {ONCE_BOUND}"]


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_stop_restores_a_gpu_that_has_just_come_back(
    start_supervised: StartSupervised, is_watched: bool
) -> None:
    host, made = start_supervised(TWO, 4, 4)
    assert made.supervisor.nvml
    if is_watched:  # as in the daemon: the thread that waits in NVML ends meanwhile
        watch = EventWatch(made.supervisor.nvml, lambda _: None, wait_s=0.2)
        watch.start()
        watch.stop()
    host.gpus[0].remove()
    made.rescan()
    host.gpus[0].restore()
    made.stop()
    assert modes(host) == ["default", "default"]


def test_a_gpu_that_is_not_there_has_one_line_for_all_its_settings(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised([{"kind": "v100", "compute_mode": "exclusive_process"}, {"kind": "v100"}])
    share_the_first(host, made)
    assert host.gpus[0].time_slice == "long"
    host.gpus[0].bind("vfio-pci")
    what = "GPU 00:06.0: its compute mode and time slice cannot be restored now"
    made.end()
    assert about(caplog) == [f"{what}: {VFIO}; {ONCE_BOUND}"]
    for _ in range(2):
        caplog.clear()
        assert offline.restore(made.paths) == 0
        assert about(caplog) == [f"{what}: {VFIO}; {ONCE_BOUND}"]
    host.gpus[0].remove()
    caplog.clear()
    assert offline.restore(made.paths) == 0
    assert about(caplog) == [f"{what}: the GPU is no longer present; {IF_BACK}"]
    host.gpus[0].restore()
    assert offline.restore(made.paths) == 0
    assert (modes(host), host.gpus[0].time_slice) == (["exclusive_process", "default"], "default")


def test_restore_tells_lost_gpus_from_missing_ones(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised([{"kind": "v100", "compute_mode": "exclusive_process"}, {"kind": "v100"}])
    share_the_first(host, made)
    host.gpus[0].lose()
    made.end()
    caplog.clear()
    assert offline.restore(made.paths) == 1
    uuid = host.gpus[0].uuid
    reset = f"reset the GPU (nvidia-smi --gpu-reset -i {uuid}) or reboot the host, then restore it"
    commands = {
        "compute mode": f"nvidia-smi -i {uuid} -c EXCLUSIVE_PROCESS",
        "time slice": f"nvidia-smi compute-policy -i {uuid} --set-timeslice 0",
    }
    assert about(caplog) == [
        f"the {label} of GPU 00:06.0 differs from the original; {reset}: {command}"
        for label, command in commands.items()
    ]


def test_without_the_driver_restore_still_names_the_other_driver(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO[:1], 4)
    made.stop(restore=False)
    made.supervisor.release()
    made.preflight.close()
    host.gpus[0].bind("vfio-pci")
    host.unload_driver()
    assert offline.restore(made.paths) == 0
    assert about(caplog) == [f"GPU 00:06.0: its compute mode cannot be restored now: {VFIO}; {ONCE_BOUND}"]
    assert "compute modes cannot be restored" not in caplog.text


def test_a_gpu_that_nothing_names_may_be_the_one_that_another_driver_has(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO)
    host.gpus[0].bind("vfio-pci")
    made.end()
    os.unlink(made.paths.served_gpus)
    caplog.clear()
    assert offline.restore(made.paths) == 0
    what = f"{host.gpus[0].uuid}: its compute mode cannot be restored now: the driver no longer reports "
    assert about(caplog) == [f"{what}this GPU; it may be GPU 00:06.0: {VFIO}; {IF_BACK}"]


def test_the_time_slice_of_a_missing_gpu_is_not_tried_at_each_poll(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised(TWO)
    share_the_first(host, made)
    host.gpus[0].bind("vfio-pci")
    made.rescan()
    host.divide(2)
    made.reload()
    made.rescan()
    assert made.supervisor.reconciliation.settings_due() is None
    assert "nvidia-smi" not in caplog.text


def test_nvidia_smi_that_hangs_is_run_once_for_all_gpus_and_polls(
    start_supervised: StartSupervised, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, made = start_supervised([{"kind": "v100", "count": 3}])
    host.divide(*[f"{SHARED}; time_slice: long"] * 3)
    made.reload()
    monkeypatch.setattr(compute_policy, "TIMEOUT_S", 0.5)
    runs = hang_nvidia_smi(monkeypatch, tmp_path)
    host.divide(*[SHARED] * 3)
    made.reload()
    for _ in range(3):
        made.bring_about()
    assert runs.read_text().splitlines() == ["run"], "not for each GPU, nor at each poll"
    assert [gpu.time_slice for gpu in host.gpus] == ["long"] * 3
    (tmp_path / "nvidia-smi").unlink()
    made.stop()
    assert [gpu.time_slice for gpu in host.gpus] == ["default"] * 3, "a stop tries it again"
    assert not NVIDIA_SMI.is_pausing


def test_nvidia_smi_that_hangs_again_and_again_is_one_event_for_each_gpu(
    start_supervised: StartSupervised,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, made = start_supervised(TWO, SHARED, SHARED)
    monkeypatch.setattr(compute_policy, "TIMEOUT_S", 0.5)
    hang_nvidia_smi(monkeypatch, tmp_path)
    host.divide(*[f"{SHARED}; time_slice: long"] * 2)
    made.reload()
    for _ in range(2):
        made.poll_later()  # nvidia-smi is not run
        NVIDIA_SMI.try_again()
        made.poll_later()
    NVIDIA_SMI.note_answer()
    events = [event.subject for event in made.events if event.code == TIME_SLICE_REFUSED]
    assert events == ["00:06.0", "00:07.0"]
    assert caplog.text.count("time slice cannot be set: nvidia-smi did not answer within 0.5 s") == 2


def hang_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Have nvidia-smi hang; return the file that gets a line at each run."""
    program, runs = folder / "nvidia-smi", folder / "runs"
    runs.touch()
    program.write_text(f"#!/bin/sh\necho run >>{runs}\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return runs


def test_a_stop_says_why_the_layout_of_a_missing_gpu_is_not_restored(
    start_supervised: StartSupervised, caplog: pytest.LogCaptureFixture
) -> None:
    host, made = start_supervised([{"kind": "h100"}, {"kind": "v100"}])
    host.divide("mig: all-1g.10gb; mig_restore: true", 2)
    made.reload()
    made.bring_about()
    assert host.gpus[0].mig
    host.gpus[0].bind("vfio-pci")
    made.stop()
    of_layout = [text for text in about(caplog) if "MIG layout" in text]
    assert of_layout == [f"GPU 00:06.0: its MIG layout cannot be restored now: {VFIO}; {ONCE_BOUND}"]
    assert "reset it" not in caplog.text
