"""NVIDIA's own nvidia-smi, unmodified, on a simulated host."""

from __future__ import annotations

import os

import pytest

from simhost import SimHost
from unit.simhost.conftest import MakeHost


def smi(host: SimHost, *words: str) -> str:
    done = host.run(["nvidia-smi", *words])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_list_names_every_gpu(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "count": 2}, {"kind": "rtx-5090"}])
    assert smi(host, "-L") == (
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {host.gpus[0].uuid})\n"
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {host.gpus[1].uuid})\n"
        f"GPU 2: NVIDIA GeForce RTX 5090 (UUID: {host.gpus[2].uuid})\n"
    )


def test_table_shows_memory_mode_mig_and_processes(make_host: MakeHost) -> None:
    me = os.getpid()
    processes = [{"pid": me, "used_mib": 500}], [{"pid": 4194303, "used_mib": 77, "type": "M+C"}]
    host = make_host(
        [
            {"kind": "a100", "compute_mode": "exclusive_process", "processes": processes[0]},
            {"kind": "h100", "mig": True, "processes": processes[1]},
        ]
    )
    table = smi(host)
    assert "ERR!" not in table
    rows = [line.split() for line in table.splitlines()]
    assert any({"500MiB", "40960MiB", "E.", "Process"} <= set(row) for row in rows)
    assert [row[4:6] for row in rows if str(me) in row] == [[str(me), "C"]]
    assert [row[4:7] for row in rows if "4194303" in row] == [["4194303", "M+C", "[Not"]]
    assert any("Enabled" in row for row in rows)


def test_compute_apps_are_listed(make_host: MakeHost) -> None:
    host = make_host()
    host.gpus[0].add_process(4194302, 640)
    host.gpus[0].add_process(4194303, None)
    assert smi(host, "--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv") == (
        "pid, used_gpu_memory [MiB], gpu_uuid\n"
        "4194302, 640 MiB, GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400\n"
        "4194303, [N/A], GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400\n"
    )


def test_set_compute_mode_is_kept(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4", "count": 2}])
    assert "Set compute mode to EXCLUSIVE_PROCESS for GPU 00000000:00:07.0." in smi(
        host, "-i", "1", "-c", "EXCLUSIVE_PROCESS"
    )
    assert smi(host, "--query-gpu=compute_mode", "--format=csv,noheader") == "Default\nExclusive_Process\n"
    assert [gpu.compute_mode for gpu in host.gpus] == ["default", "exclusive_process"]


def test_exclusive_process_is_refused_in_mig_mode(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}])
    assert "is not supported on a MIG-enabled device" in smi(host, "-i", "0", "-c", "EXCLUSIVE_PROCESS")
    assert host.gpus[0].compute_mode == "default"


def test_persistence_and_links_are_shown(make_host: MakeHost) -> None:
    host = make_host([{"kind": "l40s", "link": {"width": 8, "current_speed": 2.5}}])
    smi(host, "-pm", "1")
    query = "--query-gpu=persistence_mode,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.max"
    assert smi(host, query, "--format=csv,noheader") == "Enabled, 4, 1, 8\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("driver_not_loaded", "couldn't communicate with the NVIDIA driver"),
        ("lib_rm_version_mismatch", "Failed to initialize NVML: Driver/library version mismatch"),
        ("no_permission", "Failed to initialize NVML: Insufficient Permissions"),
    ],
)
def test_failed_init_is_told_in_nvidias_words(make_host: MakeHost, error: str, words: str) -> None:
    host = make_host()
    host.fail("nvmlInit", error)
    done = host.run(["nvidia-smi"])
    assert done.returncode != 0
    assert words in done.stdout


def test_hidden_library_is_missed_and_back(make_host: MakeHost) -> None:
    host = make_host()
    host.hide_library()
    assert "couldn't find libnvidia-ml.so" in host.run(["nvidia-smi", "-L"]).stdout
    host.show_library()
    assert smi(host, "-L").startswith("GPU 0: Tesla P40")


def test_lost_gpu_is_named(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4", "lost": True}])
    assert "GPU is lost" in host.run(["nvidia-smi", "-L"]).stdout
