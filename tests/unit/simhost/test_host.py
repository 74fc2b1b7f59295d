"""A simulated host: its files, its library under NVIDIA's programs, and its MPS server."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from integration.daemon_host import Daemon
from simhost import SimHost, StateError
from simhost.install import built_library
from simhost.mps import StandIns
from unit.simhost.conftest import MakeHost


def test_named_root_keeps_its_state_and_edits(tmp_path: Path) -> None:
    root = tmp_path / "h"
    configuration = root / "etc/yunion/host.conf"
    configuration.parent.mkdir(parents=True)
    configuration.write_text("enable_cuda_mps: false\n")
    with SimHost.create([{"kind": "t4"}], root) as host:
        host.gpus[0].compute_mode = "prohibited"
    with SimHost.create(None, root) as again:
        assert again.gpus[0].compute_mode == "prohibited"
        assert again.gpus[0].description.name == "Tesla T4"
    assert configuration.read_text() == "enable_cuda_mps: false\n"
    with pytest.raises(StateError, match="has a host with another description"):
        SimHost.create([{"kind": "l4"}], root)


def test_environment_is_not_the_outer_ones(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {"PYTHONPATH", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "NOTIFY_SOCKET", "YUNION_MPS_SOCKET"}
    for name in foreign:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LANG", "C")
    host = make_host()
    assert host.env["YUNION_MPS_ROOT"] == str(host.root)
    assert host.env["LANG"] == "C"
    assert not foreign & set(host.env)


def test_library_finds_its_state_without_an_environment(make_host: MakeHost) -> None:
    host = make_host()
    env = {"LD_LIBRARY_PATH": host.env["LD_LIBRARY_PATH"]}
    assert host.run(["nvidia-smi", "-L"], env=env).stdout.startswith("GPU 0: Tesla P40")


def test_a_pattern_matches_every_version_of_a_call(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        host.fail("nvmlDeviceGetPciInfo_v2", "unknown")
        with pytest.raises(n.NVMLError_Unknown):
            n.nvmlDeviceGetPciInfo_v3(handle)
        host.clear()
        host.fail("nvmlDeviceGet*", "no_permission")
        for call in (n.nvmlDeviceGetPciInfo, n.nvmlDeviceGetUUID, n.nvmlDeviceGetMemoryInfo):
            with pytest.raises(n.NVMLError_NoPermission):
                call(handle)


def test_several_processes_write_at_once_and_nothing_is_lost(make_host: MakeHost) -> None:
    host = make_host()
    program = """
    import sys
    n.nvmlInit()
    handle = n.nvmlDeviceGetHandleByIndex(0)
    failed = 0
    for _ in range(200):
        n.nvmlDeviceSetComputeMode(handle, 3)
        try:
            n.nvmlDeviceGetName(handle)
        except n.NVMLError_InUse:
            failed += 1
        n.nvmlDeviceSetComputeMode(handle, 0)
    print(failed)
    """
    host.fail("nvmlDeviceGetName", "in_use", times=150)
    source = "import pynvml as n\n" + re.sub(r"(?m)^    ", "", program)
    running = [host.popen([sys.executable, "-I", "-c", source]) for _ in range(2)]
    for pid in range(1, 21):
        host.gpus[0].add_process(pid, pid)
    failed = [int(process.communicate(timeout=30)[0]) for process in running]
    assert sum(failed) == 150  # each of the failures was met exactly once
    assert len(host.gpus[0].show()["processes"]) == 20
    assert host.gpus[0].compute_mode == "default"


def test_builders_at_once_make_one_library(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        built = set(pool.map(built_library, [tmp_path] * 2))
    assert [path.parent for path in built] == [tmp_path / ".cache/simhost"]
    assert list((tmp_path / ".cache/simhost").iterdir()) == list(built)


def test_state_of_another_version_is_refused_by_both_sides(make_host: MakeHost) -> None:
    host = make_host()
    state = host.root / "lib/simhost.state"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(StateError, match="use a new root"):
        SimHost.attach(host.root)
    assert "no state of this library's layout" in host.run(["nvidia-smi", "-L"]).stderr


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


OTHER_UID = 1234


@pytest.fixture
def host() -> Iterator[SimHost]:
    with SimHost.create() as host:
        yield host


@pytest.fixture
def stand_ins(host: SimHost) -> Iterator[StandIns]:
    with StandIns(host) as made:
        yield made


@pytest.fixture
def daemon(host: SimHost, stand_ins: StandIns) -> Iterator[Daemon]:
    with Daemon(host) as daemon:
        yield daemon.start().wait_ready()


def test_a_server_copies_the_defaults_and_keeps_them(daemon: Daemon, stand_ins: StandIns) -> None:
    stand_ins.attached(daemon.pipe_directory)
    (server,) = stand_ins.servers()
    daemon.control("set_default_active_thread_percentage 50")
    limits = [f"get_device_pinned_mem_limit {server} {device}" for device in (0, 1)]
    assert daemon.control(f"get_active_thread_percentage {server}", *limits) == ["25.0", "5G"]
    assert daemon.control(f"set_active_thread_percentage {server} 10") == ["10.0"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_waiting_client_hides_those_that_run(daemon: Daemon, stand_ins: StandIns) -> None:
    if stand_ins.asked:
        pytest.skip("a control daemon that asks (550) goes on as before")
    client = stand_ins.attached(daemon.pipe_directory)
    clients = f"get_client_list {stand_ins.servers()[0]}"
    assert daemon.control(clients) == [str(client.pid)]
    assert stand_ins.client(daemon.pipe_directory, OTHER_UID).says() == "asking"
    waiting = str(daemon.get("/v1/clients")[1]["waiting"])
    assert daemon.control(clients, "ps") == ["Server not found"], waiting


def test_one_version_of_a_call_fails_and_older_ones_go_on(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4", "processes": [{"pid": 7, "used_mib": 1}]}])
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        host.fail("nvmlDeviceGetComputeRunningProcesses_v3", "not_supported", one_version=True)
        with pytest.raises(n.NVMLError_NotSupported):
            n.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        assert [process.pid for process in n.nvmlDeviceGetComputeRunningProcesses_v2(handle)] == [7]


def test_a_lost_gpu_may_answer_single_calls(make_host: MakeHost) -> None:
    host = make_host()
    with host.pynvml() as n:
        n.nvmlInit()
        handle = n.nvmlDeviceGetHandleByIndex(0)
        host.gpus[0].lose()
        host.fail("nvmlDeviceGetComputeMode", "success")
        assert n.nvmlDeviceGetComputeMode(handle) == n.NVML_COMPUTEMODE_DEFAULT
        with pytest.raises(n.NVMLError_GpuIsLost):
            n.nvmlDeviceGetMemoryInfo(handle)


def test_a_process_list_without_room_may_succeed_with_a_count(make_host: MakeHost) -> None:
    host = make_host([{"kind": "t4", "processes": [{"pid": 7, "used_mib": 1}]}])
    host.fail("nvmlDeviceGetRunningProcessesSize", "insufficient_size")
    with host.pynvml() as n:
        n.nvmlInit()
        assert n.nvmlDeviceGetComputeRunningProcesses_v3(n.nvmlDeviceGetHandleByIndex(0)) == []
    assert "7" in host.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]).stdout
