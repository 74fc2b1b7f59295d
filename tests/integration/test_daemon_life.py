"""The daemon's life as systemd sees it: how it starts or refuses to, what it tells, survives, and ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from yunion_mps import version_line
from yunion_mps.core.reasons import PIPE_DIRECTORY
from yunion_mps.gpus.restoration import RESTORE_WITHIN_S
from yunion_mps.host.processes import PROGRAM_DIRECTORIES

from integration.conftest import MakeAtWork, MakeDaemon
from integration.daemon_host import Daemon, control_daemons, eventually, is_running
from integration.lease_host import take

LINE = "4 of 4 devices available, 1 of 1 control daemons serving"
RUN = "run/yunion-mps"


def test_systemd_is_notified_of_each_step_once_and_in_order(ready_daemon: Daemon) -> None:
    ready_daemon.status()  # its loop runs
    assert ready_daemon.stop() == 0
    assert ready_daemon.notifications == [
        "STATUS=reading the configuration and the GPUs",
        f"STATUS={LINE}",
        "READY=1",
        "STOPPING=1",
        "EXTEND_TIMEOUT_USEC=90000000",
        "STATUS=waiting for the control daemons' clients to end",
        "STOPPING=1",
        "EXTEND_TIMEOUT_USEC=90000000",
        "STATUS=stopping the control daemons",
        "STOPPING=1",
        f"EXTEND_TIMEOUT_USEC={RESTORE_WITHIN_S}000000",
        "STATUS=restoring the GPUs' settings",
    ]


@pytest.mark.gpus({"kind": "v100"})
def test_all_of_its_modules_are_loaded_once_it_is_ready(daemon: Daemon) -> None:
    """Later, a shortage could make the import fail, and an upgrade has put other files in their place."""
    daemon.start(PYTHONPROFILEIMPORTTIME="1").wait_ready()  # which writes each import to the log
    loaded = [line.rpartition("|")[2].strip() for line in daemon.log.splitlines() if "import time:" in line]
    assert "yunion_mps.daemon.loop" in loaded
    assert take(daemon, "holder.name=job&holder.ttl_s=60")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    assert daemon.get("/metrics")[0] == 200
    after = [line.rpartition("|")[2].strip() for line in daemon.log.splitlines() if "import time:" in line]
    assert [name for name in after[len(loaded) :] if name.startswith("yunion_mps")] == []


def test_under_systemd_each_line_has_its_level_and_no_time(ready_daemon: Daemon) -> None:
    ready_daemon.status()  # its loop runs
    assert ready_daemon.stop() == 0
    lines = ready_daemon.log.splitlines()
    assert [line for line in lines if not re.match(r"<[0-7]>\S", line)] == []
    assert not re.search(r"\d\d:\d\d:\d\d", ready_daemon.log)
    assert lines[0] == "<6>GPU 00:06.0: compute mode Default -> Exclusive_Process"
    assert any(line.startswith("<4>GPU 00:06.0 (Tesla P40): budgets are not enforced") for line in lines)
    assert lines[-1] == "<6>stopped"


def stops_cleanly(daemon: Daemon) -> None:
    """Wait for its end: it succeeds, and nothing of it is left on the host."""
    assert daemon.wait() == 0, daemon.log
    assert "Traceback" not in daemon.log
    assert control_daemons(daemon.host.root) == []
    assert daemon.host.gpus[0].compute_mode == "default"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_and_leaves_nothing(ready_daemon: Daemon, number: signal.Signals) -> None:
    control = ready_daemon.control_pid()
    ready_daemon.signal(number)
    stops_cleanly(ready_daemon)
    assert not is_running(control)
    left = ["daemon.lock", "events.jsonl", "leases.json", "records.json"]
    assert sorted(os.listdir(ready_daemon.host.root / RUN)) == left
    tables = json.loads((ready_daemon.host.root / RUN / "records.json").read_text())["tables"]
    assert not any(tables.values()), "nothing is left to restore"
    assert f"<6>received {number.name}, stopping" in ready_daemon.log


def test_a_second_signal_while_it_waits_for_a_job_does_no_harm(make_at_work: MakeAtWork) -> None:
    daemon, _, client = make_at_work(cuda_mps_stop_timeout_s=60)
    daemon.signal(signal.SIGTERM)
    daemon.wait_message("STOPPING=1")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        daemon.signal(number)
    assert daemon.status()["domains"][0]["state"] == "stopping"
    client.end()
    stops_cleanly(daemon)


def test_a_stop_waits_for_jobs_as_configured_and_names_those_it_ended(make_at_work: MakeAtWork) -> None:
    daemon, jobs, client = make_at_work(cuda_mps_stop_timeout_s=1)
    daemon.host.gpus[0].add_process(client.pid, 100, "M+C")
    assert daemon.stop() == 0
    assert client.says() == "server gone"
    assert f"(PID {client.pid}, root) did not end in time: ended its MPS server" in daemon.log
    assert jobs.servers() == []
    assert daemon.host.gpus[0].compute_mode == "default"


def test_a_second_signal_does_not_keep_it_from_restoring_the_modes(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    host.fail("nvmlDeviceSetComputeMode", "success", delay_ms=60_000)
    ready_daemon.signal(signal.SIGTERM)
    ready_daemon.wait_message("STATUS=stopping the control daemons")
    ready_daemon.signal(signal.SIGINT)
    host.clear()
    stops_cleanly(ready_daemon)


def test_a_signal_while_it_looks_at_the_gpus_stops_it_cleanly(daemon: Daemon) -> None:
    daemon.host.fail("nvmlSystemGetDriverVersion", "success", delay_ms=60_000)
    daemon.start().wait_message("STATUS=reading the configuration")
    daemon.signal(signal.SIGTERM)
    daemon.host.clear()
    stops_cleanly(daemon)
    assert "READY=1" not in daemon.notifications


def test_a_signal_while_the_control_daemon_starts_stops_it_cleanly(daemon: Daemon) -> None:
    """The control daemon is one that does not listen, and the front-end says so as NVIDIA's does."""
    script = '[ "$1" = -f ] && exec sleep 1000; echo Cannot find MPS control daemon process; exit 1'
    daemon.wrap_control_program(script)
    daemon.start().wait_log("stopped -> starting")
    daemon.signal(signal.SIGTERM)
    stops_cleanly(daemon)
    assert "READY=1" not in daemon.notifications


