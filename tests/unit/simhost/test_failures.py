"""What can go wrong on a simulated host, as the programs on it see it."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from simhost import DescriptionError
from simhost.catalog import ERRORS
from unit.simhost.conftest import MakeHost, RunPython

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


@pytest.mark.parametrize(
    "error", ["driver_not_loaded", "lib_rm_version_mismatch", "no_permission", "unknown"]
)
def test_init_fails_from_the_start(make_host: MakeHost, python: RunPython, error: str) -> None:
    host = make_host({"gpus": TWO, "failures": [{"call": "nvmlInit", "error": error}]})
    program = """
    try:
        n.nvmlInit()
    except n.NVMLError as error:
        print(error.value)
    """
    assert python(host, program) == f"{ERRORS[error]}\n"


def test_missing_library_is_library_not_found(make_host: MakeHost, python: RunPython) -> None:
    host = make_host()
    host.hide_library()
    program = """
    try:
        n.nvmlInit()
    except n.NVMLError_LibraryNotFound:
        print("not found")
    """
    assert python(host, program) == "not found\n"


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


def test_slow_call_succeeds(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        (handle,) = handles(n)
        host.fail("nvmlDeviceGetUUID", "success", delay_ms=30, times=1)
        assert n.nvmlDeviceGetUUID(handle) == host.gpus[0].uuid


def test_lost_gpu_fails_and_comes_back_in_a_running_program(make_host: MakeHost) -> None:
    host = make_host(TWO)
    with host.pynvml() as n:
        first, second = handles(n)
        host.gpus[1].lose()
        for call in (n.nvmlDeviceGetUUID, n.nvmlDeviceGetComputeMode, n.nvmlDeviceGetMemoryInfo):
            with pytest.raises(n.NVMLError_GpuIsLost):
                call(second)
        for look_up, name in (
            (n.nvmlDeviceGetHandleByIndex, 1),
            (n.nvmlDeviceGetHandleByUUID, host.gpus[1].uuid),
            (n.nvmlDeviceGetHandleByPciBusId, "0000:00:07.0"),
        ):
            with pytest.raises(n.NVMLError_GpuIsLost):
                look_up(name)
        assert n.nvmlDeviceGetCount() == 2
        assert n.nvmlDeviceGetUUID(first) == host.gpus[0].uuid
        host.gpus[1].restore()
        assert n.nvmlDeviceGetUUID(second) == host.gpus[1].uuid


def test_lost_gpu_may_still_be_looked_up(make_host: MakeHost) -> None:
    host = make_host(TWO)
    with host.pynvml() as n:
        host.gpus[0].lose(lookup="success")
        first, _ = handles(n)
        with pytest.raises(n.NVMLError_GpuIsLost):
            n.nvmlDeviceGetName(first)


def test_removed_gpu_is_gone_after_the_next_init(make_host: MakeHost) -> None:
    host = make_host(TWO)
    with host.pynvml() as n:
        first, second = handles(n)
        host.gpus[0].remove()
        assert n.nvmlDeviceGetCount() == 2
        with pytest.raises(n.NVMLError_GpuIsLost):
            n.nvmlDeviceGetUUID(first)
        assert not (host.root / "sys/bus/pci/devices/0000:00:06.0").exists()
        assert not (host.root / "dev/dri/renderD128").exists()
        n.nvmlShutdown()
        (only,) = handles(n)
        assert n.nvmlDeviceGetUUID(only) == host.gpus[1].uuid == n.nvmlDeviceGetUUID(second)
        n.nvmlShutdown()
        host.gpus[0].restore()
        assert [n.nvmlDeviceGetUUID(handle) for handle in handles(n)] == [gpu.uuid for gpu in host.gpus]
        assert (host.root / "dev/dri/by-path/pci-0000:00:06.0-render").exists()


def watch(n: ModuleType, watched: list[Any]) -> object:
    events = n.nvmlEventSetCreate()
    for handle in watched:
        n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, events)
    return events


def test_xid_wakes_the_one_who_waits(make_host: MakeHost) -> None:
    host = make_host(TWO)
    with host.pynvml() as n:
        events = watch(n, handles(n))
        waker = threading.Timer(0.05, host.gpus[1].xid, [31])
        waker.start()
        event = n.nvmlEventSetWait_v2(events, 10_000)
        waker.join()
        assert (n.nvmlDeviceGetIndex(event.device), event.eventType, event.eventData) == (1, 8, 31)
        with pytest.raises(n.NVMLError_Timeout):
            n.nvmlEventSetWait_v2(events, 1)
        n.nvmlEventSetFree(events)


def test_losing_a_gpu_reports_xid_79_then_the_loss(make_host: MakeHost) -> None:
    host = make_host(TWO)
    with host.pynvml() as n:
        first, _ = handles(n)
        events = watch(n, [first])
        host.gpus[1].xid(13)  # not watched
        host.gpus[0].lose()
        assert n.nvmlEventSetWait_v2(events, 1000).eventData == 79
        with pytest.raises(n.NVMLError_GpuIsLost):
            n.nvmlEventSetWait_v2(events, 1000)


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
