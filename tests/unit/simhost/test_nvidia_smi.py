"""NVIDIA's own nvidia-smi, unmodified, on a simulated host."""

from __future__ import annotations

import os

from unit.simhost.conftest import MakeHost


def test_the_table_shows_memory_mode_mig_and_processes(make_host: MakeHost) -> None:
    me = os.getpid()
    processes = [{"pid": me, "used_mib": 500}], [{"pid": 4194303, "used_mib": 77, "kind": "M+C"}]
    host = make_host(
        [
            {"kind": "a100", "compute_mode": "exclusive_process", "processes": processes[0]},
            {"kind": "h100", "mig": True, "processes": processes[1]},
        ]
    )
    table = host.run(["nvidia-smi"], check=True).stdout
    assert "ERR!" not in table
    rows = [line.split() for line in table.splitlines()]
    assert any({"500MiB", "40960MiB", "E.", "Process"} <= set(row) for row in rows)
    assert [row[4:6] for row in rows if str(me) in row] == [[str(me), "C"]]
    assert [row[4:7] for row in rows if "4194303" in row] == [["4194303", "M+C", "[Not"]]
    assert any("Enabled" in row for row in rows)


def test_exclusive_process_is_refused_in_mig_mode(make_host: MakeHost) -> None:
    host = make_host([{"kind": "h100", "mig": True}])
    said = host.run(["nvidia-smi", "-i", "0", "-c", "EXCLUSIVE_PROCESS"]).stdout
    assert "is not supported on a MIG-enabled device" in said
    assert host.gpus[0].compute_mode == "default"


def test_a_lost_gpu_and_a_missing_library_are_named(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4", "lost": True}])
    assert "GPU is lost" in host.run(["nvidia-smi", "-L"]).stdout
    host.hide_library()
    assert "couldn't find libnvidia-ml.so" in host.run(["nvidia-smi", "-L"]).stdout
    host.show_library()
    assert "GPU is lost" in host.run(["nvidia-smi", "-L"]).stdout
