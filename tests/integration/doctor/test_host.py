"""`yunion-mps doctor` on whole hosts: healthy, and with each fault of the driver and the GPUs made for real.

The daemon and the control daemon are real; jobs and their MPS server are stand-ins, and NVML is simulated.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from integration.daemon_host import eventually
from integration.doctor_host import PATIENT, SLEEP, STRANGER, Scene

# -- a healthy host


def test_on_a_healthy_host_every_line_is_ok(ready: Scene) -> None:
    job = ready.process(SLEEP, **ready.device(0))
    ready.host.gpus[0].add_process(job.pid, 100)
    seen = ready.look("--pid", str(job.pid))
    assert (seen.code, seen.bad()) == (0, {})
    assert len(seen.checks) == 25
    assert seen.one("outside MPS", "ok")["what"] == "1 program on the GPUs, none outside MPS"
    assert seen.one("client limit", "ok")["what"] == "at most 1 of 48 clients on a GPU"


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
    assert (done.returncode, lines[0]) == (1, "Found 2 problems (22 ok)")
    assert lines[1].startswith(
        "problem  compute mode: GPU 00:07.0 (Tesla T4) is Default, not Exclusive_Process"
    )
    assert lines[2].startswith("         -> find what changed it")


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
    assert seen.bad() == {
        "problem daemon": f"the daemon is not running: {scene.daemon.socket_path} does not exist",
        "skipped control daemon answers": "no control daemon is running",
        "skipped MPS servers": "there are no logs yet",
    }


def test_if_mps_is_not_enabled_nothing_is_wrong(scene: Scene) -> None:
    scene.daemon.write_host_conf({"enable_cuda_mps": False})
    for words in ("not running; enable_cuda_mps is false", "running (0.1.0); enable_cuda_mps is"):
        seen = scene.look()
        assert (seen.code, [level for level in seen.bad() if not level.startswith("skipped")]) == (0, [])
        assert seen.one("daemon", "ok")["what"].startswith(words)
        if not scene.daemon.running:
            scene.start()


def test_what_is_wrong_with_many_gpus_keeps_other_checks_on_the_screen(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "t4", "count": 8}).start()
    for gpu in scene.host.gpus[:5]:
        gpu.compute_mode = "default"
    lines = scene.host.run(["yunion-mps", "doctor", *PATIENT]).stdout.splitlines()
    assert lines[0] == "Found 5 problems (23 ok)"
    assert [line.split(" (")[0] for line in lines[1:8:2]] == [
        *(f"problem  compute mode: GPU 00:0{number}.0" for number in (6, 7, 8)),
        "problem  compute mode: 2 more of this kind",
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
    assert seen.one("compute mode", "ok")
    assert seen.one("pipe directory", "ok")


# -- the driver


def test_a_driver_that_hangs_is_one_problem_and_delays_no_other_check(ready: Scene) -> None:
    ready.host.fail("nvmlInit*", "success", delay_ms=600_000)
    seen = ready.look("--timeout", "5")
    assert seen.one("driver", "problem")["what"] == "the NVIDIA driver does not answer within 4 s"
    assert "does not answer" in seen.one("compute mode", "skipped")["what"]
    assert seen.one("daemon", "ok")


def test_without_a_driver_that_is_said_once_and_what_was_not_looked_at(ready: Scene) -> None:
    ready.host.hide_library()
    assert "no NVIDIA driver" in ready.look().one("driver", "problem")["what"]
    told = ready.host.run(["yunion-mps", "doctor", *PATIENT]).stdout
    skipped = "skipped  device nodes, GPUs, MIG, vGPU, budgets, compute mode, client limit, outside MPS"
    reason = "not checked: no NVIDIA driver: its library libnvidia-ml.so.1 is not installed"
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
