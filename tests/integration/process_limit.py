"""A real limit of processes and threads (the pids controller, cgroups(7)) for one process of a test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def no_more_processes(pid: int) -> Iterator[None]:
    """Let the process start no other process and no thread; skips the test if there is no such controller."""
    root = _controller()
    group = root / f"yunion-mps-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs the pids controller of control groups: {error}")
    try:
        (group / "pids.max").write_text("1")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (root / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def _controller() -> Path:
    """Where control groups with a limit of processes can be made, in either version."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        control = Path(place) / "cgroup.subtree_control"
        if (kind == "cgroup" and "pids" in options.split(",")) or (
            kind == "cgroup2" and "pids" in control.read_text().split()
        ):
            return Path(place)
    pytest.skip("needs the pids controller of control groups")
