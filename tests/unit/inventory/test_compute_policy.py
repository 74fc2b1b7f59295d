"""Answers of nvidia-smi compute-policy that NVIDIA's own program does not give here."""

from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.reasons import TIME_SLICE_REFUSED
from yunion_mps.inventory.compute_policy import set_time_slice, time_slice_of


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


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
