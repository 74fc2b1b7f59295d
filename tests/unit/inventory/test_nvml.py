"""NVML: a deadline for a driver that hangs, compute modes that are set and read back, and the load."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.reasons import (
    COMPUTE_MODE_UNSUPPORTED,
    DRIVER_ERROR,
    DRIVER_HUNG,
    DRIVER_NOT_LOADED,
    GPU_ERROR,
    MIG_ENABLED,
    hint_of,
)
from yunion_mps.inventory import nvml as nvml_module
from yunion_mps.inventory.driver import Deadline, call_driver, replaced_library
from yunion_mps.inventory.nvml import GpuLoad, Load, Nvml
from yunion_mps.inventory.scan import not_found

from integration.daemon_host import eventually
from unit.inventory.conftest import OpenedHost, OpenHost


def test_results_and_errors_of_a_call_reach_its_caller() -> None:
    deadline = Deadline()
    assert deadline.call(lambda: 4711) == 4711
    with pytest.raises(ZeroDivisionError):
        deadline.call(lambda: 1 // 0)


def test_no_call_is_made_until_one_that_hangs_has_ended() -> None:
    deadline, gate = Deadline(timeout_s=0.05), threading.Event()
    with pytest.raises(DriverError, match=r"^the NVIDIA driver did not answer within 0.05 s$"):
        deadline.call(gate.wait)
    with pytest.raises(DriverError, match=r"^the NVIDIA driver still does not answer an earlier call$"):
        deadline.call(lambda: 4711)
    gate.set()
    eventually(lambda: answers(deadline))


def test_work_that_was_given_up_makes_no_call_after_the_one_that_hung() -> None:
    deadline, gate, ended = Deadline(timeout_s=0.05), threading.Event(), threading.Event()
    made: list[str] = []

    def work() -> None:
        try:
            call_driver(gate.wait)
            call_driver(made.append, "destroyed")
        finally:
            ended.set()

    with pytest.raises(DriverError):
        deadline.call(work)
    gate.set()
    assert ended.wait(60)
    assert made == []
    eventually(lambda: answers(deadline))
    deadline.call(lambda: call_driver(made.append, "next"))
    assert made == ["next"], "work on the same thread is another's"


def answers(deadline: Deadline) -> bool:
    try:
        return deadline.call(lambda: 4711) == 4711
    except DriverError:
        return False


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("gpus", "nvmlDeviceGetCount"),
        ("gpus", "nvmlDeviceGetComputeMode"),
        ("load", "nvmlDeviceGetPowerUsage"),
        ("load", "nvmlDeviceGetProcessUtilization"),
    ],
)
def test_a_driver_that_hangs_in_a_call_is_named(open_host: OpenHost, method: str, call: str) -> None:
    host = open_host()
    host.sim.fail(call, "success", delay_ms=3_600_000)
    host.nvml.deadline = Deadline(timeout_s=0.05)
    with pytest.raises(DriverError) as caught:
        host.nvml.gpus() if method == "gpus" else read(host)
    assert caught.value.message == "the NVIDIA driver did not answer within 0.05 s"
    assert caught.value.hint == hint_of(DRIVER_HUNG)
    host.nvml.close()
    host.sim.clear()


def test_a_driver_that_hangs_at_its_first_call_is_named(open_host: OpenHost) -> None:
    host = open_host()
    host.sim.fail("nvmlInit", "success", delay_ms=3_600_000)
    with pytest.raises(DriverError, match=r"^the NVIDIA driver did not answer within 0.05 s$"):
        Nvml(timeout_s=0.05)
    host.sim.clear()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may set a compute mode")


@needs_root
@pytest.mark.parametrize(
    ("mode", "word"),
    [("Exclusive_Process", "exclusive_process"), ("Prohibited", "prohibited"), ("Default", "default")],
)
def test_a_compute_mode_is_set_on_the_gpu_with_the_uuid_and_on_no_other(
    open_host: OpenHost, mode: str, word: str
) -> None:
    host = open_host([{"kind": "t4", "count": 2}])
    host.nvml.set_compute_mode(host.sim.gpus[1].uuid, mode)
    assert [gpu.compute_mode for gpu in host.sim.gpus] == ["default", word]
    assert host.nvml.compute_mode_of(host.sim.gpus[1].uuid) == mode
    host.nvml.restore_compute_mode(host.sim.gpus[1].uuid, "Default")
    assert host.sim.gpus[1].compute_mode == "default"


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        ("no_permission", "NVML: permission denied", DRIVER_ERROR),
        (
            "not_supported",
            "the driver does not support changing the compute mode of this GPU",
            COMPUTE_MODE_UNSUPPORTED,
        ),
        ("unknown", "NVML error: Unknown Error", DRIVER_ERROR),
    ],
)
def test_a_compute_mode_that_cannot_be_set_is_an_error(
    open_host: OpenHost, error: str, message: str, code: str
) -> None:
    host = open_host()
    host.sim.fail("nvmlDeviceSetComputeMode", error)
    with pytest.raises(DriverError, match=message) as caught:
        host.nvml.set_compute_mode(host.sim.gpus[0].uuid, "Exclusive_Process")
    assert caught.value.code == code
    assert host.sim.gpus[0].compute_mode == "default"


@needs_root
def test_a_mode_that_only_a_newer_version_knows_is_an_error(open_host: OpenHost) -> None:
    """The mode of a record; the other GPUs are restored."""
    host = open_host()
    with pytest.raises(DriverError, match="the compute mode SHARED_V2 is not known to this version"):
        host.nvml.set_compute_mode(host.sim.gpus[0].uuid, "SHARED_V2")


@needs_root
def test_a_mode_that_mig_mode_forbids_is_not_one_that_nothing_can_change(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "mig": True}])
    with pytest.raises(DriverError, match="in MIG mode") as caught:
        host.nvml.set_compute_mode(host.sim.gpus[0].uuid, "Exclusive_Process")
    assert caught.value.code == MIG_ENABLED


@needs_root
def test_a_compute_mode_that_does_not_read_back_is_an_error(open_host: OpenHost) -> None:
    host = open_host()
    gpu, uuid = host.sim.gpus[0], host.sim.gpus[0].uuid
    host.sim.fail(
        "nvmlDeviceGetComputeMode", "success", delay_ms=60_000
    )  # until it is changed behind our back

    def meddle() -> None:
        deadline = time.monotonic() + 30
        while gpu.compute_mode != "exclusive_process" and time.monotonic() < deadline:
            time.sleep(0.001)
        gpu.compute_mode = "prohibited"
        host.sim.clear()

    meddler = threading.Thread(target=meddle)
    meddler.start()
    with pytest.raises(DriverError) as caught:
        host.nvml.set_compute_mode(uuid, "Exclusive_Process")
    meddler.join()
    assert caught.value.message == (
        "the GPU is in compute mode Prohibited after it was set to Exclusive_Process"
    )


@pytest.mark.parametrize("call", ["restore_compute_mode", "set_compute_mode"])
def test_a_missing_gpu_is_an_error(open_host: OpenHost, call: str) -> None:
    with pytest.raises(DriverError, match="the driver no longer reports this GPU"):
        getattr(open_host().nvml, call)("GPU-ffffffff-0000-0000-0000-000000000000", "Default")


def read(host: OpenedHost, since_s: float = 0.0) -> Load:
    return host.nvml.load([gpu.uuid for gpu in host.sim.gpus], since_s)


def test_a_gpu_is_read_as_nvidia_smi_shows_it(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "processes": [{"pid": 7, "used_mib": 4096}]}])
    host.sim.gpus[0].load(93, 64, 512.25)
    assert read(host).gpus == {host.sim.gpus[0].uuid: GpuLoad(93, 4096, 64, 512.25, 700.0)}


def test_values_that_the_driver_does_not_report_are_unknown(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "mig": True}, {"kind": "t4"}])
    for what in ("Temperature", "PowerUsage", "EnforcedPowerLimit"):
        host.sim.fail(f"nvmlDeviceGet{what}", "not_supported", gpu=0)
    in_mig, other = (read(host).gpus[gpu.uuid] for gpu in host.sim.gpus)
    assert in_mig == GpuLoad(memory_used_mib=0)
    assert other == GpuLoad(0, 0, 32, 8.75, 70.0)


def test_only_processes_with_a_sample_are_reported(open_host: OpenHost) -> None:
    busy = [
        {"pid": 7, "used_mib": 1, "sm": 35},
        {"pid": 8, "used_mib": 1, "sm": 0},
        {"pid": 9, "used_mib": 1},
    ]
    host = open_host([{"kind": "h100", "processes": busy}, {"kind": "h100"}, {"kind": "tesla-k80"}])
    with_samples, idle, kepler = (gpu.uuid for gpu in host.sim.gpus)
    assert read(host).processes == {with_samples: {7: 35, 8: 0}, idle: {}, kepler: {}}
    assert read(host, time.time() + 3600).processes[with_samples] == {}
    assert host.nvml.load([], 0.0).processes == {}


def test_a_lost_gpu_does_not_keep_others_from_being_read(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "processes": [{"pid": 7, "used_mib": 1, "sm": 35}]}, {"kind": "t4"}])
    host.sim.gpus[0].lose()
    found = read(host)
    assert list(found.gpus) == [host.sim.gpus[1].uuid]
    assert found.processes == {gpu.uuid: {} for gpu in host.sim.gpus}


def test_an_impossible_utilization_is_none(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100"}])
    host.sim.gpus[0].add_process(7, 1, sm=2147483632)  # as drivers were seen to tell
    host.sim.gpus[0].add_process(8, 1, sm=100)
    assert read(host).processes == {host.sim.gpus[0].uuid: {8: 100}}


LISTED = {"processes": {7: 4096, 8: 1}, "mps_clients": {8}}
JOBS = [{"pid": 7, "used_mib": 4096}, {"pid": 8, "used_mib": 1, "kind": "M+C"}]


def listed_by(host: OpenedHost) -> dict[str, object]:
    (uuid,) = (gpu.uuid for gpu in host.sim.gpus)
    return {"processes": host.nvml.processes()[uuid], "mps_clients": host.nvml.mps_clients()[uuid]}


def test_processes_are_listed_if_a_query_without_room_succeeds(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "processes": JOBS}])
    host.sim.fail("nvmlDeviceGetRunningProcessesSize", "insufficient_size")
    assert listed_by(host) == LISTED


@pytest.mark.parametrize("error", ["not_supported", "function_not_found"])
@pytest.mark.parametrize("missing", [("_v3",), ("_v3", "_v2")])
def test_processes_are_listed_by_an_older_version_of_the_call(
    open_host: OpenHost, missing: tuple[str, ...], error: str
) -> None:
    host = open_host([{"kind": "h100", "processes": JOBS}])
    for suffix in missing:
        for kind in ("", "MPS"):
            call = f"nvmlDeviceGet{kind}ComputeRunningProcesses{suffix}"
            host.sim.fail(call, error, one_version=True)
    assert listed_by(host) == LISTED


def test_a_gpu_that_lists_no_processes_is_missing_not_idle(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "processes": JOBS}])
    host.sim.fail("nvmlDeviceGetComputeRunningProcesses", "not_supported")
    assert host.nvml.processes() == {}


def test_more_processes_than_there_is_room_for_are_listed(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host([{"kind": "h100", "processes": JOBS}])
    monkeypatch.setattr("yunion_mps.inventory.running.FIRST_ROOM", 1)
    assert listed_by(host) == LISTED


def test_a_process_without_known_memory_has_none_at_every_version(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "processes": [{"pid": 7, "used_mib": None}]}])
    uuid = host.sim.gpus[0].uuid
    for suffix in ("_v3", "_v2", ""):
        assert host.nvml.processes()[uuid] == {7: None}
        host.sim.fail(f"nvmlDeviceGetComputeRunningProcesses{suffix}", "not_supported", one_version=True)


def test_a_process_without_a_sample_on_an_idle_gpu_uses_nothing(open_host: OpenHost) -> None:
    idle = [{"pid": 7, "used_mib": 1}]
    host = open_host(
        [
            {"kind": "h100", "processes": idle},
            {"kind": "h100", "processes": idle},
            {"kind": "h100", "mig": True},
        ]
    )
    host.sim.gpus[1].load(35)
    first, busy, in_mig_mode = (gpu.uuid for gpu in host.sim.gpus)
    found = read(host).with_idle({uuid: [7] for uuid in (first, busy, in_mig_mode, "GPU-gone")})
    assert found.processes == {first: {7: 0}, busy: {}, in_mig_mode: {}}
    host.sim.gpus[0].add_process(7, 1, sm=0)
    host.sim.gpus[0].add_process(8, 1)
    assert read(host).with_idle({first: [7, 8]}).processes[first] == {7: 0, 8: 0}


def test_a_gpu_that_came_later_is_found_once_nvml_is_initialised_again(open_host: OpenHost) -> None:
    opened = open_host([{"kind": "a100"}, {"kind": "a100", "present": False}])
    opened.sim.gpus[1].restore()
    assert [gpu.reason.code for gpu in opened.gpus()] == ["", GPU_ERROR]
    assert not_found(opened.scan()) == {"0000:00:07.0"}
    assert opened.nvml.initialise_again()
    assert [gpu.reason for gpu in opened.gpus()] == ["", ""]
    assert not_found(opened.scan()) == frozenset()


def test_nvml_is_not_initialised_again_while_a_call_is_in_progress(
    open_host: OpenHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_module, "ALONE_WITHIN_S", 0.01)
    opened = open_host()
    begun, gate = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        gate.wait()

    caller = threading.Thread(target=lambda: opened.nvml.deadline.call(call))
    caller.start()
    assert begun.wait(60)
    assert not opened.nvml.initialise_again()
    gate.set()
    caller.join()
    assert opened.nvml.initialise_again()


def test_calls_wait_while_nvml_is_initialised_again() -> None:
    deadline, begun, gate = Deadline(), threading.Event(), threading.Event()
    order: list[str] = []

    def initialise() -> None:
        begun.set()
        gate.wait()
        order.append("initialised")

    alone = threading.Thread(target=lambda: deadline.call_alone(initialise, 60))
    alone.start()
    assert begun.wait(60)
    caller = threading.Thread(target=lambda: deadline.call(lambda: order.append("called")))
    caller.start()
    gate.set()
    alone.join()
    caller.join()
    assert order == ["initialised", "called"]


def test_a_driver_that_was_unloaded_is_used_again_once_it_is_loaded(open_host: OpenHost) -> None:
    opened = open_host()
    opened.sim.unload_driver()
    with pytest.raises(DriverError) as caught:
        opened.nvml.initialise_again()
    assert caught.value.code == DRIVER_NOT_LOADED
    opened.sim.load_driver()
    assert opened.nvml.initialise_again()
    assert [gpu.reason for gpu in opened.gpus()] == [""]


def test_a_driver_whose_library_was_updated_is_known_by_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    old, new, link = (folder / f"libnvidia-ml.so.{version}" for version in ("535.1", "550.2", "1"))
    maps = tmp_path / "maps"
    maps.write_text(f"7f7b9000-7f7bd000 r--p 00000000 00:1b 38 /lib/libc.so.6\n7f7c r-xp 00:1b 39   {old}\n")
    old.touch()
    link.symlink_to(old)
    assert replaced_library(str(maps)) == ""
    new.touch()
    link.unlink()
    link.symlink_to(new)
    assert replaced_library(str(maps)).startswith(f"{new} (inode ")
    maps.write_text(f"7f7c r-xp 00:1b 39   {new} (deleted)\n")
    assert replaced_library(str(maps)).startswith(f"{new} (inode "), "a file of the same name"
    assert replaced_library(str(tmp_path / "none")) == ""
