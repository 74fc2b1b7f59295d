from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core.errors import DriverError
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import GPU_ERROR, GPU_LOST, Reason, hint_of

from unit.inventory.conftest import OpenHost

LOST = "the GPU has fallen off the bus or is otherwise inaccessible (GPU is lost)"
NOT_PERMITTED = "NVML: permission denied"

MESSAGES = {
    "library_not_found": (
        "the NVIDIA driver's library libnvidia-ml.so.1 is not installed",
        "install the NVIDIA driver with its libraries, then check it: nvidia-smi",
    ),
    "driver_not_loaded": (
        "the NVIDIA driver's kernel module is not loaded",
        "load it: modprobe nvidia; if that fails, see: dmesg | grep -i nvidia",
    ),
    "lib_rm_version_mismatch": (
        "the NVIDIA driver's library and its kernel module have different versions",
        "reboot, or reload the kernel module: the driver was updated while the old module was in use",
    ),
    "gpu_is_lost": (LOST, hint_of(GPU_LOST)),
    "no_permission": (NOT_PERMITTED, "run as root: systemctl start yunion-mps-daemon"),
    "not_supported": (
        "the driver does not support this on the GPU",
        "see: dmesg | grep -i nvidia; try: nvidia-smi",
    ),
    "function_not_found": ("NVML error: Function Not Found", "see: dmesg | grep -i nvidia; try: nvidia-smi"),
    "unknown": ("NVML error: Unknown Error", "see: dmesg | grep -i nvidia; try: nvidia-smi"),
}


@pytest.mark.parametrize("error", MESSAGES)
@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"])
def test_a_driver_that_does_not_answer_as_a_whole_is_named_with_what_to_do(
    open_host: OpenHost, error: str, call: str
) -> None:
    host = open_host()
    host.sim.fail(call, error)
    with pytest.raises(DriverError) as caught, type(host.nvml)():
        host.scan()
    assert (caught.value.message, caught.value.hint) == MESSAGES[error]
    assert caught.value.exit_code == 1
    host.sim.clear()
    assert len(host.gpus()) == 1


FIELDS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetMemoryInfo": "memory_mib",
    "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetMigMode": "mig_enabled",
    "nvmlDeviceGetMinorNumber": "minor",
}


@pytest.mark.parametrize("error", ["not_supported", "function_not_found", "no_permission", "no_data"])
@pytest.mark.parametrize(("call", "field"), FIELDS.items())
def test_a_field_that_the_driver_does_not_report_is_absent(
    open_host: OpenHost, call: str, field: str, error: str
) -> None:
    host = open_host([{"kind": "a100", "count": 2}])
    before = host.gpus()
    host.sim.fail(call, error, gpu=0)
    absent: dict[str, Any] = {field: None}
    if field == "mig_enabled":
        absent |= {"mig_pending": None, "mig_profiles": ()}
    if field == "compute_mode":
        absent |= {"mode_is_fixed": True}
    assert host.gpus() == (before[0]._replace(**absent), before[1])


def test_a_driver_that_reports_no_field_at_all_still_has_its_gpus(open_host: OpenHost) -> None:
    host = open_host()
    for call in FIELDS:
        host.sim.fail(call, "not_supported")
    host.sim.fail("nvmlSystemGetCudaDriverVersion", "function_not_found")
    found = host.scan()
    assert found.driver.cuda_version is None
    (gpu,) = found.gpus
    assert gpu.uuid == host.sim.gpus[0].uuid
    assert [getattr(gpu, field) for field in FIELDS.values()] == [None] * 6
    assert gpu.reason == ""