def test_a_second_instance_names_the_first_and_leaves_it_alone(
    ready_daemon: Daemon, make_daemon: MakeDaemon
) -> None:
    second = make_daemon(ready_daemon.host, notify=False)
    assert second.run(NOTIFY_SOCKET="/nowhere") == 1
    # The first one, which logs to the same file, may say only now that it is ready.
    assert [line for line in second.log.splitlines() if line.startswith("<3>")] == [
        f"<3>another yunion-mps-daemon is already running (PID {ready_daemon.pid}) [host_error]",
        "<3>check it: yunion-mps status; stop it: systemctl stop yunion-mps-daemon",
    ]
    assert ready_daemon.status()["state"] == "ready"
    assert ready_daemon.stop() == 0


def test_the_socket_is_private_and_the_log_is_not_for_everybody(ready_daemon: Daemon) -> None:
    assert stat.S_IMODE(ready_daemon.socket_path.stat().st_mode) == 0o660
    log = ready_daemon.host.root / "tmp/nvidia-mps/log/control.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o640


# -- options


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--version"], 0, f"{version_line('yunion-mps-daemon')}\n"),
        (["--help"], 0, "Usage: yunion-mps-daemon [OPTIONS]\n"),
        (["--chek"], 2, "yunion-mps-daemon: no such option: --chek (did you mean --check?)\n"),
        (["--log-level", "loud"], 2, "'--log-level': 'loud' is not one of 'debug'"),
        (["--adopt", "0"], 2, "yunion-mps-daemon: invalid value for '--adopt': 0 is not a PID\n"),
        (["start"], 2, "got unexpected extra argument (start)"),
        (
            ["--check", "--restore"],
            2,
            "--check, --restore and --adopt are mutually exclusive: use one of them\n",
        ),
    ],
)
def test_options_answer_without_starting_anything(
    daemon: Daemon, arguments: list[str], code: int, words: str
) -> None:
    assert daemon.run(*arguments) == code
    assert words in daemon.log
    assert not (daemon.host.root / RUN).exists()


def test_check_says_what_is_right_or_wrong_and_changes_nothing(daemon: Daemon) -> None:
    assert daemon.run("--check") == 0
    assert daemon.log == "<6>the configuration is valid: 4 devices\n"
    assert daemon.host.gpus[0].compute_mode == "default"
    assert not (daemon.host.root / RUN).exists()
    assert not (daemon.host.root / "tmp/nvidia-mps").exists()
    daemon.configure(cuda_mps_scope="node", cuda_mps_replicas="four")
    assert daemon.run("--check") == 6
    assert all(f"host.conf:{line}:" in daemon.log for line in (2, 3))


