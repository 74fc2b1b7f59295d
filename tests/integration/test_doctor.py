"""`yunion-mps doctor` on whole hosts, with each fault made for real.

The daemon and the control daemon are real; jobs and their MPS server are stand-ins, and NVML is simulated.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from integration.daemon_host import eventually, is_running
from unit.doctor.healthy import CONTROL, STRANGER, look
from unit.doctor.scene import Scene

#: As a Nagios or NRPE plugin is run.
QUICK_S = 1.0

SLEEP = [sys.executable, "-IS", "-c", "import time; print('ready', flush=True); time.sleep(600)"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def scene(stack: ExitStack) -> Scene:
    """A healthy host, its daemon not started."""
    return Scene(stack)


@pytest.fixture
def ready(scene: Scene) -> Scene:
    return scene.start()


# -- a healthy host


def test_on_a_healthy_host_every_line_is_ok(ready: Scene) -> None:
    seen = look(ready.host)
    assert (seen.code, seen.bad()) == (0, {})
    assert len(seen.checks) == 24


def test_on_a_healthy_host_it_takes_less_than_a_second(ready: Scene) -> None:
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        look(ready.host)
        took_s.append(time.monotonic() - began_s)
    assert min(took_s) < QUICK_S


def test_the_first_line_is_the_state_as_monitoring_shows_it(ready: Scene) -> None:
    done = ready.host.run(["yunion-mps", "doctor"])
    first, *lines = done.stdout.splitlines()
    assert (done.returncode, first) == (0, f"ok: {len(lines)} ok")
    assert lines[0] == "ok       daemon: it serves, 8 of 8 devices are available"
    ready.host.gpus[1].compute_mode = "default"
    (ready.host.root / "dev/shm").chmod(0o755)
    done = ready.host.run(["yunion-mps", "doctor"])
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (2, "problem: 2 problems, 22 ok")
    assert lines[1].startswith(
        "problem  compute mode: GPU 00:07.0 (Tesla T4) is Default, not Exclusive_Process"
    )
    assert lines[2].startswith("         -> find what changed it")


@pytest.mark.parametrize("output", ["yaml", "csv"])
def test_it_answers_in_every_format(ready: Scene, output: str) -> None:
    done = ready.host.run(["yunion-mps", "doctor", "-o", output])
    assert (done.returncode, done.stderr) == (0, "")
    start = {"yaml": "state: ok\nexit_code: 0\n", "csv": "Level,Check,What,Remedy\nok,daemon,"}
    assert done.stdout.startswith(start[output])


def test_it_changes_nothing_and_leaves_no_process(ready: Scene) -> None:
    def state() -> object:
        files = {str(path): path.lstat().st_mtime_ns for path in ready.host.root.rglob("*") if path.is_file()}
        return {name: at for name, at in files.items() if "/log/" not in name}, ready.host.show()

    before = state()
    look(ready.host)
    assert state() == before
    assert ready.stand_ins.servers() == []


# -- without the daemon, and as a user


def test_without_the_daemon_the_rest_is_looked_at(scene: Scene) -> None:
    seen = look(scene.host)
    assert seen.code == 2
    assert seen.bad() == {
        "problem daemon": f"the daemon is not running: there is no {scene.daemon.socket_path}",
        "skipped control daemon answers": "no control daemon runs",
        "skipped MPS servers": "there is no log yet",
    }


def test_where_mps_is_not_enabled_nothing_is_wrong(scene: Scene) -> None:
    scene.daemon.write_host_conf({"enable_cuda_mps": False})
    for words in ("it does not run, and enable_cuda_mps is false", "it runs (0.1.0), and enable_cuda_mps is"):
        seen = look(scene.host)
        assert (seen.code, [level for level in seen.bad() if not level.startswith("skipped")]) == (0, [])
        assert seen.one("daemon", "ok")["what"].startswith(words)
        if not scene.daemon.running:
            scene.start()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_user_is_told_what_only_root_sees_and_all_else(ready: Scene) -> None:
    seen = look(ready.host, user=STRANGER, group=STRANGER, extra_groups=[])
    assert seen.code == 0
    assert {line.split(" ", 1)[0] for line in seen.bad()} == {"skipped"}
    assert "you may not ask the daemon" in seen.one("daemon", "skipped")["what"]
    assert seen.one("compute mode", "ok")
    assert seen.one("pipe directory", "ok")


def test_a_bad_configuration_is_told_with_its_line(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_scope="hots")
    found = look(scene.host).one("configuration", "problem")
    assert found["what"].startswith(f"{scene.host.root}/etc/yunion/host.conf:2: cuda_mps_scope is")


def test_a_control_daemon_that_had_to_be_started_again_is_told(ready: Scene) -> None:
    os.kill(ready.daemon.control_pid(), signal.SIGKILL)
    eventually(lambda: ready.daemon.status()["domains"][0]["restarts"], "its next start")
    eventually(lambda: ready.daemon.status()["state"] == "ready", "ready again")
    found = look(ready.host).one("daemon", "warning")
    assert found["what"] == "the control daemon of domain host had to be started again, once"


def test_limits_that_wait_for_a_jobs_end_are_told(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    file = ready.host.root / "etc/yunion/host_container_device.yml"
    file.write_text(file.read_text().replace("virtual_number: 4", "virtual_number: 2"))
    assert ready.host.run(["yunion-mps", "reload"]).returncode == 0
    found = look(ready.host).one("daemon", "warning")
    assert found["what"].startswith("domain host: other limits come into force when its MPS server (PID ")


# -- the driver


def test_a_driver_that_hangs_is_one_problem_and_keeps_nobody_waiting(ready: Scene) -> None:
    ready.host.fail("nvmlInit*", "success", delay_ms=60_000)
    began_s = time.monotonic()
    seen = look(ready.host, "--timeout", "1")
    assert time.monotonic() - began_s < 20
    assert seen.one("driver", "problem")["what"] == "the NVIDIA driver does not answer within 0.8 s"
    assert "does not answer" in seen.one("compute mode", "skipped")["what"]
    assert seen.one("daemon", "ok")


def test_without_a_driver_that_is_said_once_and_what_was_not_looked_at(ready: Scene) -> None:
    ready.host.hide_library()
    assert "no NVIDIA driver" in look(ready.host).one("driver", "problem")["what"]
    told = ready.host.run(["yunion-mps", "doctor"]).stdout
    skipped = "skipped  device nodes, GPUs, MIG, vGPU, budgets, compute mode, client limit, past MPS"
    reason = "not looked at: no NVIDIA driver: its library libnvidia-ml.so.1 is not installed"
    assert f"\n{skipped}: {reason}\n" in told


def test_a_driver_whose_module_is_older_than_its_library_is_told(ready: Scene) -> None:
    ready.host.fail("nvmlInit*", "lib_rm_version_mismatch")
    assert "are of different versions" in look(ready.host).one("driver", "problem")["what"]


# -- the GPUs


def test_a_compute_mode_that_somebody_changed_is_told(ready: Scene) -> None:
    ready.host.gpus[0].compute_mode = "default"
    found = look(ready.host).one("compute mode", "problem")
    assert "runs without limits" in found["what"]
    assert "nvidia-smi -i 0000:00:06.0 -c EXCLUSIVE_PROCESS" in found["remedy"]
    ready.host.gpus[0].compute_mode = "prohibited"
    assert "no CUDA program can use it" in look(ready.host).one("compute mode", "problem")["what"]


def test_an_exclusive_mode_that_was_left_without_mps_is_told(scene: Scene) -> None:
    scene.host.gpus[1].compute_mode = "exclusive_process"
    found = look(scene.host).one("compute mode", "warning")
    assert "GPU 00:07.0 (Tesla T4) is Exclusive_Process without a control daemon" in found["what"]


def test_a_gpu_that_is_lost_is_told(ready: Scene) -> None:
    ready.host.gpus[0].lose()
    assert "GPU is lost" in look(ready.host).one("GPUs", "problem")["what"]


def test_a_gpu_in_mig_mode_is_told(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "a100", "count": 2}).start()
    scene.host.gpus[1].mig = True
    found = look(scene.host).one("MIG", "problem")
    assert found["remedy"].startswith("nvidia-smi -i 0000:00:07.0 -mig 0")


def test_a_gpu_that_enforces_nothing_is_a_warning(stack: ExitStack) -> None:
    seen = look(Scene(stack, {"kind": "tesla-p40"}).start().host)
    assert "no budget is enforced" in seen.one("budgets", "warning")["what"]
    assert (seen.code, list(seen.bad())) == (1, ["warning budgets"])


def test_a_compute_mode_that_is_to_be_kept_is_no_mistake(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_compute_mode="keep")
    seen = look(scene.start().host)
    assert seen.one("compute mode", "ok")["what"].startswith("Default, which cuda_mps_compute_mode: keep")


def test_as_many_clients_as_mps_allows_are_told(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_max_clients=20)
    gpu = scene.start().host.gpus[0]
    for number in range(18):
        gpu.add_process(4_000_000 + number, 10, "M+C")
    assert "18 clients of the 20" in look(scene.host).one("client limit", "warning")["what"]
    for number in range(18, 20):
        gpu.add_process(4_000_000 + number, 10, "M+C")
    assert "the next one is refused" in look(scene.host).one("client limit", "problem")["what"]


def test_a_program_that_uses_a_gpu_past_mps_is_named(ready: Scene) -> None:
    inside = ready.process(SLEEP, **ready.device(0))
    outside = ready.process(SLEEP, CUDA_MPS_PIPE_DIRECTORY="/nowhere")
    for process in (inside, outside):
        ready.host.gpus[0].add_process(process.pid, 100)
    found = look(ready.host).one("past MPS", "warning")
    assert found["what"].startswith(f"PID {outside.pid} (python")
    assert "root) uses GPU 00:06.0 past our MPS (it looks in /nowhere): it has no limits" in found["what"]


# -- control daemons and servers


def test_a_control_daemon_of_somebody_else_in_our_place_is_told(scene: Scene) -> None:
    pid = scene.control_daemon(scene.pipe)
    found = look(scene.host).one("control daemon", "problem")
    assert (
        f"a control daemon (PID {pid}, uid 0), not started by us, already serves {scene.pipe}"
        in found["what"]
    )
    assert found["remedy"].startswith(
        "when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY="
    )


def test_a_control_daemon_that_goes_on_without_us_is_told(ready: Scene) -> None:
    pid = ready.daemon.control_pid()
    ready.daemon.kill()
    found = look(ready.host).one("control daemon", "warning")
    assert found["what"].startswith(f"PID {pid} goes on in {ready.pipe} without the daemon")


def test_a_socket_that_was_cleaned_away_is_told(ready: Scene) -> None:
    ready.daemon.kill()  # it would mend that
    (ready.pipe / "control").unlink()
    assert look(ready.host).one("control daemon", "warning")["what"].endswith("for its socket was removed")


def test_another_control_daemon_in_nvidias_place_is_told(ready: Scene) -> None:
    place = ready.host.root / "tmp/nvidia-mps"
    pid = ready.control_daemon(place, CUDA_VISIBLE_DEVICES="GPU-ffffffff")
    found = look(ready.host).one("other control daemons", "warning")
    assert f"another control daemon, PID {pid} (root, {place}), is where programs look" in found["what"]


def test_another_control_daemon_for_our_gpus_is_told(ready: Scene) -> None:
    place = ready.host.root / "run/theirs"
    ready.control_daemon(place, CUDA_VISIBLE_DEVICES=ready.host.gpus[1].uuid)
    assert "serves GPUs of ours" in look(ready.host).one("other control daemons", "problem")["what"]


def test_another_control_daemon_that_counts_gpus_or_takes_all_is_told(ready: Scene) -> None:
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


def test_a_control_daemon_that_was_stopped_is_told_with_the_cause(ready: Scene) -> None:
    pid = ready.daemon.control_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        found = look(ready.host).one("control daemon answers", "problem")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "stopped by a signal (SIGSTOP)" in found["what"]


def test_a_front_end_that_somebody_left_open_is_named(ready: Scene) -> None:
    env = {**ready.host.env, "CUDA_MPS_PIPE_DIRECTORY": str(ready.pipe)}
    with ready.host.popen([CONTROL], env=env, stdin=subprocess.PIPE) as front_end:
        assert front_end.stdin is not None
        front_end.stdin.write("get_server_list\n")
        front_end.stdin.flush()

        def told() -> str:
            return look(ready.host).checks["control daemon answers"][0]["what"]

        eventually(lambda: f"PID {front_end.pid}" in told(), "its name")
        front_end.stdin.close()


def test_a_server_that_outlived_its_control_daemon_is_told(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    (server,) = ready.stand_ins.servers()
    control = ready.daemon.control_pid()
    ready.daemon.kill()
    os.kill(control, signal.SIGKILL)
    eventually(lambda: not is_running(control), "its end")
    found = look(ready.host).one("orphaned servers", "warning")
    assert found["what"].startswith(f"its MPS server (PID {server}) of domain host lives on")


def test_servers_that_fail_at_their_start_are_told(ready: Scene) -> None:
    ready.stand_ins.behave("failing")
    client = ready.stand_ins.client(ready.pipe)
    assert [client.says(), client.says()] == ["asking", "refused"]
    found = look(ready.host).one("MPS servers", "problem")
    assert "failed 6 times within the last hour: Server " in found["what"]
    assert f"{ready.host.root}/tmp/nvidia-mps/log/server.log" in found["remedy"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_client_that_waits_for_another_users_jobs_is_named(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    assert look(ready.host).one("users", "ok")
    waiting = ready.stand_ins.client(ready.pipe, STRANGER)
    assert waiting.says() == "asking"
    found = look(ready.host).one("users", "warning")
    assert found["what"].startswith(f"PID {waiting.pid} (python")
    assert "nobody) waits until the jobs of root are done" in found["what"]


def test_a_control_daemon_whose_program_was_replaced_is_told(scene: Scene) -> None:
    folder = scene.host.root / "opt"
    folder.mkdir()
    path = os.pathsep.join(part for part in scene.host.env["PATH"].split(os.pathsep) if "/mps" not in part)
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
