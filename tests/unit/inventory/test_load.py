"""What GPUs and processes do: read from NVML, and unknown where it does not tell."""

from __future__ import annotations

import time

import pytest
from yunion_mps.errors import DriverError
from yunion_mps.inventory.load import GpuLoad, Load, read_load
from yunion_mps.inventory.nvml import Deadline

from unit.inventory.conftest import OpenedHost, OpenHost


def read(host: OpenedHost, since_s: float = 0.0) -> Load:
    return read_load(host.nvml, [gpu.uuid for gpu in host.sim.gpus], since_s)


def test_a_gpu_is_read_as_nvidia_smi_shows_it(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "processes": [{"pid": 7, "used_mib": 4096}]}])
    host.sim.gpus[0].load(93, 64, 512.25)
    assert read(host).gpus == {host.sim.gpus[0].uuid: GpuLoad(93, 4096, 64, 512.25, 700.0)}


def test_what_the_driver_does_not_tell_is_unknown(open_host: OpenHost) -> None:
    host = open_host([{"kind": "h100", "mig": True}, {"kind": "t4"}])
    for call in ("Temperature", "PowerUsage", "EnforcedPowerLimit"):
        host.sim.fail(f"nvmlDeviceGet{call}", "not_supported", gpu=0)
    in_mig, other = (read(host).gpus[gpu.uuid] for gpu in host.sim.gpus)
    assert in_mig == GpuLoad(memory_used_mib=0)
    assert other == GpuLoad(0, 0, 32, 8.75, 70.0)


def test_only_processes_with_a_sample_are_told(open_host: OpenHost) -> None:
    busy = [
        {"pid": 7, "used_mib": 1, "sm": 35},
        {"pid": 8, "used_mib": 1, "sm": 0},
        {"pid": 9, "used_mib": 1},
    ]
    host = open_host([{"kind": "h100", "processes": busy}, {"kind": "h100"}, {"kind": "tesla-k80"}])
    with_samples, idle, kepler = (gpu.uuid for gpu in host.sim.gpus)
    assert read(host).processes == {with_samples: {7: 35, 8: 0}, idle: {}, kepler: {}}
    assert read(host, time.time() + 3600).processes[with_samples] == {}
    assert read_load(host.nvml, [], 0.0).processes == {}


def test_a_lost_gpu_keeps_no_other_from_being_read(open_host: OpenHost) -> None:
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


@pytest.mark.parametrize("call", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetProcessUtilization"])
def test_a_driver_that_hangs_while_it_measures_is_named(open_host: OpenHost, call: str) -> None:
    host = open_host()
    host.sim.fail(call, "success", delay_ms=3_600_000)
    host.nvml.deadline = Deadline(timeout_s=0.05)
    with pytest.raises(DriverError, match=r"^the NVIDIA driver does not answer within 0.05 s$"):
        read(host)
    host.nvml.close()
    host.sim.clear()