LIMITS = ("get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage")


def test_systemd_is_notified_of_lost_control_daemons(ready_daemon: Daemon) -> None:
    """The second death in a row is followed by a pause, so that there is something to see."""

    def recovered(restarts: int) -> bool:
        status = ready_daemon.status()
        return bool(status["state"] == "ready" and status["domains"][0]["restarts"] == restarts)

    nothing = "STATUS=0 of 4 devices available, 0 of 1 control daemons serving; "
    first, before = ready_daemon.control_pid(), ready_daemon.descriptors
    os.kill(first, signal.SIGKILL)
    eventually(lambda: recovered(1), "another control daemon")
    second = ready_daemon.control_pid()
    os.kill(second, signal.SIGKILL)
    ready_daemon.wait_message(f"{nothing}the control daemon (PID {second}) was killed by signal 9")
    eventually(lambda: recovered(2), "a third one")
    eventually(lambda: ready_daemon.descriptors <= before, "no more descriptors than before")
    assert ready_daemon.notifications.count("READY=1") == 1
    assert ready_daemon.stop() == 0


@pytest.mark.parametrize("driver", [True, False])
def test_disabled_it_stays_up_serves_an_empty_list_and_says_why(daemon: Daemon, driver: bool) -> None:
    if not driver:
        daemon.host.hide_library()
    daemon.write_host_conf({"enable_cuda_mps": False})
    daemon.start().wait_ready()
    conf = f"{daemon.host.root}/etc/yunion/host.conf"
    why = f"MPS is disabled: enable_cuda_mps is false in {conf}"
    assert daemon.get("/v1/devices") == (200, {"isolated_devices": [], "total": 0, "limit": 20, "offset": 0})
    status = daemon.status()
    assert (status["state"], status["notice"]) == ("disabled", why)
    assert f"STATUS={why}" in daemon.notifications
    assert why in daemon.log
    assert daemon.host.gpus[0].compute_mode == "default"
    assert control_daemons(daemon.host.root) == []
    assert daemon.stop() == 0
    assert not (daemon.host.root / "tmp/nvidia-mps").exists()


PROGRAM = "nvidia-cuda-mps-control"
#: A control program by which the memory limit is another one than was set.
OTHER_LIMIT = '[ "$1" = -f ] && exec $REAL -f; $REAL | sed "s/^5G$/4G/"'


def refused(daemon: Daemon, code: int) -> list[str]:
    """Run it to its end; returns its last words, and nothing of it is left."""
    assert daemon.run() == code, daemon.log
    assert "READY=1" not in daemon.notifications
    assert "Traceback" not in daemon.log
    assert {gpu.compute_mode for gpu in daemon.host.gpus} == {"default"}
    assert not daemon.socket_path.exists()
    return daemon.log.splitlines()


def test_without_a_driver_it_waits_and_tells_systemd_what_for(daemon: Daemon) -> None:
    daemon.host.hide_library()
    daemon.start().wait_ready()
    why = "the NVIDIA driver's library libnvidia-ml.so.1 is not installed"
    daemon.wait_message(f"STATUS=waiting for the NVIDIA driver: {why}")
    daemon.host.show_library()
    daemon.wait_message("STATUS=4 of 4 devices available, 1 of 1 control daemons serving")
    assert daemon.stop() == 0


REEXEC = ["yunion-mps", "daemon-reexec"]


def gpu_reason_codes(daemon: Daemon) -> list[str]:
    return [gpu["reason_code"] for gpu in daemon.get("/v1/gpus")[1]["gpus"]]


def test_a_daemon_that_waits_for_the_driver_can_be_reexecuted(daemon: Daemon) -> None:
    daemon.host.unload_driver()
    daemon.start().wait_ready()
    assert daemon.host.run(REEXEC).returncode == 0, daemon.log
    daemon.host.load_driver()
    eventually(lambda: daemon.status()["state"] == "ready", "the driver's use")
    daemon.host.unload_driver()
    # A poll in the midst of the unloading fails in another way, after which the driver is still required.
    eventually(lambda: gpu_reason_codes(daemon) == ["driver_not_loaded"], "the poll without a driver")
    assert daemon.host.run(REEXEC).returncode == 0, daemon.log
    daemon.host.load_driver()
    eventually(lambda: daemon.status()["state"] == "ready", "the driver's use")


