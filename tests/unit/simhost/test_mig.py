"""MIG on the simulated host: NVIDIA's own nvidia-smi and pynvml agree about instances and policies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from unit.simhost.conftest import MakeHost, nvml, rows, smi


def test_nvidia_smi_creates_lists_and_destroys(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}])
    # The order of ids, 13, 11, 12, 7, ..., and where they lie, are those of NVIDIA's driver.
    said = smi(host, "mig", "-cgi", "19,1g.10gb,MIG 1g.10gb,19,19,19,19", "-C")
    assert re.findall(r"created GPU instance ID +(\d+)", said) == ["13", "11", "12", "7", "8", "9", "10"]
    assert rows(smi(host, "mig", "-lgi")) == [f"1g.10gb 19 {7 + start} {start}:1" for start in range(7)]
    assert "Insufficient Resources" in smi(host, "mig", "-cgi", "15")
    assert "In use by another client" in smi(host, "mig", "-dgi", "-gi", "7")
    assert smi(host, "mig", "-dci").count("Successfully destroyed") == 7
    assert smi(host, "mig", "-dgi").count("Successfully destroyed") == 7
    assert smi(host, "mig", "-lgi") == "No GPU instances found: Not Found\n"


def test_instances_lie_where_they_are_asked_to(make_host: MakeHost) -> None:
    host = make_host([{"kind": "a100", "mig": True}])
    said = smi(host, "mig", "-cgi", "9:0,9:4,19:4")
    assert said.count("Successfully") == 2
    assert "Insufficient Resources" in said
    assert rows(smi(host, "mig", "-lgi")) == ["3g.20gb 9 1 0:4", "3g.20gb 9 2 4:4"]
    assert "Invalid Argument" in smi(host, "mig", "-cgi", "9:2")


def test_nvidia_smi_and_pynvml_show_the_same_devices(make_host: MakeHost) -> None:
    host = make_host([{"kind": "a100", "mig": True}])
    devices = host.create_mig_devices(0, "3g.20gb", "1g.5gb+me", "2g.10gb")
    assert [device.profile for device in devices] == ["3g.20gb", "2g.10gb", "1g.5gb+me"]
    listed = [line.split() for line in smi(host, "-L").splitlines()[1:]]
    assert [(row[1], row[-1]) for row in listed] == [(one.profile, f"{one.uuid})") for one in devices]
    host.gpus[0].add_process(os.getpid(), 300, on=(2, 0))
    shared = [" ".join(row.split()[:9]) for row in rows(smi(host).partition("MIG devices")[2])[:3]]
    with nvml(host) as (n, gpu):
        assert n.nvmlDeviceGetMaxMigDeviceCount(gpu) == 7
        for index, device in enumerate(devices):
            handle = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            attributes, memory = n.nvmlDeviceGetAttributes(handle), n.nvmlDeviceGetMemoryInfo(handle)
            used, total = memory.used >> 20, memory.total >> 20
            assert n.nvmlDeviceIsMigDeviceHandle(handle).value == 1
            assert n.nvmlDeviceGetUUID(handle) == device.uuid
            assert n.nvmlDeviceGetName(handle) == f"NVIDIA A100-SXM4-40GB MIG {device.profile}"
            assert n.nvmlDeviceGetGpuInstanceId(handle) == device.gpu_instance
            assert n.nvmlDeviceGetComputeInstanceId(handle) == device.compute_instance
            parent = n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            assert n.nvmlDeviceGetUUID(parent) == host.gpus[0].uuid
            assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(device.uuid)) == index
            assert attributes.memorySizeMB == total <= n.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total >> 20
            sm = attributes.multiprocessorCount
            assert shared[index] == f"{device.gpu_instance} 0 {index} | {used}MiB / {total}MiB | {sm}"
            processes = n.nvmlDeviceGetComputeRunningProcesses(handle)
            assert [process.usedGpuMemory >> 20 for process in processes] == ([300] if used else [])
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 3)
        with pytest.raises(n.NVMLError_InvalidArgument):
            n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 7)
        (process,) = n.nvmlDeviceGetComputeRunningProcesses(gpu)
        assert (process.gpuInstanceId, process.computeInstanceId) == (2, 0)


def test_compute_instances_share_their_gpu_instance(make_host: MakeHost) -> None:
    host = make_host([{"kind": "a100", "mig": True}])
    smi(host, "mig", "-cgi", "5")
    assert rows(smi(host, "mig", "-lcip")) == [
        "1 1c.4g.20gb 0 4/4 14 2 0 0 4 0",
        "1 2c.4g.20gb 1 2/2 28 2 0 0 4 0",
        "1 4g.20gb 3* 1/1 56 2 0 0 4 0",
    ]  # as an A100 prints it
    assert smi(host, "mig", "-cci", "0,1", "-gi", "1").count("Successfully") == 2
    assert rows(smi(host, "mig", "-lci")) == ["1 1c.4g.20gb 0 0 0:1", "1 2c.4g.20gb 1 1 2:2"]
    assert "Insufficient Resources" in smi(host, "mig", "-cci", "1", "-gi", "1")
    with nvml(host) as (n, gpu):
        instance = n.nvmlDeviceGetGpuInstanceById(gpu, 1)
        assert n.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, 0) == 1
        compute = n.nvmlGpuInstanceGetComputeInstanceById(instance, 1)
        info = n.nvmlComputeInstanceGetInfo(compute)
        assert (info.profileId, info.placement.start, info.placement.size) == (1, 2, 2)
        with pytest.raises(n.NVMLError_InUse):
            n.nvmlGpuInstanceDestroy(instance)
        n.nvmlComputeInstanceDestroy(compute)
        with pytest.raises(n.NVMLError_InvalidArgument):
            n.nvmlComputeInstanceGetInfo(compute)


def test_placements_have_the_size_of_their_profile(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}])
    with nvml(host) as (n, gpu):
        small, whole = (n.byref(n.c_nvmlGpuInstancePlacement_t(4, size)) for size in (2, 4))
        with pytest.raises(n.NVMLError_InvalidArgument):
            n.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, small)
        big = n.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, whole)
        n.nvmlGpuInstanceCreateComputeInstance(big, 2)
        device = n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        assert n.nvmlDeviceGetAttributes(device).multiprocessorCount == 60, "more than three times 1g"


def test_hopper_changes_its_mode_at_once_if_idle(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100"}])
    gpu = host.gpus[0]
    gpu.add_process(77, 10)
    assert "pending enable state" in smi(host, "-i", 0, "-mig", 1)
    assert (gpu.mig, gpu.mig_pending) == (False, True)
    gpu.remove_process(77)
    assert "Enabled MIG Mode" in smi(host, "-i", 0, "-mig", 1)
    host.create_mig_devices(0, "7g.80gb")
    assert "Disabled MIG Mode" in smi(host, "-i", 0, "-mig", 0)
    assert (gpu.mig, gpu.mig_pending, gpu.mig_devices()) == (False, False, [])


def test_every_ampere_model_waits_for_a_reset(make_host: MakeHost) -> None:
    host = make_host([{"kind": kind} for kind in ("a30", "a100", "a100-80gb")])
    smi(host, "-mig", 1)
    assert [(gpu.mig, gpu.mig_pending) for gpu in host.gpus] == [(False, True)] * 3


@pytest.mark.parametrize("reset", ["nvidia-smi", "ctl", "reboot"])
def test_ampere_changes_its_mode_with_a_reset(make_host: MakeHost, reset: str) -> None:
    host = make_host([{"kind": "a30"}, {"kind": "h100", "mig": True}])
    with nvml(host) as (n, gpu):
        assert n.nvmlDeviceSetMigMode(gpu, n.NVML_DEVICE_MIG_ENABLE) == n.NVML_ERROR_RESET_REQUIRED
        assert n.nvmlDeviceGetMigMode(gpu) == [0, 1]
        with pytest.raises(n.NVMLError_NotSupported):
            n.nvmlDeviceCreateGpuInstance(gpu, 14)
    host.create_mig_devices(1, "1g.10gb")
    if reset == "nvidia-smi":
        host.gpus[0].add_process(77, 10)
        assert "In use by another client" in smi(host, "-r", "-i", 0)
        host.gpus[0].remove_process(77)
        assert "was successfully reset" in smi(host, "-r", "-i", 0)
    elif reset == "ctl":
        host.gpus[0].reset()
    else:
        host.reboot()
    assert host.gpus[0].mig
    assert host.gpus[1].mig, "the mode survives a reboot, instances do not"
    assert bool(host.gpus[1].mig_devices()) is (reset != "reboot")


def test_a_reset_ends_processes_and_a_gpu_that_needs_one_keeps_its_mode(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100"}])
    host.gpus[0].add_process(77, 10)
    host.gpus[0].reset()
    assert host.gpus[0].show()["processes"] == []
    host.run(["simhost-ctl", "require-reset", "0"], check=True)
    with nvml(host) as (n, gpu):
        assert n.nvmlDeviceSetMigMode(gpu, n.NVML_DEVICE_MIG_ENABLE) == n.NVML_ERROR_RESET_REQUIRED
        assert n.nvmlDeviceGetMigMode(gpu) == [0, 1]


def test_a_mode_that_is_set_again_changes_nothing(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}, {"kind": "h100"}])
    devices = host.create_mig_devices(0, "7g.80gb")
    for is_used in (False, True):
        if is_used:
            host.gpus[0].add_process(77, 10, on=(devices[0].gpu_instance, 0))
        with nvml(host) as (n, gpu):
            assert n.nvmlDeviceSetMigMode(gpu, n.NVML_DEVICE_MIG_ENABLE) == n.NVML_SUCCESS
            assert n.nvmlDeviceGetMaxMigDeviceCount(n.nvmlDeviceGetHandleByIndex(1)) == 0
        assert host.gpus[0].mig_devices() == devices


@pytest.mark.parametrize("change", ["mode", "reset", "reboot"])
def test_the_compute_mode_ends_with_the_initialization_of_the_gpu(make_host: MakeHost, change: str) -> None:
    host = make_host([{"kind": "h100", "compute_mode": "exclusive_process"}])
    changes = {
        "mode": lambda: smi(host, "-i", 0, "-mig", 1),
        "reset": lambda: smi(host, "-r", "-i", 0),
        "reboot": host.reboot,
    }
    assert host.gpus[0].compute_mode == "exclusive_process"
    changes[change]()
    assert host.gpus[0].compute_mode == "default"


def test_the_activation_status_of_a_mode_can_be_injected(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100"}])
    host.fail("nvmlDeviceSetMigModeActivation", "unknown")
    with nvml(host) as (n, gpu):
        assert n.nvmlDeviceSetMigMode(gpu, n.NVML_DEVICE_MIG_ENABLE) == n.NVML_ERROR_UNKNOWN
        assert n.nvmlDeviceGetMigMode(gpu) == [0, 1]
    assert "pending enable state" in smi(host, "-i", 0, "-mig", 1)


def test_what_a_driver_refuses(make_host: MakeHost) -> None:
    host = make_host([{"kind": "a100", "mig": True}, {"kind": "t4"}])
    (device,) = host.create_mig_devices(0, "4g.20gb")
    host.gpus[0].add_process(77, 10, on=(device.gpu_instance, 0))
    with nvml(host) as (n, gpu):
        other = n.nvmlDeviceGetHandleByIndex(1)
        instance = n.nvmlDeviceGetGpuInstanceById(gpu, device.gpu_instance)
        compute = n.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
        refused: list[tuple[type[Exception], Callable[[], object]]] = [
            (n.NVMLError_InUse, lambda: n.nvmlComputeInstanceDestroy(compute)),
            (n.NVMLError_InUse, lambda: n.nvmlGpuInstanceDestroy(instance)),
            (n.NVMLError_InvalidArgument, lambda: n.nvmlDeviceCreateGpuInstance(gpu, 99)),
            (n.NVMLError_InsufficientResources, lambda: n.nvmlDeviceCreateGpuInstance(gpu, 0)),
            (n.NVMLError_NotFound, lambda: n.nvmlDeviceGetGpuInstanceById(gpu, 9)),
            (n.NVMLError_NotSupported, lambda: n.nvmlDeviceCreateGpuInstance(other, 19)),
            (n.NVMLError_NotSupported, lambda: n.nvmlDeviceGetMigMode(other)),
            (n.NVMLError_NotSupported, lambda: n.nvmlDeviceSetMigMode(other, 1)),
            (n.NVMLError_InvalidArgument, lambda: n.nvmlDeviceGetGpuInstanceId(gpu)),
        ]
        for error, call in refused:
            with pytest.raises(error):
                call()
        assert n.nvmlDeviceSetMigMode(gpu, 0) == n.NVML_ERROR_IN_USE
        assert n.nvmlDeviceGetMaxMigDeviceCount(other) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    "words", [["mig", "-cgi", "14"], ["mig", "-dci"], ["-i", "0", "-mig", "0"], ["-i", "0", "-r"]]
)
def test_changes_are_refused_to_other_users(make_host: MakeHost, words: list[str]) -> None:
    host = make_host([{"kind": "a30", "mig": True}])
    host.create_mig_devices(0, "1g.6gb")
    assert "Insufficient Permissions" in host.run(["nvidia-smi", *words], user=1234).stdout
    assert len(host.gpus[0].mig_devices()) == 1


def test_capability_files_come_and_go_with_the_instances(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4"}, {"kind": "h100", "mig": True}])
    (device,) = host.create_mig_devices(1, "1g.10gb")
    minors = dict(
        line.split() for line in (host.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    )
    assert (minors["config"], minors["gpu0/gi0/access"], minors["gpu1/gi0/access"]) == ("1", "3", "138")
    places = [f"gi{device.gpu_instance}", f"gi{device.gpu_instance}/ci0"]
    capabilities = host.root / "proc/driver/nvidia/capabilities/gpu1/mig"
    for place in places:
        minor = minors[f"gpu1/{place}/access"]
        assert (capabilities / place / "access").read_text().startswith(f"DeviceFileMinor: {minor}\n")
        assert (host.root / f"dev/nvidia-caps/nvidia-cap{minor}").exists()
    host.gpus[1].end_instances()
    assert list(capabilities.iterdir()) == []
    left = sorted(path.name for path in (host.root / "dev/nvidia-caps").iterdir())
    assert left == ["nvidia-cap1", "nvidia-cap2"]


def test_an_instance_that_is_gone_is_not_taken_for_its_successor(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}])
    gpu = host.gpus[0]
    (first,) = host.create_mig_devices(0, "3g.40gb")
    gpu.add_process(77, 10, on=(first.gpu_instance, 0))
    with nvml(host) as (n, _):
        handle = n.nvmlDeviceGetHandleByUUID(first.uuid)
        gpu.end_instances(first.gpu_instance)  # behind its back, and in spite of its client
        (second,) = host.create_mig_devices(0, "3g.40gb")
        assert second == first._replace(uuid=second.uuid)
        assert second.uuid != first.uuid
        with pytest.raises(n.NVMLError_InvalidArgument):
            n.nvmlDeviceGetUUID(handle)
        with pytest.raises(n.NVMLError_NotFound):
            n.nvmlDeviceGetHandleByUUID(first.uuid)
    assert gpu.show()["processes"] == []


def test_uuids_are_the_same_for_the_same_history(make_host: MakeHost) -> None:
    made = [make_host([{"kind": "h100", "mig": True}]) for _ in range(2)]
    first, second = (host.create_mig_devices(0, "1g.10gb", "1g.10gb") for host in made)
    assert first == second
    assert len({device.uuid for device in first}) == 2
    assert all(re.fullmatch(r"MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", one.uuid) for one in first)


def test_simhost_ctl_makes_the_faults(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}])
    gpu = host.gpus[0]

    def ctl(*words: object) -> None:
        host.run(["simhost-ctl", *words], check=True)

    ctl("fail", "nvmlDeviceCreateGpuInstance*", "insufficient_resources", "--skip", 2, "--times", 1)
    assert smi(host, "mig", "-cgi", "19,19,19", "-C").count("Successfully created GPU") == 2
    devices = host.create_mig_devices(0, "19")
    assert len(devices) == 3
    ctl("process", 0, "add", 77, 10, "--on", devices[0].gpu_instance, 0)
    ctl("end-instance", 0, devices[0].gpu_instance)
    assert gpu.mig_devices() == devices[1:]
    smi(host, "mig", "-cgi", "19")
    ctl("require-reset", 0)
    assert "GPU requires reset" in smi(host, "mig", "-cgi", "19")
    assert "GPU requires reset" in smi(host, "mig", "-cci")
    ctl("reset", 0)
    assert (gpu.mig_devices(), gpu.show()["reset_required"]) == ([], False)
    host.create_mig_devices(0, "19")
    ctl("mig", 0, "off")
    assert "No MIG-enabled devices found" in smi(host, "mig", "-lgi")
    ctl("time-slice", 0, "long")
    assert gpu.time_slice == "long"
    ctl("reboot")
    assert gpu.time_slice == "default"


def test_compute_policy_is_listed_and_set(make_host: MakeHost) -> None:
    host = make_host([{"kind": "tesla-p40"}, {"kind": "tesla-m60"}])
    for number, name in enumerate(("Default", "Short", "Medium", "Long")):
        assert smi(host, "compute-policy", "-i", 0, "--set-timeslice", number).startswith("Successfully set")
        assert f"0   Timeslice       {name} " in smi(host, "compute-policy", "-i", 0, "--list")
        assert host.gpus[0].time_slice == name.lower()
    assert "Not Supported" in smi(host, "compute-policy", "-i", 1, "--set-timeslice", 1), "before Pascal"
    host.gpus[0].time_slice = "short"
    assert "Short" in smi(host, "compute-policy", "-i", 0, "--list")