@pytest.mark.parametrize("call", ["nvmlDeviceGetUUID", *FIELDS])
@pytest.mark.parametrize("error", ["gpu_is_lost", "unknown", "timeout"])
def test_a_gpu_that_fails_in_any_call_has_a_reason_and_its_neighbours_none(
    open_host: OpenHost, call: str, error: str
) -> None:
    host = open_host([{"kind": "t4", "count": 3}])
    before = host.gpus()
    host.sim.fail(call, error, gpu=1)
    words = {"gpu_is_lost": LOST, "unknown": "NVML error: Unknown Error", "timeout": "NVML error: Timeout"}
    first, broken, last = host.gpus()
    assert (first, last) == (before[0], before[2])
    assert broken == Gpu(
        "0000:00:07.0",
        uuid=None if call == "nvmlDeviceGetUUID" else before[1].uuid,
        nvml_index=1,
        vendor_device_id="10de:1eb8",
        numa_node=-1,
        link=before[1].link,
        render_node="/dev/dri/renderD129",
        reason=Reason(words[error], GPU_ERROR),
    )


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo"])
@pytest.mark.parametrize("error", ["no_permission", "unknown"])
def test_a_gpu_without_handle_or_address_is_listed_by_its_place_on_the_bus(
    open_host: OpenHost, call: str, error: str
) -> None:
    host = open_host([{"kind": "t4", "count": 3}])
    before = host.gpus()
    host.sim.fail(call, error, gpu=1)
    first, broken, last = host.gpus()
    assert (first, last) == (before[0], before[2])
    assert broken == Gpu(
        "0000:00:07.0",
        vendor_device_id="10de:1eb8",
        numa_node=-1,
        link=before[1].link,
        render_node="/dev/dri/renderD129",
        reason=Reason(MESSAGES[error][0], GPU_ERROR),
    )


def test_each_gpu_without_a_handle_has_its_own_reason(open_host: OpenHost) -> None:
    host = open_host([{"kind": "t4", "count": 3}])
    host.sim.gpus[0].lose()
    host.sim.fail("nvmlDeviceGetHandleBy*", "no_permission", gpu=2)
    assert [gpu.reason for gpu in host.gpus()] == [LOST, "", NOT_PERMITTED]


@pytest.mark.parametrize("lookup", ["gpu_is_lost", "success"])
def test_a_gpu_that_is_lost_before_the_start_does_not_hide_the_others(
    open_host: OpenHost, lookup: str
) -> None:
    host = open_host([{"kind": "t4"}, {"kind": "l4", "lost": True}, {"kind": "t4"}])
    host.sim.gpus[1].lose(lookup=lookup)
    found = host.gpus()
    assert [gpu.reason for gpu in found] == ["", LOST, ""]
    assert [gpu.nvml_index for gpu in found] == [0, None, 2]
    assert found[1].vendor_device_id == "10de:27b8"


@pytest.mark.parametrize("memory", ["gpu_is_lost", "not_supported"])
def test_a_lost_gpu_that_answers_its_modes_is_lost(open_host: OpenHost, memory: str) -> None:
    host = open_host([{"kind": "t4", "count": 2}])
    host.sim.gpus[0].lose(lookup="success")
    host.sim.fail("nvmlDeviceGetMemoryInfo", memory)
    for call in ("ComputeMode", "MigMode", "UUID", "PciInfo", "Name", "CudaComputeCapability", "MinorNumber"):
        host.sim.fail(f"nvmlDeviceGet{call}", "success", gpu=0)
    assert host.gpus()[0].reason == LOST
    if memory == "not_supported":
        assert host.gpus()[1].reason == ""


def test_a_driver_that_reports_no_memory_as_0_does_not_know_it(open_host: OpenHost) -> None:
    host = open_host([{"kind": "t4", "memory_mib": 0}])
    assert host.gpus()[0].memory_mib is None


def test_a_gpu_on_the_bus_that_the_driver_does_not_report_is_listed(open_host: OpenHost) -> None:
    host = open_host([{"kind": "t4", "count": 2}])
    folder = host.sim.root / "sys/bus/pci/devices/0000:00:09.0"
    folder.mkdir()
    for name, text in {"vendor": "0x10de", "device": "0x1eb8", "class": "0x030200"}.items():
        (folder / name).write_text(f"{text}\n")
    found = host.gpus()
    assert [gpu.pci_address for gpu in found] == ["0000:00:06.0", "0000:00:07.0", "0000:00:09.0"]
    assert found[2].vendor_device_id == "10de:1eb8"
    assert found[2].reason != ""


def test_a_driver_that_fails_when_it_is_closed_does_no_harm(open_host: OpenHost) -> None:
    host = open_host()
    host.sim.fail("nvmlShutdown", "unknown", times=1)
    host.nvml.close()
    assert host.sim.show()["failures"] == []
