"""A driver that does not come back from a call costs the caller its deadline, and nobody the process."""

from __future__ import annotations

import threading

import pytest
from yunion_mps.errors import DriverError
from yunion_mps.inventory import Nvml
from yunion_mps.inventory.nvml import Deadline

from unit.inventory.opened import OpenHost
from unit.mps.driving import wait_for


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
    wait_for(lambda: answers(deadline))


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
    assert caught.value.hint == (
        "see: dmesg | grep -iE 'nvrm|xid'; a driver that hangs is helped by a reboot alone"
    )
    host.nvml.close()
    host.sim.clear()


def test_a_driver_that_hangs_at_its_first_call_is_named(open_host: OpenHost) -> None:
    host = open_host()
    host.sim.fail("nvmlInit", "success", delay_ms=3_600_000)
    with pytest.raises(DriverError, match=r"^the NVIDIA driver does not answer within 0.05 s$"):
        Nvml(timeout_s=0.05)
    host.sim.clear()
