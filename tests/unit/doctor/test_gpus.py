"""Faults of the driver, its programs and the GPUs, as files, NVML and the daemon show them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.enums import TIME_SLICING
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import (
    BUDGET_NOT_ENFORCED,
    COMPUTE_MODE_FIXED,
    COMPUTE_MODE_UNSUPPORTED,
    DRIVER_NOT_LOADED,
    GPU_GONE,
    GPU_LOST,
    GPU_OTHER_DRIVER,
    MIG_INSTANCE_GONE,
    PROCESS_MEMORY_UNKNOWN,
    RELOAD_NEEDED,
    Reason,
)
from yunion_mps.core.settings import DeviceEntry
from yunion_mps.doctor.checks import Host, Lazy

from unit import builders
from unit.doctor.hosts import DRIVER, check_findings, finding_of, host_of, write
from unit.http import snapshots
from unit.http.snapshots import snapshot

pytestmark = pytest.mark.processes  # whether a control daemon listens is seen by its socket

FIRST, SECOND = builders.gpu(6, name="Tesla T4"), builders.gpu(7, name="Tesla T4")
CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
EXCLUSIVE = "Exclusive_Process"
#: Larger than any PID.
NEVER = 1 << 22


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name in (CONTROL, SERVER):
        write(tmp_path / "bin" / name, f"\0{DRIVER}\0").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    write(tmp_path / f"lib/libcuda.so.{DRIVER}")
    (tmp_path / "lib/libcuda.so.1").symlink_to(f"libcuda.so.{DRIVER}")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia6", "nvidia7"):
        write(tmp_path / "dev" / name).chmod(0o666)
    return host_of(tmp_path, FIRST, SECOND)


# -- the driver and its parts


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "problem"),
        ("Open Kernel Module for x86_64  535.10.01  Release Build", "warning"),
    ],
)
def test_a_kernel_module_of_another_version_is_found(
    host: Host, tmp_path: Path, text: str, level: str
) -> None:
    assert finding_of(host, "driver", "ok")
    write(tmp_path / "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 {text}\n")
    assert finding_of(host, "driver", level).what.startswith("the loaded kernel module is version 5")


def test_only_versions_that_were_read_are_said_to_match(host: Host, tmp_path: Path) -> None:
    def said() -> str:
        return finding_of(host, "driver", "ok").what

    version, unknown = f"version {DRIVER}", "not known: the version of the"
    assert said() == f"{version}; library and programs match; {unknown} kernel module"
    write(tmp_path / "bin" / CONTROL, "no version")
    assert said() == f"{version}; library matches; {unknown} kernel module and programs"
    (tmp_path / "lib/libcuda.so.1").unlink()
    assert said() == f"{version}; {unknown} kernel module, library and programs"
    write(tmp_path / "bin" / CONTROL, f"\0{DRIVER}\0")
    assert said() == f"{version}; programs match; {unknown} kernel module and library"
    write(tmp_path / "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX Kernel Module  {DRIVER}\n")
    assert said() == f"{version}; kernel module and programs match; {unknown} library"


def test_a_node_without_a_known_number_is_not_called_right(host: Host, tmp_path: Path) -> None:
    nodes = "all exist and can be opened"
    host.inventory = Lazy(lambda: builders.inventory(FIRST, SECOND._replace(minor=None)))
    why = f"not checked: that of {SECOND.address}, whose minor number the driver does not report"
    assert finding_of(host, "device nodes", "ok").what == f"{nodes}; {why}"
    unknown = host_of(tmp_path, FIRST._replace(minor=None))
    why = f"the driver does not report the minor number of {FIRST.address}"
    assert finding_of(unknown, "device nodes", "skipped").what == why


def test_what_no_gpu_answers_is_not_called_right(tmp_path: Path) -> None:
    reason = Reason("the GPU is lost", GPU_LOST)
    lost = served(tmp_path, FIRST._replace(reason=reason, name=None, minor=None, compute_mode=None))
    assert finding_of(lost, "GPUs", "problem")
    for check in ("MIG", "vGPU", "budgets", "job budgets", "client limit", "compute mode", "device nodes"):
        assert finding_of(lost, check, "skipped").what != "no GPU of this host is divided into devices", check


def test_an_unknown_compute_capability_is_not_called_old(tmp_path: Path) -> None:
    gpu = FIRST._replace(compute_capability=None)
    finding = finding_of(served(tmp_path, gpu), "budgets", "warning")
    assert "because the driver does not report its compute capability" in finding.what
    assert "because it is older" not in finding.what
    own = finding_of(host_of(tmp_path, gpu), "budgets", "warning").what
    assert own.startswith(f"the driver does not report the compute capability of GPU {gpu.address}")
    (shown,) = (one.reason for one in snapshot(gpu).conditions if one.reason.code == BUDGET_NOT_ENFORCED)
    assert "because it is older" not in shown


def test_clients_that_the_driver_does_not_list_are_not_counted_as_none(tmp_path: Path) -> None:
    host = host_of(tmp_path, FIRST, SECOND, cuda_mps_max_clients="20")
    host.users = Lazy(dict)
    why = f"the driver does not report the processes on {FIRST.address} and {SECOND.address}"
    assert finding_of(host, "client limit", "skipped").what == why
    host.users = Lazy(lambda: {str(FIRST.uuid): {}})
    what = f"at most 0 of 20 clients on a GPU; not known for {SECOND.address}"
    assert finding_of(host, "client limit", "ok").what == what


@pytest.mark.parametrize("check", ["orphaned servers", "user switching", "socket cleanup", "disk space"])
def test_a_check_of_domains_is_skipped_without_any(host: Host, tmp_path: Path, check: str) -> None:
    entry = "devices: [{path: '06:00.0', type: NVIDIA_GPU_SHARE, virtual_number: 2}]\n"
    write(tmp_path / "etc/yunion/host_container_device.yml", entry)
    assert finding_of(host, check, "skipped").what == "no GPU of this host is shared through MPS"


def test_a_library_of_another_version_is_found(host: Host, tmp_path: Path) -> None:
    link = tmp_path / "lib/libcuda.so.1"
    link.unlink()
    link.symlink_to(write(tmp_path / "lib/libcuda.so.545.23.06"))
    assert (
        finding_of(host, "driver", "problem").what
        == f"{link} is version 545.23.06, but the driver is version {DRIVER}"
    )


def test_a_control_program_of_another_version_than_the_driver_is_found(host: Host, tmp_path: Path) -> None:
    write(tmp_path / "bin" / CONTROL, "\x00580.65.06\0")
    assert (
        finding_of(host, "driver", "problem").what
        == f"{CONTROL} is version 580.65.06, but the driver is version {DRIVER}"
    )


def test_a_missing_library_is_reported_unless_the_loader_knows_another(host: Host, tmp_path: Path) -> None:
    (tmp_path / "lib/libcuda.so.1").unlink()
    assert "libcuda.so.1 was not found" in finding_of(host, "programs", "warning").what
    place = write(tmp_path / "far/libcuda.so.1")
    write(tmp_path / "etc/ld.so.cache", f"glibc-ld.so.cache1.1\0libcuda.so.1\0{place}\0")
    assert finding_of(host, "programs", "ok")


@pytest.mark.parametrize("folder", ["usr/lib", "run/nvidia/driver/usr/lib"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_library_is_found_in_the_folder_of_either_architecture(
    host: Host, tmp_path: Path, folder: str, machine: str
) -> None:
    (tmp_path / "lib/libcuda.so.1").unlink()
    write(tmp_path / folder / f"{machine}-linux-gnu/libcuda.so.1")
    assert finding_of(host, "programs", "ok")


def test_a_server_that_the_control_daemon_will_not_find_is_found(host: Host, tmp_path: Path) -> None:
    (tmp_path / "bin" / SERVER).unlink()
    finding = finding_of(host, "programs", "problem")
    assert "every client is refused" in finding.what
    assert finding.hint == f"install it, or link it into {tmp_path}/bin"


def test_a_control_program_that_is_missing_is_found(host: Host, tmp_path: Path) -> None:
    (tmp_path / "bin" / CONTROL).unlink()
    if not any(os.path.exists(f"{folder}/{CONTROL}") for folder in ("/usr/bin", "/usr/local/bin")):
        assert "not installed" in finding_of(host, "programs", "problem").what


def test_a_device_node_that_is_missing_or_roots_alone_is_found(host: Host, tmp_path: Path) -> None:
    assert finding_of(host, "device nodes", "ok").what == "all exist and can be opened"
    node = tmp_path / "dev/nvidia7"
    node.chmod(0o660)
    assert f"{node}: accessible only to root" in finding_of(host, "device nodes", "problem").what
    if os.geteuid() == 0:
        os.chown(node, 0, 44)
        assert finding_of(host, "device nodes", "ok").what.endswith("but only by root and group 44")
    (tmp_path / "dev/nvidia-uvm").unlink()
    missing = f"{tmp_path}/dev/nvidia-uvm: missing, so no CUDA program can run"
    assert finding_of(host, "device nodes", "problem").what == missing


def test_without_mps_no_driver_and_no_program_is_missed(tmp_path: Path) -> None:
    why = "not needed while enable_cuda_mps is false"
    assert finding_of(host_of(tmp_path), "driver", "problem").what == "no NVIDIA driver"
    off = host_of(tmp_path, enable_cuda_mps="false")
    assert finding_of(off, "driver", "skipped").what == f"no NVIDIA driver; {why}"
    assert finding_of(off, "programs", "skipped").what == why


@pytest.mark.parametrize("how", ["NVIDIA_GPU_SHARE, virtual_number: 2", "NVIDIA_MPS, mig: all-1g.10gb"])
def test_without_gpus_shared_through_mps_only_the_library_is_needed(
    host: Host, tmp_path: Path, how: str
) -> None:
    (tmp_path / "bin" / SERVER).unlink()
    entry = f"devices: [{{path: '06:00.0', type: {how}}}]\n"
    write(tmp_path / "etc/yunion/host_container_device.yml", entry)
    host.inventory = Lazy(lambda: builders.inventory(builders.gpu(6)))
    why = "no GPU of this host is shared through MPS"
    assert finding_of(host, "programs", "ok").what == f"libcuda.so.1 is installed; {why}"
    assert finding_of(host, "control daemon", "skipped").what == why
    assert finding_of(host, "pipe directory", "skipped").what == why


def test_without_gpus_shared_through_mps_their_checks_say_so(tmp_path: Path) -> None:
    entry = "devices: [{path: '06:00.0', type: NVIDIA_GPU_SHARE, virtual_number: 2}]\n"
    write(tmp_path / "etc/yunion/host_container_device.yml", entry)
    for check in ("budgets", "job budgets", "client limit"):
        what = finding_of(host_of(tmp_path, FIRST), check, "skipped").what
        assert what == "no GPU of this host is shared through MPS"


# -- virtual machines


@pytest.mark.parametrize(
    ("level", "name"),
    [
        *(
            ("warning", name)
            for name in ("GRID T4-16C", "NVIDIA A40-48Q", "NVIDIA A100-1-5C", "GRID V100D-8A")
        ),
        *(
            ("ok", name)
            for name in ("NVIDIA H100 80GB HBM3", "Tesla P100-PCIE-16GB", "NVIDIA A100-SXM4-80GB")
        ),
    ],
)
def test_a_vgpu_is_a_warning_and_a_whole_gpu_is_not(tmp_path: Path, level: str, name: str) -> None:
    found = finding_of(host_of(tmp_path, builders.gpu(name=name)), "vGPU", level)
    assert (f"({name}) is a vGPU" in found.what) == (level == "warning")


def test_a_gpu_that_serves_virtual_machines_is_found(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / f"sys/bus/pci/devices/{FIRST.pci_address}"
    write(folder / "sriov_numvfs", "16\n")
    assert "hosts 16 virtual functions" in finding_of(host, "vGPU", "problem").what
    (folder / "mdev_supported_types/nvidia-222/devices/4f3e").mkdir(parents=True)
    assert "hosts 1 vGPU for virtual machines" in finding_of(host, "vGPU", "problem").what


# -- what MPS can do there


def served(root: Path, *gpus: Gpu, **keys: str) -> Host:
    """A host whose daemon and control daemon serve these GPUs."""
    return host_of(root, *gpus, snapshot=snapshot(*gpus), **keys)


def divide(root: Path, *paths: str) -> None:
    entries = [f"- {{path: '{path}', type: NVIDIA_MPS, virtual_number: 4}}\n" for path in paths]
    write(root / "etc/yunion/host_container_device.yml", "devices:\n" + "".join(entries))


def keeping(gpu: Gpu) -> DeviceEntry:
    """An entry that leaves the compute mode of its GPU alone."""
    return builders.entry(gpu.address, 4)._replace(cuda_mps_compute_mode="keep")


def test_what_only_root_can_read_of_the_entries_is_not_claimed(tmp_path: Path) -> None:
    divide(tmp_path, str(FIRST.render_node), SECOND.address)
    host = host_of(tmp_path, FIRST, SECOND)
    host.inventory = Lazy(lambda: builders.inventory(FIRST, SECOND)._replace(meant_is_hidden=True))
    unseen = "see which GPUs the entries mean"
    assert finding_of(host, "configuration", "ok").what.startswith("the files have no errors; ")
    assert unseen in finding_of(host, "configuration", "ok").what
    for check in ("GPUs", "MIG", "vGPU", "budgets", "job budgets", "compute mode", "device nodes"):
        assert unseen in finding_of(host, check, "skipped").what, check
    assert host.domains()[0].name == "host", "its directories are known all the same"


def test_a_uuid_says_which_gpu_is_meant_even_to_ordinary_users(host: Host, tmp_path: Path) -> None:
    divide(tmp_path, str(FIRST.uuid), str(SECOND.render_node))
    host.inventory = Lazy(lambda: builders.inventory(FIRST, SECOND)._replace(meant_is_hidden=True))
    skipped, divided = check_findings(host, "GPUs")
    assert (skipped.level, divided.what) == ("skipped", "1 divided, all working")
    assert finding_of(host, "compute mode", "ok")


@pytest.mark.parametrize("code", [GPU_GONE, GPU_OTHER_DRIVER])
def test_the_device_node_of_a_gpu_that_is_not_there_is_not_missed(tmp_path: Path, code: str) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia7"):
        write(tmp_path / "dev" / name).chmod(0o666)
    divide(tmp_path, "06:00.0", "07:00.0")
    absent = FIRST._replace(reason=Reason("it is not there", code))
    assert finding_of(served(tmp_path, absent, SECOND), "device nodes", "ok")
    assert finding_of(served(tmp_path, absent), "device nodes", "skipped").what == "no divided GPU answers"


def test_an_entry_that_the_daemon_has_not_read_needs_a_reload(tmp_path: Path) -> None:
    first = FIRST._replace(compute_mode=EXCLUSIVE)
    taken = snapshot(first, SECOND, entries=[builders.entry("06:00.0", 4)])
    host = host_of(tmp_path, first, SECOND, snapshot=taken)
    divide(tmp_path, "06:00.0", "07:00.0")
    unread = finding_of(host, "configuration", "warning")
    assert unread.what.startswith("07:00.0 is not divided yet, because the daemon has not read the files")
    assert (unread.hint.endswith("yunion-mps reload"), unread.code) == (True, RELOAD_NEEDED)
    assert finding_of(host, "compute mode", "ok").what == EXCLUSIVE
    assert finding_of(host, "GPUs", "ok").what == "1 divided, all working"


def test_a_compute_mode_that_only_the_files_require_needs_a_reload(tmp_path: Path) -> None:
    keeps = [builders.entry("06:00.0", 4)._replace(cuda_mps_compute_mode="keep")]
    host = host_of(tmp_path, FIRST, snapshot=snapshot(FIRST, entries=keeps))
    divide(tmp_path, "06:00.0")
    finding = finding_of(host, "compute mode", "warning")
    assert finding.what.endswith(
        "the files require Exclusive_Process, but the daemon has not read them since they changed"
    )
    assert (finding.hint.endswith("yunion-mps reload"), finding.code) == (True, RELOAD_NEEDED)


def test_a_mode_that_cannot_be_changed_has_one_hint_without_nvidia_smi(tmp_path: Path) -> None:
    fixed = FIRST._replace(compute_mode="Prohibited", mode_is_fixed=True)
    host = host_of(tmp_path, fixed, snapshot=snapshot(fixed))
    host.inventory = Lazy(lambda: builders.inventory(fixed._replace(mode_is_fixed=False), driver=DRIVER))
    finding = finding_of(host, "GPUs", "problem")
    assert (finding.code, "nvidia-smi" in finding.hint) == (COMPUTE_MODE_FIXED, False)
    assert finding_of(host, "compute mode", "skipped")


def test_while_the_daemon_waits_for_the_driver_nothing_else_is_claimed(tmp_path: Path) -> None:
    reason = Reason("the NVIDIA driver's kernel module is not loaded", DRIVER_NOT_LOADED)
    lost = FIRST._replace(reason=reason)
    host = host_of(tmp_path, snapshot=snapshot(lost))
    for check in ("control daemon", "orphaned servers", "MPS servers", "user switching", "disk space"):
        assert finding_of(host, check, "skipped").what == "not checked: no NVIDIA driver", check


@pytest.mark.parametrize(
    ("check", "changed", "level", "what", "hint"),
    [
        ("GPUs", {"reason": Reason("the GPU is lost", GPU_LOST)}, "problem", "the GPU is lost", "dmesg"),
        (
            "GPUs", {"reason": Reason("the MIG instance no longer exists", MIG_INSTANCE_GONE)},
            "problem", "no longer exists", "wait until it is created again",
        ),
        ("MIG", {"mig_enabled": True}, "problem", "is in MIG mode", "nvidia-smi -i 0000:07:00.0 -mig 0"),
        (
            "MIG",
            {"mig_enabled": False, "mig_pending": True},
            "warning",
            "MIG mode is off, and will be on after the next reset",
            "cancel the change: nvidia-smi -i 0000:07:00.0 -mig 0",
        ),
        ("budgets", {"compute_capability": (6, 1)}, "warning", "budgets are not enforced", "run only jobs"),
        ("compute mode", {"compute_mode": "Default"}, "warning", "could use it without limits",
         "set it again: yunion-mps reload"),
        ("compute mode", {"compute_mode": "Prohibited"}, "problem", "no CUDA program can use it",
         "set it again: yunion-mps reload"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_gpu_that_cannot_serve_or_not_as_promised_is_found(
    tmp_path: Path, check: str, changed: dict[str, Any], level: str, what: str, hint: str
) -> None:
    good, second = (one._replace(compute_mode=EXCLUSIVE) for one in (FIRST, SECOND))
    assert finding_of(served(tmp_path, good, second), check, "ok")
    finding = finding_of(served(tmp_path, good, second._replace(**changed)), check, level)
    assert finding.what.startswith("GPU 07:00.0")
    assert what in finding.what
    assert hint in finding.hint


@pytest.mark.parametrize("is_present", [True, False])
def test_a_lost_gpu_is_found_though_the_device_file_no_longer_names_it(
    tmp_path: Path, is_present: bool
) -> None:
    """The file has an error, so the daemon keeps the previous division and its GPUs."""
    reason = Reason("the GPU is lost", GPU_LOST)
    before = snapshot(FIRST, SECOND)
    there = builders.inventory(FIRST, SECOND._replace(reason=reason))
    lost = snapshots.with_conditions(before._replace(inventory=there))
    silent = [Gpu(SECOND.pci_address, reason=reason)] if is_present else []
    host = host_of(tmp_path, FIRST, *silent, snapshot=lost)
    entry = f"- {{path: {FIRST.pci_address}, type: NVIDIA_MPS, virtual_number: x}}"
    write(tmp_path / "etc/yunion/host_container_device.yml", f"devices:\n{entry}\n")
    finding = finding_of(host, "GPUs", "problem")
    assert finding.what.startswith("GPU 07:00.0")
    assert finding.what.endswith(": the GPU is lost")
    assert finding.code == GPU_LOST
    assert finding_of(host, "daemon", "ok").what == "running; 4 of 8 devices available"


def test_an_exclusive_mode_that_was_left_without_mps_is_found(tmp_path: Path) -> None:
    host = host_of(tmp_path, FIRST, SECOND._replace(compute_mode=EXCLUSIVE))
    what = "GPU 07:00.0 (Tesla T4) is in mode Exclusive_Process without a control daemon"
    assert what in finding_of(host, "compute mode", "warning").what
    left = finding_of(host_of(tmp_path, FIRST, SECOND), "compute mode", "ok")
    assert left.what == "Default; the daemon will set Exclusive_Process when it starts"


def test_a_compute_mode_that_is_to_be_kept_is_no_mistake(tmp_path: Path) -> None:
    kept = snapshot(FIRST, entries=[keeping(FIRST)])
    host = host_of(tmp_path, FIRST, snapshot=kept, cuda_mps_compute_mode="keep")
    assert finding_of(host, "compute mode", "ok").what.startswith(
        "Default; left unchanged because cuda_mps_compute_mode is keep"
    )


def test_a_mode_that_is_kept_by_an_entry_is_named_with_its_gpu(tmp_path: Path) -> None:
    second = SECOND._replace(compute_mode=EXCLUSIVE)
    divided = [keeping(FIRST), builders.entry("07:00.0", 4)]
    host = host_of(tmp_path, FIRST, second, snapshot=snapshot(FIRST, second, entries=divided))
    entries = [
        f"- {{path: {gpu.pci_address}, type: NVIDIA_MPS, virtual_number: 4{more}}}\n"
        for gpu, more in ((FIRST, ", cuda_mps_compute_mode: keep"), (second, ""))
    ]
    write(tmp_path / "etc/yunion/host_container_device.yml", "devices:\n" + "".join(entries))
    what = "Default, Exclusive_Process; left unchanged on 00:06.0 because cuda_mps_compute_mode is keep"
    assert finding_of(host, "compute mode", "ok").what.replace(FIRST.address, "00:06.0") == what


def test_an_unsupported_mode_is_the_warning_that_the_status_shows(tmp_path: Path) -> None:
    fixed, second = FIRST._replace(mode_is_fixed=True), SECOND._replace(compute_mode=EXCLUSIVE)
    host = host_of(tmp_path, FIRST, second, snapshot=snapshot(fixed, second))
    (shown,) = host.status()["problems"]
    finding = finding_of(host, "compute mode", "warning")
    assert (finding.what, finding.hint, finding.code) == (shown["text"], shown["hint"], shown["code"])
    assert finding.code == COMPUTE_MODE_UNSUPPORTED
    assert finding_of(host, "daemon", "ok")


def test_an_unknown_compute_mode_is_not_called_right(tmp_path: Path) -> None:
    host = host_of(tmp_path, FIRST._replace(compute_mode=None, mode_is_fixed=True))
    what = f"the driver does not report that of {FIRST.address}, which stays as it is"
    assert finding_of(host, "compute mode", "ok").what == what


def test_a_kept_mode_that_time_slicing_cannot_use_is_reported_once(tmp_path: Path) -> None:
    gpu = FIRST._replace(compute_mode=EXCLUSIVE)
    sliced = keeping(gpu)._replace(sharing=TIME_SLICING, virtual_number=2)
    host = host_of(tmp_path, gpu, snapshot=snapshot(gpu, entries=[sliced]), cuda_mps_compute_mode="keep")
    entry = f"- {{path: {gpu.pci_address}, type: NVIDIA_GPU_SHARE, virtual_number: 2}}"
    write(tmp_path / "etc/yunion/host_container_device.yml", f"devices:\n{entry}\n")
    found = finding_of(host, "GPUs", "problem")
    assert "time-slicing requires compute mode Default, but it is Exclusive_Process" in found.what
    assert f"nvidia-smi -i {gpu.uuid} -c DEFAULT" in found.hint
    assert finding_of(host, "compute mode", "skipped")


def test_a_prohibited_gpu_in_mig_mode_is_reported_once(tmp_path: Path) -> None:
    entry = "devices:\n- {path: '81:00.0', type: NVIDIA_MPS, mig: all-3g.40gb}\n"
    write(tmp_path / "etc/yunion/host_container_device.yml", entry)
    now = snapshots.mig()
    gpus = [gpu._replace(compute_mode="Prohibited") for gpu in now.inventory.gpus[1:]]
    found = finding_of(host_of(tmp_path, *gpus, snapshot=now), "compute mode", "problem")
    assert "is in compute mode Prohibited: no CUDA program can use it" in found.what
    assert found.hint == "nvidia-smi -i 0000:81:00.0 -c DEFAULT"


def test_a_gpu_in_mig_mode_is_reported_once(tmp_path: Path) -> None:
    host = host_of(tmp_path, FIRST._replace(mig_enabled=True))
    assert finding_of(host, "MIG", "problem")
    assert finding_of(host, "GPUs", "skipped").what == "no GPU of this host is divided into devices"
    assert (
        finding_of(host, "configuration", "ok").what
        == "the configuration is valid; 1 GPU cannot be divided now"
    )
    assert (
        finding_of(host, "compute mode", "ok").what == "Default; left unchanged because no GPU can be divided"
    )


def test_mig_instances_are_not_counted_as_gpus(tmp_path: Path) -> None:
    entry = "- {path: '%s', type: NVIDIA_MPS, %s}"
    entries = [entry % ("00:06.0", "virtual_number: 4"), entry % ("81:00.0", "mig: all-3g.40gb")]
    write(tmp_path / "etc/yunion/host_container_device.yml", "\n".join(["devices:", *entries, ""]))
    host = host_of(tmp_path, *snapshots.mig().inventory.gpus, snapshot=snapshots.mig())
    assert finding_of(host, "GPUs", "ok").what == "2 divided (2 MIG instances), all working"
    assert finding_of(host, "configuration", "ok").what == "the configuration is valid; 6 devices on 2 GPUs"


def test_a_missing_or_closed_node_of_a_mig_instance_is_found(tmp_path: Path) -> None:
    entry = "devices: [{path: '81:00.0', type: NVIDIA_MPS, mig: all-3g.40gb}]\n"
    write(tmp_path / "etc/yunion/host_container_device.yml", entry)
    _, gpu, *instances = (gpu._replace(minor=1) for gpu in snapshots.mig().inventory.gpus)
    host = host_of(tmp_path, gpu, *instances, snapshot=snapshots.mig())
    for name in ("nvidiactl", "nvidia-uvm", "nvidia1"):
        write(tmp_path / "dev" / name).chmod(0o666)
    place = tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig"
    for number, file in enumerate(("gi1/access", "gi1/ci0/access", "gi2/access", "gi2/ci0/access")):
        write(place / file, f"DeviceFileMinor: {number}\n")
        write(tmp_path / f"dev/nvidia-caps/nvidia-cap{number}")
    assert finding_of(host, "device nodes", "ok")
    node = tmp_path / "dev/nvidia-caps/nvidia-cap3"
    node.chmod(0o600)
    assert finding_of(host, "device nodes", "problem").what == f"{node}: accessible only to root"
    node.unlink()
    finding = finding_of(host, "device nodes", "problem")
    assert finding.what == "MIG instance 81:00.0-g2: no such device node: /dev/nvidia-caps/nvidia-cap3"
    assert finding.hint.startswith(f"create it: nvidia-modprobe -f {place}/gi2/ci0/access; ")


def test_without_gpus_that_are_divided_a_check_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "etc/yunion/host_container_device.yml", "devices: []\n")
    host = host_of(tmp_path, FIRST, enable_cuda_mps="false")
    for check in ("device nodes", "compute mode", "client limit"):
        assert finding_of(host, check, "skipped").what == "no GPU of this host is divided into devices"


@pytest.mark.parametrize(
    ("clients", "level", "what"),
    [
        (17, "ok", "at most 17 of 20 clients on a GPU"),
        (18, "warning", "18 of the 20 clients that MPS allows"),
        (20, "problem", "has 20 clients, and MPS allows 20: the next one will be refused"),
    ],
)
def test_as_many_clients_as_mps_allows_are_found(tmp_path: Path, clients: int, level: str, what: str) -> None:
    host = host_of(tmp_path, FIRST, cuda_mps_max_clients="20")
    host.users = Lazy(lambda: {str(FIRST.uuid): dict.fromkeys(range(4_000_000, 4_000_000 + clients), 10)})
    assert what in finding_of(host, "client limit", level).what


def test_job_budgets_that_are_only_reported_need_nothing(tmp_path: Path) -> None:
    host = host_of(tmp_path, FIRST)
    host.users = Lazy(dict)
    assert finding_of(host, "job budgets", "ok").what == "over_budget is report on every divided GPU"


def test_jobs_over_budget_are_terminated_only_under_mps(tmp_path: Path) -> None:
    entry = "- {path: '%s', type: %s, %s}"
    entries = [
        entry % ("00:06.0", "NVIDIA_MPS", "virtual_number: 4"),
        entry % ("81:00.0", "NVIDIA_MPS", "mig: all-3g.40gb, virtual_number: 2"),
        entry % ("07:00.0", "NVIDIA_GPU_SHARE", "virtual_number: 2"),
    ]
    write(tmp_path / "etc/yunion/host_container_device.yml", "\n".join(["devices:", *entries, ""]))
    host = host_of(tmp_path, *snapshots.mig().inventory.gpus, SECOND, over_budget="terminate")
    host.users = Lazy(lambda: {str(gpu.uuid): {} for gpu in host.inventory().gpus})
    what = "over_budget is terminate on 1 GPU and 2 MIG instances, but not on the time-sliced ones: 07:00.0"
    assert finding_of(host, "job budgets", "ok").what == what


@pytest.mark.parametrize(
    ("processes", "level", "what"),
    [
        ({}, "ok", "over_budget is terminate on 1 GPU"),
        ({os.getpid(): 10, NEVER: None}, "ok", "over_budget is terminate on 1 GPU"),
        ({os.getpid(): None}, "warning", "the driver does not report how much memory the processes on"),
        ({NEVER: 10}, "warning", "are not visible here"),
        (None, "warning", "does not report its processes"),
    ],
)
def test_a_gpu_where_job_budgets_cannot_be_enforced_is_reported(
    tmp_path: Path, processes: dict[int, int | None] | None, level: str, what: str
) -> None:
    host = host_of(tmp_path, FIRST, over_budget="terminate")
    host.users = Lazy(lambda: {} if processes is None else {str(FIRST.uuid): processes})
    found = finding_of(host, "job budgets", level)
    assert what in found.what
    assert found.code in ("", PROCESS_MEMORY_UNKNOWN)
