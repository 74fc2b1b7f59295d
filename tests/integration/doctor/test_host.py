"""`yunion-mps doctor` on whole hosts: healthy, and with each fault of the driver and the GPUs made for real.

The daemon and the control daemon are real; jobs and their MPS server are stand-ins, and NVML is simulated.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest

from integration.daemon_host import eventually
from unit.doctor.healthy import STRANGER, look
from unit.doctor.scene import Scene

# -- a healthy host


def test_on_a_healthy_host_every_line_is_ok(ready: Scene) -> None:
    seen = look(ready.host)
    assert (seen.code, seen.bad()) == (0, {})
    assert len(seen.checks) == 24


def test_on_a_healthy_host_it_waits_for_no_deadline(ready: Scene) -> None:
    """As a Nagios or NRPE plugin it has to be quick; here each check may take 10 minutes."""
    assert look(ready.host, "--timeout", "600").code == 0


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
    start = {"yaml": "state: ok\nexit_code: 0\n", "csv": "Level,Check,What,Hint\nok,daemon,"}
    assert done.stdout.startswith(start[output])


def test_it_changes_nothing_and_leaves_no_process(ready: Scene) -> None:
    def state() -> object:
        files = {str(path): path.lstat().st_mtime_ns for path in ready.host.root.rglob("*") if path.is_file()}
        return {name: at for name, at in files.items() if "/log/" not in name}, ready.host.show()

    written = ready.host.root / "run/cdi/yunion-mps.json"
    eventually(written.exists, "the last that the daemon writes at its start")
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


def test_if_mps_is_not_enabled_nothing_is_wrong(scene: Scene) -> None:
    scene.daemon.write_host_conf({"enable_cuda_mps": False})
    for words in ("it does not run, and enable_cuda_mps is false", "it runs (0.1.0), and enable_cuda_mps is"):
        seen = look(scene.host)
        assert (seen.code, [level for level in seen.bad() if not level.startswith("skipped")]) == (0, [])
        assert seen.one("daemon", "ok")["what"].startswith(words)
        if not scene.daemon.running:
            scene.start()


def test_if_mps_is_not_enabled_no_driver_and_no_program_is_missed(scene: Scene) -> None:
    (scene.host.root / "mps/nvidia-cuda-mps-server").unlink()
    (scene.host.root / "lib/libcuda.so.1").unlink()
    scene.host.hide_library()
    assert {"problem programs", "problem driver"} <= look(scene.host).bad().keys()
    scene.daemon.write_host_conf({"enable_cuda_mps": False})
    seen = look(scene.host)
    assert seen.code == 0
    why = "nothing here needs it while enable_cuda_mps is false"
    assert seen.one("programs", "skipped")["what"] == why
    assert seen.one("driver", "skipped")["what"].endswith(why)


def test_a_gpu_whose_memory_is_handed_out_in_units_is_divided_too(scene: Scene) -> None:
    file = scene.host.root / "etc/yunion/host_container_device.yml"
    path = (
        f"- path: {scene.host.gpus[1].uuid}\n  type: NVIDIA_MPS\n  virtual_number: 0\n  memory_unit: 1GiB\n"
    )
    file.write_text(f"devices:\n{path}")
    seen = look(scene.start().host)
    assert (seen.code, seen.bad()) == (0, {})
    assert seen.one("configuration", "ok")["what"] == "both files are right: memory in units on 1 GPU"


def test_what_is_wrong_with_many_gpus_leaves_the_other_checks_on_the_screen(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "t4", "count": 8}).start()
    for gpu in scene.host.gpus[:5]:
        gpu.compute_mode = "default"
    lines = scene.host.run(["yunion-mps", "doctor"]).stdout.splitlines()
    assert lines[0] == "problem: 5 problems, 23 ok"
    assert [line.split(" (")[0] for line in lines[1:8:2]] == [
        *(f"problem  compute mode: GPU 00:0{number}.0" for number in (6, 7, 8)),
        "problem  compute mode: 2 more of this kind",
    ]
    assert lines[8].startswith("ok       daemon: ")
    rows = scene.host.run(["yunion-mps", "doctor", "-o", "csv"]).stdout
    assert rows.count("problem,compute mode,") == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")
def test_a_user_is_found_what_only_root_sees_and_all_else(ready: Scene) -> None:
    seen = look(ready.host, user=STRANGER, group=STRANGER, extra_groups=[])
    assert seen.code == 0
    assert {line.split(" ", 1)[0] for line in seen.bad()} == {"skipped"}
    assert "you may not ask the daemon" in seen.one("daemon", "skipped")["what"]
    assert seen.one("compute mode", "ok")
    assert seen.one("pipe directory", "ok")


def test_a_bad_configuration_is_found_with_its_line(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_scope="hots")
    found = look(scene.host).one("configuration", "problem")
    assert found["what"].startswith(f"{scene.host.root}/etc/yunion/host.conf:2: cuda_mps_scope is")


def test_a_control_daemon_that_had_to_be_started_again_is_found(ready: Scene) -> None:
    os.kill(ready.daemon.control_pid(), signal.SIGKILL)
    eventually(lambda: ready.daemon.status()["domains"][0]["restarts"], "its next start")
    eventually(lambda: ready.daemon.status()["state"] == "ready", "ready again")
    found = look(ready.host).one("daemon", "warning")
    assert found["what"] == "the control daemon of domain host had to be started again, once"


def test_limits_that_wait_for_a_jobs_end_are_found(ready: Scene) -> None:
    ready.stand_ins.attached(ready.pipe)
    file = ready.host.root / "etc/yunion/host_container_device.yml"
    file.write_text(file.read_text().replace("virtual_number: 4", "virtual_number: 2"))
    assert ready.host.run(["yunion-mps", "reload"]).returncode == 0
    found = look(ready.host).one("daemon", "warning")
    assert found["what"].startswith("domain host: other limits take effect when its MPS server (PID ")


# -- the driver


def test_a_driver_that_hangs_is_one_problem_and_delays_no_other_check(ready: Scene) -> None:
    ready.host.fail("nvmlInit*", "success", delay_ms=600_000)
    seen = look(ready.host, "--timeout", "1")
    assert seen.one("driver", "problem")["what"] == "the NVIDIA driver does not answer within 0.8 s"
    assert "does not answer" in seen.one("compute mode", "skipped")["what"]
    assert seen.one("daemon", "ok")


def test_without_a_driver_that_is_said_once_and_what_was_not_looked_at(ready: Scene) -> None:
    ready.host.hide_library()
    assert "no NVIDIA driver" in look(ready.host).one("driver", "problem")["what"]
    told = ready.host.run(["yunion-mps", "doctor"]).stdout
    skipped = "skipped  device nodes, GPUs, MIG, vGPU, budgets, compute mode, client limit, past MPS"
    reason = "not checked: no NVIDIA driver: its library libnvidia-ml.so.1 is not installed"
    assert f"\n{skipped}: {reason}\n" in told


def test_a_driver_whose_module_is_older_than_its_library_is_found(ready: Scene) -> None:
    ready.host.fail("nvmlInit*", "lib_rm_version_mismatch")
    assert "are of different versions" in look(ready.host).one("driver", "problem")["what"]


# -- the GPUs


def test_a_compute_mode_that_was_changed_is_found(ready: Scene) -> None:
    ready.host.gpus[0].compute_mode = "default"
    found = look(ready.host).one("compute mode", "problem")
    assert "runs without limits" in found["what"]
    assert "nvidia-smi -i 0000:00:06.0 -c EXCLUSIVE_PROCESS" in found["hint"]
    ready.host.gpus[0].compute_mode = "prohibited"
    assert "no CUDA program can use it" in look(ready.host).one("compute mode", "problem")["what"]


def test_an_exclusive_mode_that_was_left_without_mps_is_found(scene: Scene) -> None:
    scene.host.gpus[1].compute_mode = "exclusive_process"
    found = look(scene.host).one("compute mode", "warning")
    assert "GPU 00:07.0 (Tesla T4) is Exclusive_Process without a control daemon" in found["what"]


def test_a_gpu_that_is_lost_is_found(ready: Scene) -> None:
    ready.host.gpus[0].lose()
    assert "GPU is lost" in look(ready.host).one("GPUs", "problem")["what"]


def test_a_gpu_in_mig_mode_is_found(stack: ExitStack) -> None:
    scene = Scene(stack, {"kind": "a100", "count": 2}).start()
    scene.host.gpus[1].mig = True
    found = look(scene.host).one("MIG", "problem")
    assert found["hint"].startswith("nvidia-smi -i 0000:00:07.0 -mig 0")


def test_a_gpu_that_enforces_nothing_is_a_warning(stack: ExitStack) -> None:
    seen = look(Scene(stack, {"kind": "tesla-p40"}).start().host)
    assert "no budget is enforced" in seen.one("budgets", "warning")["what"]
    assert (seen.code, list(seen.bad())) == (1, ["warning budgets"])


def test_a_compute_mode_that_is_to_be_kept_is_no_mistake(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_compute_mode="keep")
    seen = look(scene.start().host)
    assert seen.one("compute mode", "ok")["what"].startswith("Default, which cuda_mps_compute_mode: keep")


def test_as_many_clients_as_mps_allows_are_found(scene: Scene) -> None:
    scene.daemon.configure(cuda_mps_max_clients=20)
    gpu = scene.start().host.gpus[0]
    for number in range(18):
        gpu.add_process(4_000_000 + number, 10, "M+C")
    assert "18 clients of the 20" in look(scene.host).one("client limit", "warning")["what"]
    for number in range(18, 20):
        gpu.add_process(4_000_000 + number, 10, "M+C")
    assert "the next one is refused" in look(scene.host).one("client limit", "problem")["what"]
