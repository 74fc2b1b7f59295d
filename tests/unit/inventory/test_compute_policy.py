"""Answers of nvidia-smi compute-policy that NVIDIA's own program does not give here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.reasons import DRIVER_HUNG, TIME_SLICE_REFUSED
from yunion_mps.inventory import compute_policy
from yunion_mps.inventory.compute_policy import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    NVIDIA_SMI,
    HangGuard,
    set_time_slice,
    time_slice_of,
)


@pytest.fixture(autouse=True)
def hangs_are_forgotten() -> Iterator[None]:
    yield
    NVIDIA_SMI.note_answer()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo '|  0   Timeslice       Endless         |'", "nvidia-smi does not report the time slice"),
        ("echo 'No policy'", "nvidia-smi does not report the time slice"),
        ("exit 7", "nvidia-smi: exit status 7"),
        ("echo; echo ' Broken '; exit 7", "nvidia-smi: Broken"),
        ("echo 'Failed for GPU 0 : Not Supported'; exit 3", "nvidia-smi: Not Supported"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, cause: str
) -> None:
    stand_in(tmp_path, monkeypatch, script)
    with pytest.raises(DriverError) as caught:
        time_slice_of("GPU-1")
    assert (caught.value.message, caught.value.code) == (cause, TIME_SLICE_REFUSED)


def test_a_time_slice_that_does_not_take_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "echo '|  0   Timeslice       Long         |'")
    set_time_slice("GPU-1", "long")
    with pytest.raises(DriverError, match="the time slice is long after it was set to short"):
        set_time_slice("GPU-1", "short")


def test_a_program_that_hangs_is_not_run_for_the_next_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute_policy, "TIMEOUT_S", 0.5)
    stand_in(tmp_path, monkeypatch, "exec /bin/sleep 100")
    errors = []
    for uuid in ("GPU-1", "GPU-2"):
        with pytest.raises(DriverError) as caught:
            time_slice_of(uuid)
        errors.append(caught.value)
    assert [error.code for error in errors] == [DRIVER_HUNG, DRIVER_HUNG]
    assert [error.message for error in errors] == ["nvidia-smi did not answer within 0.5 s"] * 2
    stand_in(tmp_path, monkeypatch, "echo '|  0   Timeslice       Long         |'")
    NVIDIA_SMI.try_again()
    assert time_slice_of("GPU-2") == "long"
    assert not NVIDIA_SMI.is_pausing


def test_the_pause_after_a_hang_grows_until_the_program_answers() -> None:
    now_s = 1000.0
    guard = HangGuard(lambda: now_s)
    assert not guard.is_pausing
    pauses_s = []
    for _ in range(8):
        guard.note_hang()
        begun_s = now_s
        while guard.is_pausing:
            now_s += FIRST_PAUSE_S
        pauses_s.append(now_s - begun_s)
    assert pauses_s == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, LAST_PAUSE_S, LAST_PAUSE_S]
    guard.note_answer()
    guard.note_hang()
    now_s += FIRST_PAUSE_S
    assert not guard.is_pausing


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
