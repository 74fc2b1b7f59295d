"""What can go wrong on a simulated host, as the programs on it see it."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from simhost import DescriptionError
from simhost.catalog import ERRORS
from unit.simhost.conftest import MakeHost

TWO = [{"kind": "t4", "count": 2}]


def handles(n: ModuleType) -> list[Any]:
    n.nvmlInit()
    return [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]


def test_every_error_reaches_pynvml(make_host: MakeHost) -> None:
    host = make_host(TWO)
    with host.pynvml() as n:
        first, second = handles(n)
        for error, number in ERRORS.items():
            if error != "success":
                host.fail("nvmlDeviceGetUUID", error, gpu=0)
                with pytest.raises(n.NVMLError) as caught:
                    n.nvmlDeviceGetUUID(first)
                assert caught.value.value == number
                assert n.nvmlDeviceGetUUID(second) == host.gpus[1].uuid
                host.clear()
        assert n.nvmlDeviceGetUUID(first) == host.gpus[0].uuid


def test_failure_ends_after_its_times(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        (handle,) = handles(n)
        host.fail("nvmlDeviceGetName", "timeout", times=2)
        for _ in range(2):
            with pytest.raises(n.NVMLError_Timeout):
                n.nvmlDeviceGetName(handle)
        assert n.nvmlDeviceGetName(handle) == "Tesla P40"
        assert host.show()["failures"] == []


def test_pattern_and_any_version_of_a_call_fail(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        (handle,) = handles(n)
        host.fail("nvmlDeviceGetPciInfo", "unknown")
        with pytest.raises(n.NVMLError_Unknown):
            n.nvmlDeviceGetPciInfo_v3(handle)
        host.clear("nvmlDeviceGetPciInfo_v2")
        host.fail("nvmlDeviceGet*", "no_permission")
        for call in (n.nvmlDeviceGetPciInfo, n.nvmlDeviceGetUUID, n.nvmlDeviceGetMemoryInfo):
            with pytest.raises(n.NVMLError_NoPermission):
                call(handle)


def test_hanging_call_goes_on_when_cleared(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n, ThreadPoolExecutor() as pool:
        (handle,) = handles(n)
        host.fail("nvmlDeviceGetUUID", "timeout", delay_ms=60_000)
        call = pool.submit(n.nvmlDeviceGetUUID, handle)
        assert n.nvmlDeviceGetName(handle) == "Tesla P40"  # others are not held up
        assert not call.done()
        host.clear()
        assert call.result(timeout=60) == host.gpus[0].uuid


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


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"call": "nvmlInit", "error": "gone"}, "failure.error: must be one of: success, "),
        ({"call": "cuInit", "error": "unknown"}, "failure.call: must be an NVML call"),
        (
            {"call": "nvmlInit", "error": "unknown", "gpu": 1},
            "failure.gpu: must be a whole number from 0 to 0",
        ),
    ],
)
def test_a_wrong_failure_is_refused(make_host: MakeHost, rule: dict[str, Any], words: str) -> None:
    with pytest.raises(DescriptionError, match=re.escape(words)):
        make_host().fail(**rule)
