"""`yunion-mps doctor` on whole hosts: healthy, and with each fault made for real.

The daemon and the control daemon are real; jobs and their MPS server are stand-ins, and NVML is simulated.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from urllib.request import urlopen

import pytest

from browser.scene import Served
from integration.daemon_host import eventually, is_running
from integration.doctor_host import CONTROL, PATIENT, SLEEP, STRANGER, Scene

# -- a healthy host


def test_on_a_healthy_host_every_line_is_ok(ready: Scene) -> None:
    job = ready.process(SLEEP, **ready.device(0))
    ready.host.gpus[0].add_process(job.pid, 100, "M+C")
    seen = ready.look("--pid", str(job.pid))
    assert (seen.code, seen.bad()) == (0, {})
    assert len(seen.checks) == 26
    assert seen.one("outside MPS", "ok")["what"] == "1 program on the GPUs, none outside MPS"
    assert seen.one("client limit", "ok")["what"] == "at most 1 of 48 clients on a GPU"


def test_mps_time_slicing_and_mig_on_one_host_are_shown_and_no_problem(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "h100", "count": 3})
    scene.host.divide(2, "type: NVIDIA_GPU_SHARE\n  virtual_number: 2", "mig: [4g.40gb, 3g.40gb]")
    scene.daemon.configure(cuda_mps_scope="gpu")
    seen = scene.start().look()
    assert (seen.code, seen.bad()) == (0, {})
    assert seen.one("daemon", "ok")["what"] == "running; 6 of 6 devices available"
    assert seen.one("budgets", "ok")["what"].endswith("GPU except the time-sliced ones: 00:07.0")
    with Served(scene.host) as served, urlopen(f"{served.url}overview.json") as answer:
        page = json.loads(answer.read())
    instances = [f"00:08.0-g{one.gpu_instance}" for one in scene.host.gpus[2].mig_devices()]
    assert [(gpu["addr"], gpu["way"], gpu["budget_enforced"]) for gpu in page["gpus"]] == [
        ("00:06.0", "", True),
        ("00:07.0", "time-slicing", False),
        ("00:08.0", "mig", True),
        *((address, "", True) for address in instances),
    ]
    devices = [device for part in page["parts"] for device in part["devices"]]
    assert devices == ["00:06.0-0", "00:06.0-1", "00:07.0-0", "00:07.0-1", *instances]
    assert (page["state"], page["problems"], page["wrong"], page["errors"]) == ("ready", [], 0, [])


def test_jobs_on_devices_of_every_kind_are_fine(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "h100", "count": 4})
    sliced = "type: NVIDIA_GPU_SHARE\n  virtual_number: 2"
    scene.host.divide(2, sliced, "mig: 3g.40gb", f"{sliced}\n  mig: 3g.40gb")
    scene.daemon.configure(cuda_mps_scope="gpu")
    scene.start()
    rows = scene.daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]
    for name in sorted({row["addr"].rpartition("-")[0]: row["addr"] for row in rows}.values()):
        gpu = scene.host.gpus[int(name[3:5]) - 6]
        environment = scene.daemon.get(f"/v1/devices/{name}")[1]["client_environment"]
        job = scene.process(SLEEP, **environment)
        instances = gpu.mig_devices()
        on = (instances[0].gpu_instance, 0) if instances else None
        kind = "M+C" if "CUDA_MPS_PIPE_DIRECTORY" in environment else "C"
        gpu.add_process(job.pid, 100, kind, on=on)
        needs = (
            "an MPS client needs" if "CUDA_MPS_PIPE_DIRECTORY" in environment else "a job without MPS needs"
        )
        variables = [f"{key}={value}" for key, value in environment.items()]
        for words in (["--pid", str(job.pid)], ["--", *variables, "true"]):
            (found,) = scene.look(*words).checks["environment"]
            assert (found["level"], found["what"].endswith(needs)) == ("ok", True), (name, found)
    assert scene.look().one("outside MPS", "ok")["what"] == "1 program on the GPUs, none outside MPS"


def test_a_control_daemon_of_an_instance_serves_its_jobs(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "h100"})
    scene.host.divide("mig: 3g.40gb\n  virtual_number: 2")
    scene.start()
    name = scene.daemon.get("/v1/devices?limit=0")[1]["isolated_devices"][0]["addr"]
    environment = scene.daemon.get(f"/v1/devices/{name}")[1]["client_environment"]
    seen = scene.look("--pid", str(scene.process(SLEEP, **environment).pid))
    assert seen.one("environment", "ok")["what"].endswith(" has everything that an MPS client needs")


def test_a_layout_that_needs_a_reset_is_reported_with_its_reason(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "a100"})
    scene.host.divide("mig: all-1g.5gb")
    seen = scene.start().look()
    found = seen.one("GPUs", "problem")
    assert found["what"].endswith("MIG mode will be on after the next reset of the GPU")
    assert (found["code"], "nvidia-smi --gpu-reset" in found["hint"]) == ("mig_reset_required", True)
    scene.host.gpus[0].reset()
    assert "problem MIG" not in scene.look().bad(), "though the layout may not be there yet"


def test_on_a_healthy_host_it_waits_for_no_deadline(ready: Scene) -> None:
    """As a Nagios or NRPE plugin it has to be quick; here each check may take 10 minutes."""
    assert ready.look("--timeout", "600").code == 0


def test_the_first_line_is_the_state_as_monitoring_shows_it(ready: Scene) -> None:
    done = ready.host.run(["yunion-mps", "doctor", *PATIENT])
    first, *lines = done.stdout.splitlines()
    assert (done.returncode, first) == (0, f"No problems found ({len(lines)} ok)")
    assert lines[0] == "ok       daemon: running; 8 of 8 devices available"
    ready.host.gpus[1].compute_mode = "default"
    (ready.host.root / "dev/shm").chmod(0o755)
    done = ready.host.run(["yunion-mps", "doctor", *PATIENT])
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "compute mode: GPU 00:07.0 (Tesla T4)" in done.stdout


def test_it_changes_nothing_and_leaves_no_process(ready: Scene) -> None:
    def state() -> object:
        files = {str(path): path.lstat().st_mtime_ns for path in ready.host.root.rglob("*") if path.is_file()}
        return {name: at for name, at in files.items() if "/log/" not in name}, ready.host.show()

    written = ready.host.root / "run/cdi/yunion-mps.json"
    eventually(written.exists, "the last that the daemon writes at its start")
    before = state()
    ready.look()
    assert state() == before
    assert ready.stand_ins.servers() == []


# -- without the daemon, and as a user


def test_without_the_daemon_the_rest_is_looked_at(scene: Scene) -> None:
    seen = scene.look()
    assert seen.code == 2
    assert set(seen.bad()) == {
        "problem daemon", "skipped control daemon answers", "skipped MPS servers",
    }  # fmt: skip


def test_problems_of_many_gpus_are_shortened(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "t4", "count": 8}).start()
    for gpu in scene.host.gpus[:5]:
        gpu.compute_mode = "default"
    lines = scene.host.run(["yunion-mps", "doctor", *PATIENT]).stdout.splitlines()
    assert lines[0] == "Found 5 problems (24 ok)"
    assert [line.split(" (")[0] for line in lines[1:8:2]] == [
        *(f"problem  compute mode: GPU 00:0{number}.0" for number in (6, 7, 8)),
        "problem  compute mode: 2 more like this",
    ]
    assert lines[8].startswith("ok       daemon: ")
    rows = scene.host.run(["yunion-mps", "doctor", *PATIENT, "-o", "csv"]).stdout
    assert rows.count("problem,compute mode,") == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_user_is_found_what_only_root_sees_and_all_else(ready: Scene) -> None:
    seen = ready.look("--pid", "1", user=STRANGER)
    assert seen.code == 0
    assert {line.split(" ", 1)[0] for line in seen.bad()} == {"skipped"}
    assert "permission denied: cannot connect" in seen.one("daemon", "skipped")["what"]
    assert "no permission to inspect PID 1" in seen.one("environment", "skipped")["what"]
    assert seen.one("compute mode", "skipped")["what"] == "only root can see which GPUs the entries mean"
    assert seen.one("pipe directory", "ok")


# -- the driver


def test_a_driver_that_hangs_is_one_problem_and_delays_no_other_check(ready: Scene) -> None:
    ready.host.fail("nvmlInit*", "success", delay_ms=600_000)
    seen = ready.look("--timeout", "5")
    assert seen.one("driver", "problem")["what"] == "the NVIDIA driver did not answer within 4 s"
    assert "did not answer" in seen.one("compute mode", "skipped")["what"]
    assert seen.one("daemon", "ok")


def test_a_missing_driver_is_one_problem_and_skips_other_checks(ready: Scene) -> None:
    ready.host.hide_library()
    assert "libnvidia-ml.so.1 is not installed" in ready.look().one("driver", "problem")["what"]
    told = ready.host.run(["yunion-mps", "doctor", *PATIENT]).stdout
    skipped = "skipped  device nodes, GPUs, MIG, vGPU, budgets, job budgets, compute mode, "
    skipped += "client limit, outside MPS"
    reason = "not checked: the NVIDIA driver's library libnvidia-ml.so.1 is not installed"
    assert f"\n{skipped}: {reason}\n" in told


# -- the GPUs, and the file systems


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize(
    ("check", "place", "options", "fill", "level", "what"),
    [
        ("disk space", "tmp", "size=1m", "true", "problem", "has only 1 MiB free: the control daemon"),
        ("disk space", "tmp", "size=32m", 'mount -o remount,ro "$0"', "problem", "is read-only"),
        ("disk space", "tmp", "size=32m,nr_inodes=2", 'touch "$0/last"', "problem", "has no free inodes"),
        ("/dev/shm", "dev/shm", "size=16m", "true", "warning", "has only 16 MiB in total"),
        ("/dev/shm", "dev/shm", "size=64m", 'head -c 60m /dev/zero >"$0/full"', "problem", "is full (4 MiB"),
    ],
)
def test_a_file_system_that_is_full_small_or_read_only_is_found(
    scene: Scene, check: str, place: str, options: str, fill: str, level: str, what: str
) -> None:
    steps = f'mount -t tmpfs -o mode=1777,{options} tmpfs $0 && {fill} && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", steps, str(scene.host.root / place))
    assert what in scene.look(before=before).one(check, level)["what"]


def test_another_programs_control_daemon_in_our_place_is_found(scene: Scene) -> None:
    pid = scene.control_daemon(scene.pipe)
    found = scene.look().one("control daemon", "problem")
    assert (
        f"a control daemon (PID {pid}, uid 0) not started by yunion-mps serves {scene.pipe}" in found["what"]
    )
    assert found["hint"].startswith("once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY=")


def test_a_control_daemon_without_its_daemon_is_found(ready: Scene) -> None:
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
        return found["level"] == "problem" and found["what"].endswith(": it has been removed")

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
    expected = {}
    for place, (gpus, level, what) in places.items():
        pid = ready.control_daemon(root / place, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}))
        expected[f"PID {pid} (root, {root}/{place})"] = (level, what)
    found = ready.look().checks["other control daemons"]
    assert len(found) == len(expected)
    for other, (level, what) in expected.items():
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
    assert found["what"].startswith(f"domain host has 1 MPS server (PID {server}) without a control daemon")


def test_servers_that_fail_at_their_start_are_found(ready: Scene) -> None:
    ready.stand_ins.behave("failing")
    client = ready.stand_ins.client(ready.pipe)
    assert [client.says(), client.says()] == ["asking", "refused"]
    eventually(lambda: ready.daemon.status()["domains"][0]["state"] == "degraded", "the daemon's own start")
    # The time zone is the doctor's own; the log is in the host's time.
    found = ready.look(TZ="HERE-12").one("MPS servers", "problem")
    assert "times within the last hour; the last one failed to start: " in found["what"]
    assert f"{ready.host.root}/tmp/nvidia-mps/log/server.log" in found["hint"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_client_that_waits_for_another_users_jobs_is_named(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    assert ready.look().one("user switching", "ok")
    waiting = ready.stand_ins.client(ready.pipe, STRANGER)
    assert waiting.says() == "asking"
    found = ready.look().one("user switching", "warning")
    assert found["what"].startswith(f"PID {waiting.pid} of nobody (")
    assert "is waiting for the MPS server of root" in found["what"]

    ready.daemon.socket_path.chmod(0o666)  # the user is in the group yunion-mps
    told = ready.look(user=STRANGER).one("user switching", "warning")
    assert told["what"] == found["what"]


def test_a_control_daemon_from_before_the_drivers_update_is_found(scene: Scene) -> None:
    program = scene.own_programs() / CONTROL
    version = scene.host.description.driver_version
    old = f"{version[:-1]}{(int(version[-1]) + 1) % 10}"
    program.write_bytes(program.read_bytes().replace(version.encode(), old.encode()))
    pid = scene.start().daemon.control_pid()
    found = scene.look().one("driver", "warning")
    assert all(word in found["what"] for word in (f"PID {pid}", old, version))


def test_a_control_daemon_whose_program_was_replaced_is_found(scene: Scene) -> None:
    folder = scene.own_programs()
    scene.start()
    scene.host.env["PATH"] = scene.daemon.env["PATH"]
    assert scene.look().bad() == {}
    shutil.copy(folder / CONTROL, folder / "new")
    (folder / "new").replace(folder / CONTROL)
    assert "was replaced or removed after it started" in scene.look().one("programs", "warning")["what"]
