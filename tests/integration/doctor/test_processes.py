"""`yunion-mps doctor` where other programs are in the way: control daemons, front-ends, servers and jobs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from integration.daemon_host import eventually, is_running
from integration.doctor_host import CONTROL, STRANGER, Scene


def test_another_programs_control_daemon_in_our_place_is_found(scene: Scene) -> None:
    pid = scene.control_daemon(scene.pipe)
    found = scene.look().one("control daemon", "problem")
    assert (
        f"a control daemon (PID {pid}, uid 0) not started by yunion-mps serves {scene.pipe}" in found["what"]
    )
    assert found["hint"].startswith("once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY=")


def test_a_control_daemon_that_goes_on_without_us_is_found(ready: Scene) -> None:
    pid = ready.daemon.control_pid()
    ready.daemon.kill()
    found = ready.look().one("control daemon", "warning")
    assert found["what"].startswith(f"PID {pid} still serves {ready.pipe} with its limits, although")
    (ready.pipe / "control").unlink()  # which the daemon would mend
    assert (
        ready.look().one("control daemon", "warning")["what"].endswith("because its socket has been removed")
    )


def test_a_socket_that_was_removed_is_found_before_it_is_mended(ready: Scene) -> None:
    socket = ready.pipe / "control"

    def told() -> bool:
        socket.unlink(missing_ok=True)
        (found,) = ready.look().checks["control daemon"]
        return found["level"] == "problem" and found["what"].endswith(": its socket has been removed")

    eventually(told, "that problem")


def test_another_control_daemon_is_judged_by_its_place_and_its_gpus(ready: Scene) -> None:
    root, ours = ready.host.root, ready.host.gpus[1].uuid
    places = {
        "tmp/nvidia-mps": ("GPU-ffffffff", "warning", "serves the default pipe directory"),
        "run/ours": (ours, "problem", "serves the same GPUs: only one of the two can use them at a time"),
        "run/all": (None, "problem", "serves the same GPUs: only one of the two can use them at a time"),
        "run/numbers": ("0", "warning", "may serve the same GPUs: its CUDA_VISIBLE_DEVICES"),
        "run/theirs": ("GPU-ffffffff", "ok", "serves other GPUs"),
    }
    wanted = {}
    for place, (gpus, level, what) in places.items():
        pid = ready.control_daemon(root / place, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}))
        wanted[f"PID {pid} (root, {root}/{place})"] = (level, what)
    found = ready.look().checks["other control daemons"]
    assert len(found) == len(wanted)
    for other, (level, what) in wanted.items():
        (line,) = [one for one in found if other in one["what"]]
        assert line["level"] == level
        assert what in line["what"]


def test_a_control_daemon_that_was_stopped_is_found_with_the_cause(ready: Scene) -> None:
    pid = ready.daemon.control_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        found = ready.look().one("control daemon answers", "problem")
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
            return ready.look().checks["control daemon answers"][0]["what"]

        eventually(lambda: f"PID {front_end.pid}" in told(), "its name")
        front_end.stdin.close()


def test_a_server_that_outlived_its_control_daemon_is_found(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    (server,) = ready.stand_ins.servers()
    control = ready.daemon.control_pid()
    ready.daemon.kill()
    os.kill(control, signal.SIGKILL)
    eventually(lambda: not is_running(control), "its end")
    found = ready.look().one("orphaned servers", "warning")
    assert found["what"].startswith(f"the MPS server (PID {server}) of domain host is still running")


def test_servers_that_fail_at_their_start_are_found(ready: Scene) -> None:
    ready.stand_ins.behave("failing")
    client = ready.stand_ins.client(ready.pipe)
    assert [client.says(), client.says()] == ["asking", "refused"]
    # The time zone is the doctor's own; the log is in the host's time.
    found = ready.look(TZ="HERE-12").one("MPS servers", "problem")
    assert "failed 6 times within the last hour: Server " in found["what"]
    assert f"{ready.host.root}/tmp/nvidia-mps/log/server.log" in found["hint"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_client_that_waits_for_another_users_jobs_is_named(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    assert ready.look().one("users", "ok")
    waiting = ready.stand_ins.client(ready.pipe, STRANGER)
    assert waiting.says() == "asking"
    found = ready.look().one("users", "warning")
    assert found["what"].startswith(f"PID {waiting.pid} (python")
    assert "nobody) is waiting for the jobs of root to end" in found["what"]


def test_a_control_daemon_from_before_the_drivers_update_is_found(scene: Scene) -> None:
    program = scene.own_programs() / CONTROL
    version = scene.host.description.driver_version
    old = f"{version[:-1]}{(int(version[-1]) + 1) % 10}"
    program.write_bytes(program.read_bytes().replace(version.encode(), old.encode()))
    pid = scene.start().daemon.control_pid()
    found = scene.look().one("driver", "warning")
    assert (
        found["what"]
        == f"the running control daemon (PID {pid}) is version {old}, but the driver is version {version}"
    )


def test_a_control_daemon_whose_program_was_replaced_is_found(scene: Scene) -> None:
    folder = scene.own_programs()
    scene.start()
    scene.host.env["PATH"] = scene.daemon.env["PATH"]
    assert scene.look().bad() == {}
    shutil.copy(folder / CONTROL, folder / "new")
    (folder / "new").replace(folder / CONTROL)
    assert "has since been replaced or removed" in scene.look().one("programs", "warning")["what"]
