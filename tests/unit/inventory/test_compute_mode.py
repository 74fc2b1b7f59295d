from __future__ import annotations

import os
import threading
import time

import pytest
from yunion_mps.errors import DriverError

from unit.inventory.opened import OpenHost

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
    assert host.nvml.compute_mode(host.sim.gpus[1].uuid) == mode
    assert [gpu.compute_mode for gpu in host.sim.gpus] == ["default", word]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("no_permission", "NVML does not permit this"),
        ("not_supported", "the driver does not support this on the GPU"),
        ("unknown", "NVML says: Unknown Error"),
    ],
)
def test_a_compute_mode_that_cannot_be_set_is_an_error(open_host: OpenHost, error: str, message: str) -> None:
    host = open_host()
    host.sim.fail("nvmlDeviceSetComputeMode", error)
    with pytest.raises(DriverError, match=message):
        host.nvml.set_compute_mode(host.sim.gpus[0].uuid, "Exclusive_Process")
    assert host.sim.gpus[0].compute_mode == "default"


@needs_root
def test_a_compute_mode_that_is_not_in_force_afterwards_is_an_error(open_host: OpenHost) -> None:
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


@pytest.mark.parametrize("call", ["compute_mode", "set_compute_mode"])
def test_a_gpu_that_is_not_there_is_an_error(open_host: OpenHost, call: str) -> None:
    host = open_host()
    arguments = ["GPU-ffffffff-0000-0000-0000-000000000000", "Default"]
    with pytest.raises(DriverError, match="NVML says: Not Found"):
        getattr(host.nvml, call)(*arguments[: 2 if call.startswith("set") else 1])