def test_a_daemon_that_uses_the_driver_is_not_replaced_by_one_that_cannot(ready_daemon: Daemon) -> None:
    ready_daemon.host.hide_library()
    status, answer = ready_daemon.ask("POST", "/v1/reexec")
    assert (status, "libnvidia-ml.so.1 is not installed" in answer["detail"]) == (409, True)
    assert ready_daemon.status()["state"] == "ready"
    check = ["yunion-mps-daemon", "--check"]
    assert ready_daemon.host.run(check).returncode == 0
    assert ready_daemon.host.run([*check, "--require-driver"]).returncode == 1


def test_a_driver_that_was_updated_before_it_was_loaded_is_used(daemon: Daemon) -> None:
    """The daemon has loaded the library of the earlier version when it asked for the driver."""
    daemon.host.unload_driver()
    daemon.start().wait_ready()
    daemon.host.update_driver("550.163.01")
    daemon.host.load_driver()
    eventually(lambda: daemon.status()["state"] == "ready", "the driver's use")
    assert daemon.status()["driver"]["version"] == "550.163.01"


def test_a_bad_configuration_ends_with_6_and_all_its_problems(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_scope="node", cuda_mps_replicas=0)
    devices = daemon.host.root / "etc/yunion/host_container_device.yml"
    devices.write_text("devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: true\n")
    lines = refused(daemon, 6)
    conf = daemon.host.root / "etc/yunion/host.conf"
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"<3>{conf}:2", f"<3>{conf}:3", f"<3>{devices}:4"]
    assert lines[-2].endswith(" [invalid_configuration]")
    assert "yunion-mps config check" in lines[-1]


def test_a_missing_control_program_is_named_with_its_packages(daemon: Daemon) -> None:
    if any(os.path.exists(f"{folder}/{PROGRAM}") for folder in PROGRAM_DIRECTORIES):
        pytest.skip("this machine has the program where drivers put it")
    daemon.env["PATH"] = str(Path(shutil.which("yunion-mps-daemon", path=daemon.env["PATH"]) or "").parent)
    *_, message, hint = refused(daemon, 1)
    assert message == f"<3>{PROGRAM} is not installed [program_missing]"
    assert hint.startswith("<3>install it: nvidia-cuda-mps on Debian")


def test_limits_that_are_not_in_effect_are_never_ready(daemon: Daemon) -> None:
    daemon.wrap_control_program(OTHER_LIMIT)
    lines = refused(daemon, 1)
    assert lines[-2] == (
        "<3>the memory limit of device 0 is not in effect: it was set to 5760M, "
        "but the control daemon reports '4G' [limits_not_in_effect]"
    )
    assert control_daemons(daemon.host.root) == []


@pytest.mark.gpus({"kind": "h100", "count": 2})
def test_if_one_domain_cannot_serve_the_others_do_and_it_says_why(daemon: Daemon) -> None:
    host = daemon.host
    daemon.configure(cuda_mps_scope="gpu")
    file = daemon.pipe_directory / host.gpus[0].uuid
    file.parent.mkdir(parents=True)
    file.touch()
    daemon.start()
    daemon.wait_ready()
    status = daemon.status()
    assert [domain["state"] for domain in status["domains"]] == ["failed", "ready"]
    assert status["domains"][0]["reason"] == f"{file} is not a directory"
    counts = {"total": 8, "available": 4, "unavailable": 4, "pending": 0, "reserved": 0}
    counts |= {"used": 0, "free": 4}
    assert status["devices"] == counts
    assert any("4 of 8 devices available, 1 of 2" in line for line in daemon.notifications)
    assert daemon.stop() == 0


def taken_directories(daemon: Daemon) -> list[Any]:
    return [problem for problem in daemon.status()["problems"] if problem["code"] == "directory_taken"]


def _open_to_all(pipes: Path) -> str:
    pipes.parent.chmod(0o777)
    return f"{pipes.parent} is writable by other users (mode 777)"


def _put_file(pipes: Path) -> str:
    (pipes / "control").touch()
    os.chown(pipes / "control", 65534, 65534)
    return f"{pipes}/control belongs to another user (nobody)"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("spoil", [_open_to_all, _put_file])
