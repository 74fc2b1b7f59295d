"""pynvml (NVIDIA's nvidia-ml-py), unmodified, on a simulated host."""

from __future__ import annotations

import pytest

from simhost.catalog import ERRORS
from unit.simhost.conftest import MakeHost, RunPython


def test_versions_are_the_descriptions(make_host: MakeHost, python: RunPython) -> None:
    host = make_host({"driver": {"version": "550.163.01", "cuda": "12.4"}, "gpus": [{"kind": "l4"}]})
    assert python(
        host,
        """
        n.nvmlInit()
        print(n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion())
        print(n.nvmlSystemGetCudaDriverVersion(), n.nvmlSystemGetCudaDriverVersion_v2())
        """,
    ).split() == ["550.163.01", "12.550.163.01", "12040", "12040"]


def test_calls_before_init_and_after_shutdown_are_uninitialized(
    make_host: MakeHost, python: RunPython
) -> None:
    program = """
    def count():
        try:
            print(n.nvmlDeviceGetCount())
        except n.NVMLError as error:
            print(type(error).__name__)
    n._LoadNvmlLibrary(); count()
    n.nvmlInit(); n.nvmlInit(); count()
    n.nvmlShutdown(); count()
    n.nvmlShutdown(); count()
    """
    assert python(make_host(), program).split() == [
        "NVMLError_Uninitialized", "1", "1", "NVMLError_Uninitialized",
    ]  # fmt: skip


def test_memory_counts_processes_and_the_reserved_part(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4", "processes": [{"pid": 5, "used_mib": 1000}]}])
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        one, two = n.nvmlDeviceGetMemoryInfo(handle), n.nvmlDeviceGetMemoryInfo(handle, n.nvmlMemory_v2)
        assert (two.total >> 20, two.reserved >> 20, two.used >> 20) == (15360, 120, 1000)
        assert (one.used, one.free) == (two.used + two.reserved, two.free)


def test_processes_come_and_go_while_a_program_runs(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)

        def listed() -> tuple[list[object], list[object], list[object]]:
            return tuple(  # type: ignore[return-value]
                [(p.pid, p.usedGpuMemory and p.usedGpuMemory >> 20) for p in call(handle)]
                for call in (
                    n.nvmlDeviceGetComputeRunningProcesses,
                    n.nvmlDeviceGetMPSComputeRunningProcesses,
                    n.nvmlDeviceGetGraphicsRunningProcesses,
                )
            )

        assert listed() == ([], [], [])
        host.gpus[0].add_process(10, 100)
        host.gpus[0].add_process(11, None, "M+C")
        host.gpus[0].add_process(12, 7, "G")
        assert listed() == ([(10, 100), (11, None)], [(11, None)], [(12, 7)])
        host.gpus[0].add_process(10, 200)
        assert host.gpus[0].remove_process(11)
        assert not host.gpus[0].remove_process(11)
        assert listed() == ([(10, 200)], [], [(12, 7)])


def test_what_a_gpu_does_is_measured(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "processes": [{"pid": 5, "used_mib": 9, "sm": 30}]}])
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)

        def measured() -> tuple[int, int, int, int]:
            return (
                n.nvmlDeviceGetUtilizationRates(handle).gpu,
                n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
                n.nvmlDeviceGetPowerUsage(handle),
                n.nvmlDeviceGetEnforcedPowerLimit(handle),
            )

        assert measured() == (30, 32, 87_500, 700_000)
        host.gpus[0].load(97, 71, 512.5)
        assert measured() == (97, 71, 512_500, 700_000)


def test_processes_have_samples_newer_than_the_last_seen(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100"}, {"kind": "tesla-k80"}])
    with host.pynvml() as n:
        n.nvmlInit()
        handle, kepler = (n.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
        host.gpus[0].add_process(10, 100)
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetProcessUtilization(handle, 0)
        host.gpus[0].add_process(10, 100, sm=0)
        host.gpus[0].add_process(11, 100, "M+C", sm=64)
        samples = n.nvmlDeviceGetProcessUtilization(handle, 0)
        assert [(one.pid, one.smUtil) for one in samples] == [(10, 0), (11, 64)]
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetProcessUtilization(handle, samples[0].timeStamp + 3_600_000_000)
        with pytest.raises(n.NVMLError_NotSupported):
            n.nvmlDeviceGetProcessUtilization(kepler, 0)


def test_compute_mode_needs_root(make_host: MakeHost, python: RunPython) -> None:
    program = """
    import os
    n.nvmlInit()
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        n.nvmlDeviceSetComputeMode(n.nvmlDeviceGetHandleByIndex(0), 3)
    except n.NVMLError_NoPermission:
        print("refused")
    """
    assert python(make_host(), program) == "refused\n"


def test_mig_mode_is_switched_while_a_program_runs(make_host: MakeHost) -> None:
    host = make_host([{"kind": "a100"}])
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        assert n.nvmlDeviceGetMigMode(handle) == [0, 0]
        host.gpus[0].mig = True
        assert n.nvmlDeviceGetMigMode(handle) == [1, 1]
        with pytest.raises(n.NVMLError_NotSupported):
            n.nvmlDeviceSetComputeMode(handle, n.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)


def test_what_does_not_exist_is_not_found(make_host: MakeHost) -> None:
    with make_host().pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetHandleByUUID("GPU-00000000-0000-0000-0000-000000000000")
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetHandleByPciBusId("0000:00:1f.0")
        with pytest.raises(n.NVMLError_InvalidArgument):
            n.nvmlDeviceGetHandleByIndex(1)
        with pytest.raises(n.NVMLError_NotSupported):
            n.nvmlDeviceGetSerial(handle)
        with pytest.raises(n.NVMLError_FunctionNotFound):
            n.nvmlDeviceGetNvLinkState(handle, 0)


def test_error_words_exist_for_every_number(make_host: MakeHost) -> None:
    with make_host().pynvml() as n:
        words = {number: n.nvmlErrorString(number) for number in ERRORS.values()}
    assert len(set(words.values())) == len(words)
