"""`yunion-mps doctor` where other programs are in the way: control daemons, front-ends, servers and jobs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from integration.daemon_host import eventually, is_running
from unit.doctor.healthy import CONTROL, STRANGER, look
from unit.doctor.scene import SLEEP, Scene


def test_a_program_that_uses_a_gpu_past_mps_is_named(ready: Scene) -> None:
    inside = ready.process(SLEEP, **ready.device(0))
    outside = ready.process(SLEEP, CUDA_MPS_PIPE_DIRECTORY="/nowhere")
    for process in (inside, outside):
        ready.host.gpus[0].add_process(process.pid, 100)
    found = look(ready.host).one("past MPS", "warning")
    assert found["what"].startswith(f"PID {outside.pid} (python")
    assert "root) uses GPU 00:06.0 past our MPS (it looks in /nowhere): it has no limits" in found["what"]


def test_another_programs_control_daemon_in_our_place_is_found(scene: Scene) -> None:
    pid = scene.control_daemon(scene.pipe)
    found = look(scene.host).one("control daemon", "problem")
    assert (
        f"a control daemon (PID {pid}, uid 0), not started by us, already serves {scene.pipe}"
        in found["what"]
    )
    assert found["hint"].startswith(
        "when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY="
    )


def test_a_control_daemon_that_goes_on_without_us_is_found(ready: Scene) -> None:
    pid = ready.daemon.control_pid()
    ready.daemon.kill()
    found = look(ready.host).one("control daemon", "warning")
    assert found["what"].startswith(f"PID {pid} goes on in {ready.pipe} without the daemon")


def test_a_socket_that_was_cleaned_away_is_found(ready: Scene) -> None:
    ready.daemon.kill()  # it would mend that
    (ready.pipe / "control").unlink()
    assert (
        look(ready.host).one("control daemon", "warning")["what"].endswith("because its socket was removed")
    )


def test_a_socket_that_was_removed_is_found_before_it_is_mended(ready: Scene) -> None:
    socket = ready.pipe / "control"

    def told() -> bool:
        socket.unlink(missing_ok=True)
        (found,) = look(ready.host).checks["control daemon"]
        return found["level"] == "problem" and found["what"].endswith(": its socket was removed")

    eventually(told, "that problem")


def test_a_socket_that_others_may_not_connect_to_is_found(ready: Scene) -> None:
    (ready.pipe / "control").chmod(0o600)
    found = look(ready.host).one("pipe directory", "problem")
    assert found["what"] == f"other users may not connect to {ready.pipe}/control"
    assert found["hint"] == f"chmod a+rw {ready.pipe}/control"


def test_another_control_daemon_in_nvidias_place_is_found(ready: Scene) -> None:
    place = ready.host.root / "tmp/nvidia-mps"
    pid = ready.control_daemon(place, CUDA_VISIBLE_DEVICES="GPU-ffffffff")
    found = look(ready.host).one("other control daemons", "warning")
    assert f"another control daemon, PID {pid} (root, {place}), is where programs look" in found["what"]


def test_another_control_daemon_for_our_gpus_is_found(ready: Scene) -> None:
    place = ready.host.root / "run/theirs"
    ready.control_daemon(place, CUDA_VISIBLE_DEVICES=ready.host.gpus[1].uuid)
    assert "serves GPUs of ours" in look(ready.host).one("other control daemons", "problem")["what"]


def test_another_control_daemon_that_counts_gpus_or_takes_all_is_found(ready: Scene) -> None:
    pid = ready.control_daemon(ready.host.root / "run/counts", CUDA_VISIBLE_DEVICES="0")
    found = look(ready.host).one("other control daemons", "warning")
    assert f"PID {pid} " in found["what"]
    ready.control_daemon(ready.host.root / "run/takes-all")
    assert [one["level"] for one in look(ready.host).checks["other control daemons"]] == [
        "problem",
        "warning",
    ]


def test_another_control_daemon_for_other_gpus_is_none_of_our_business(ready: Scene) -> None:
    ready.control_daemon(ready.host.root / "run/theirs", CUDA_VISIBLE_DEVICES="GPU-ffffffff")
    assert "serves other GPUs" in look(ready.host).one("other control daemons", "ok")["what"]


def test_a_control_daemon_that_was_stopped_is_found_with_the_cause(ready: Scene) -> None:
    pid = ready.daemon.control_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        found = look(ready.host).one("control daemon answers", "problem")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "stopped by a signal (SIGSTOP)" in found["what"]


def test_a_front_end_that_was_left_open_is_named(ready: Scene) -> None:
    env = {**ready.host.env, "CUDA_MPS_PIPE_DIRECTORY": str(ready.pipe)}
    with ready.host.popen([CONTROL], env=env, stdin=subprocess.PIPE) as front_end:
        assert front_end.stdin is not None
        front_end.stdin.write("get_server_list\n")
        front_end.stdin.flush()

        def told() -> str:
            return look(ready.host).checks["control daemon answers"][0]["what"]

        eventually(lambda: f"PID {front_end.pid}" in told(), "its name")
        front_end.stdin.close()


def test_a_server_that_outlived_its_control_daemon_is_found(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    (server,) = ready.stand_ins.servers()
    control = ready.daemon.control_pid()
    ready.daemon.kill()
    os.kill(control, signal.SIGKILL)
    eventually(lambda: not is_running(control), "its end")
    found = look(ready.host).one("orphaned servers", "warning")
    assert found["what"].startswith(f"its MPS server (PID {server}) of domain host lives on")


def test_servers_that_fail_at_their_start_are_found(ready: Scene) -> None:
    ready.stand_ins.behave("failing")
    client = ready.stand_ins.client(ready.pipe)
    assert [client.says(), client.says()] == ["asking", "refused"]
    env = {**ready.host.env, "TZ": "HERE-12"}  # the doctor's own; the log is in the host's time
    found = look(ready.host, env=env).one("MPS servers", "problem")
    assert "failed 6 times within the last hour: Server " in found["what"]
    assert f"{ready.host.root}/tmp/nvidia-mps/log/server.log" in found["hint"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_client_that_waits_for_another_users_jobs_is_named(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    assert look(ready.host).one("users", "ok")
    waiting = ready.stand_ins.client(ready.pipe, STRANGER)
    assert waiting.says() == "asking"
    found = look(ready.host).one("users", "warning")
    assert found["what"].startswith(f"PID {waiting.pid} (python")
    assert "nobody) waits until the jobs of root are done" in found["what"]


def test_a_control_daemon_from_before_the_drivers_update_is_found(scene: Scene) -> None:
    folder = scene.host.root / "opt"
    folder.mkdir()
    path = os.pathsep.join(
        part for part in scene.host.env["PATH"].split(os.pathsep) if not part.endswith("/mps")
    )
    real = shutil.which(CONTROL, path=path)
    assert real
    version = scene.host.description.driver_version
    old = f"{version[:-1]}{(int(version[-1]) + 1) % 10}"
    (folder / CONTROL).write_bytes(Path(real).read_bytes().replace(version.encode(), old.encode()))
    (folder / CONTROL).chmod(0o755)
    shutil.copy(scene.stand_ins.folder / "nvidia-cuda-mps-server", folder)
    scene.daemon.env["PATH"] = f"{folder}{os.pathsep}{path}"
    pid = scene.start().daemon.control_pid()
    found = look(scene.host).one("driver", "warning")
    assert found["what"] == f"the running control daemon (PID {pid}) is of {old}, the driver of {version}"


def test_a_control_daemon_whose_program_was_replaced_is_found(scene: Scene) -> None:
    folder = scene.host.root / "opt"
    folder.mkdir()
    path = os.pathsep.join(
        part for part in scene.host.env["PATH"].split(os.pathsep) if not part.endswith("/mps")
    )
    real = shutil.which(CONTROL, path=path)
    assert real
    shutil.copy(real, folder)
    shutil.copy(scene.stand_ins.folder / "nvidia-cuda-mps-server", folder)
    scene.daemon.env["PATH"] = f"{folder}{os.pathsep}{path}"
    scene.start()
    scene.host.env["PATH"] = scene.daemon.env["PATH"]
    assert look(scene.host).bad() == {}
    shutil.copy(real, folder / "new")
    (folder / "new").replace(folder / CONTROL)
    assert "was replaced or removed since" in look(scene.host).one("programs", "warning")["what"]
