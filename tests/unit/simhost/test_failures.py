"""What can go wrong on a simulated host, as the programs on it see it."""

from __future__ import annotations

import re
import sys

import pytest

from unit.simhost.conftest import MakeHost


def test_pattern_and_any_version_of_a_call_fail(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        host.fail("nvmlDeviceGetPciInfo_v2", "unknown")
        with pytest.raises(n.NVMLError_Unknown):
            n.nvmlDeviceGetPciInfo_v3(handle)
        host.clear()
        host.fail("nvmlDeviceGet*", "no_permission")
        for call in (n.nvmlDeviceGetPciInfo, n.nvmlDeviceGetUUID, n.nvmlDeviceGetMemoryInfo):
            with pytest.raises(n.NVMLError_NoPermission):
                call(handle)


def test_several_processes_write_at_once_and_nothing_is_lost(make_host: MakeHost) -> None:
    host = make_host()
    program = """
    import sys
    n.nvmlInit()
    handle = n.nvmlDeviceGetHandleByIndex(0)
    failed = 0
    for _ in range(200):
        n.nvmlDeviceSetComputeMode(handle, 3)
        try:
            n.nvmlDeviceGetName(handle)
        except n.NVMLError_InUse:
            failed += 1
        n.nvmlDeviceSetComputeMode(handle, 0)
    print(failed)
    """
    host.fail("nvmlDeviceGetName", "in_use", times=150)
    source = "import pynvml as n\n" + re.sub(r"(?m)^    ", "", program)
    running = [host.popen([sys.executable, "-I", "-c", source]) for _ in range(2)]
    for pid in range(1, 21):
        host.gpus[0].add_process(pid, pid)
    failed = [int(process.communicate(timeout=30)[0]) for process in running]
    assert sum(failed) == 150  # each of the failures was met exactly once
    assert len(host.gpus[0].show()["processes"]) == 20
    assert host.gpus[0].compute_mode == "default"