def test_a_pipe_directory_that_others_made_unsafe_stops_no_service(
    daemon: Daemon, spoil: Callable[[Path], str]
) -> None:
    pipes = daemon.pipe_directory
    pipes.mkdir(parents=True)
    what = spoil(pipes)
    daemon.start().wait_ready()
    (problem,) = taken_directories(daemon)
    assert problem["level"] == "warning"
    assert problem["text"].startswith(f"{what}: the daemon uses /run/nvidia-mps/pipe instead of ")
    found = daemon.host.run(["yunion-mps", "doctor", "-o", "json"]).stdout
    said = {line["what"]: line["code"] for line in json.loads(found)["checks"]}
    assert said[problem["text"]] == "directory_taken", "doctor says the same"
    served = f"{daemon.host.root}/run/nvidia-mps/pipe"
    assert f"{served}: all users have access" in said
    command = problem["text"].partition("; then ")[2].partition(", or ")[0]
    subprocess.run(command, shell=True, check=True)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    eventually((pipes / "control").is_socket, "the control daemon where it is configured")
    eventually(lambda: daemon.status()["state"] == "ready", "ready")
    assert taken_directories(daemon) == []
    assert daemon.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_user_who_makes_the_pipe_directory_first_stops_no_service(daemon: Daemon) -> None:
    taken = daemon.host.root / "tmp/nvidia-mps"
    taken.mkdir(parents=True)
    (taken / "theirs").touch()
    os.chown(taken, 65534, 65534)
    daemon.start().wait_ready()
    what = f"{taken} belongs to another user (nobody): the daemon uses /run/nvidia-mps/pipe instead of"
    assert what in daemon.log
    assert [problem["text"].startswith(what) for problem in taken_directories(daemon)] == [True]
    (device, *_) = daemon.get("/v1/devices")[1]["isolated_devices"]
    place = daemon.get(f"/v1/devices/{device['id']}")[1]["client_environment"]["CUDA_MPS_PIPE_DIRECTORY"]
    assert place == f"{daemon.host.root}/run/nvidia-mps/pipe"
    assert (Path(place) / "control").exists()
    assert [path.name for path in taken.iterdir()] == ["theirs"], "nothing of theirs is touched"
    shutil.rmtree(taken)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    eventually((taken / "pipe/control").exists, "the control daemon where it is configured")
    eventually(lambda: daemon.status()["state"] == "ready", "ready")
    assert taken_directories(daemon) == []
    assert daemon.stop() == 0


def test_a_survivor_with_other_limits_is_spared_until_it_has_ours(daemon: Daemon) -> None:
    """Jobs may be at work on it: the daemon neither ends it nor leaves it to itself."""
    daemon.start().wait_ready()
    control = daemon.control_pid()
    daemon.kill()
    wrapper = daemon.wrap_control_program(OTHER_LIMIT)
    daemon.start().wait_ready()
    assert daemon.status()["state"] == "failed"
    assert daemon.get("/v1/devices")[1]["isolated_devices"][0]["state"] == "unavailable"
    assert is_running(control)
    assert daemon.host.gpus[0].compute_mode == "exclusive_process"
    wrapper.unlink()
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    eventually(lambda: daemon.status()["state"] == "ready", "the limits in effect")
    assert daemon.control_pid() == control
    assert daemon.stop(signal.SIGTERM) == 0
    assert not is_running(control)
    assert daemon.host.gpus[0].compute_mode == "default"


def test_a_closed_directory_is_a_problem_until_it_is_opened(daemon: Daemon) -> None:
    closed = daemon.host.root / "run/nvidia"
    closed.mkdir(mode=0o700)
    daemon.configure(cuda_mps_pipe_directory="/run/nvidia/mps/pipe")
    daemon.start().wait_ready()

    def is_reported() -> bool:
        return PIPE_DIRECTORY in [problem["code"] for problem in daemon.status()["problems"]]

    assert is_reported()
    assert f"<3>{closed} is not accessible to other users" in daemon.log
    closed.chmod(0o711)
    eventually(lambda: daemon.polls() and not is_reported(), "the end of the problem")


def test_both_checks_refuse_what_the_unit_forbids_but_no_start_by_hand(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_pipe_directory="/home/mps/pipe")
    line = "host.conf:2: cuda_mps_pipe_directory is /home/mps/pipe, which yunion-mps-daemon.service may not"
    done = daemon.host.run(["yunion-mps", "config", "check"])
    assert (done.returncode, line in done.stderr) == (6, True)
    assert daemon.run("--check") == 6
    assert line in daemon.log
    daemon.start().wait_ready()
    assert daemon.host.run(["yunion-mps", "config", "check"]).returncode == 0  # it does not run in the unit
