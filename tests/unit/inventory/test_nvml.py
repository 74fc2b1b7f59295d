"""NVML: compute modes that are set and read back, and a deadline for a driver that hangs."""

from __future__ import annotations

import os
import threading
import time

import pytest
from yunion_mps.errors import DriverError
from yunion_mps.inventory.nvml import Deadline, Nvml

from integration.daemon_host import eventually
from unit.inventory.conftest import OpenHost


def test_what_a_call_returns_or_raises_is_the_caller_s() -> None:
    deadline = Deadline()
    assert deadline.call(lambda: 4711) == 4711
    with pytest.raises(ZeroDivisionError):
        deadline.call(lambda: 1 // 0)


def test_a_call_that_hangs_is_given_up_and_no_other_is_made_until_it_ends() -> None:
    deadline, gate = Deadline(timeout_s=0.05), threading.Event()
    with pytest.raises(DriverError, match=r"^the NVIDIA driver does not answer within 0.05 s$"):
        deadline.call(gate.wait)
    with pytest.raises(DriverError, match=r"^the NVIDIA driver still does not answer an earlier call$"):
        deadline.call(lambda: 4711)
    gate.set()
    eventually(lambda: answers(deadline))


def answers(deadline: Deadline) -> bool:
    try:
        return deadline.call(lambda: 4711) == 4711
    except DriverError:
        return False


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetComputeMode"])
def test_a_driver_that_hangs_in_a_call_is_named(open_host: OpenHost, call: str) -> None:
    host = open_host()
    host.sim.fail(call, "success", delay_ms=3_600_000)
    host.nvml.deadline = Deadline(timeout_s=0.05)
    with pytest.raises(DriverError) as caught:
        host.nvml.gpus()
    assert caught.value.message == "the NVIDIA driver does not answer within 0.05 s"
    assert caught.value.hint == ("see: dmesg | grep -iE 'nvrm|xid'; only a reboot helps if the driver hangs")
    host.nvml.close()
    host.sim.clear()


def test_a_driver_that_hangs_at_its_first_call_is_named(open_host: OpenHost) -> None:
    host = open_host()
    host.sim.fail("nvmlInit", "success", delay_ms=3_600_000)
    with pytest.raises(DriverError, match=r"^the NVIDIA driver does not answer within 0.05 s$"):
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
    assert not host.nvml.restore_compute_mode(host.sim.gpus[1].uuid, mode), "it has it"
    assert host.nvml.restore_compute_mode(host.sim.gpus[1].uuid, "Default") == (word != "default")
    assert host.sim.gpus[1].compute_mode == "default"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("no_permission", "NVML does not permit this"),
        ("not_supported", "the driver does not support this on the GPU"),
        ("unknown", "NVML error: Unknown Error"),
    ],
)
def test_a_compute_mode_that_cannot_be_set_is_an_error(open_host: OpenHost, error: str, message: str) -> None:
    host = open_host()
    host.sim.fail("nvmlDeviceSetComputeMode", error)
    with pytest.raises(DriverError, match=message):
        host.nvml.set_compute_mode(host.sim.gpus[0].uuid, "Exclusive_Process")
    assert host.sim.gpus[0].compute_mode == "default"


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
        f"GPU {uuid} is in compute mode Prohibited after it was set to Exclusive_Process"
    )


@pytest.mark.parametrize("call", ["restore_compute_mode", "set_compute_mode"])
def test_a_gpu_that_is_not_there_is_an_error(open_host: OpenHost, call: str) -> None:
    with pytest.raises(DriverError, match="NVML error: Not Found"):
        getattr(open_host().nvml, call)("GPU-ffffffff-0000-0000-0000-000000000000", "Default")
