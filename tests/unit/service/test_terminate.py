"""Which processes are never ended as jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from yunion_mps.errors import NotAllowedError
from yunion_mps.host.proc import is_kernel_thread
from yunion_mps.service.terminate import _refuse_unless_job


def test_the_first_process_and_the_daemon_are_not_jobs() -> None:
    for pid, what in ((1, "the init process"), (os.getpid(), "this daemon")):
        with pytest.raises(NotAllowedError) as caught:
            _refuse_unless_job(pid, [])
        assert caught.value.message == f"PID {pid} is {what}, not a job"


@pytest.mark.parametrize(("flags", "is_thread"), [(0x208040, True), (0x400100, False)])
def test_a_kernel_thread_is_recognised_by_its_flags(tmp_path: Path, flags: int, is_thread: bool) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2/stat").write_text(f"2 (kthreadd) S 0 0 0 0 -1 {flags} 0 0 0\n")
    assert is_kernel_thread(2, str(tmp_path)) is is_thread
