"""Whether a control daemon is ours: its process decides, whatever lies at its socket and keeps that busy."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.enums import APPLYING, READY, STARTING, STOPPED, WEDGED
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import DomainPlan, PlannedGpu, Pool, Slice
from yunion_mps.core.paths import ROOT_VARIABLE, Paths
from yunion_mps.host.proc import children_of, environment_of, program_name
from yunion_mps.host.process_info import uid_of
from yunion_mps.mps import processes
from yunion_mps.mps.control_daemon import find, start
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.processes import (
    MARK,
    PROGRAM,
    SERVER,
    control_environment,
    domain_plan_json,
    is_server,
    our_processes,
    plan_from_json,
    record,
    server_pids,
)

from integration.daemon_host import eventually

from .domain_bench import Bench
from .other_processes import PATIENCE_S, STRANGER, as_root, full_queue, running_here, stop_process

Hide = Callable[[DomainPlan, int], None]
_PR_SET_DUMPABLE = 4


def _put_a_file_at_its_socket(plan: DomainPlan, pid: int) -> None:
    os.unlink(f"{plan.pipe_directory}/control")
    Path(f"{plan.pipe_directory}/control").write_text("")


def _put_a_stale_socket_at_its_socket(plan: DomainPlan, pid: int) -> None:
    os.unlink(f"{plan.pipe_directory}/control")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(f"{plan.pipe_directory}/control")


def _remove_its_directory(plan: DomainPlan, pid: int) -> None:
    os.rename(plan.pipe_directory, f"{plan.pipe_directory}.gone")


@pytest.mark.parametrize(
    "hide", [_put_a_file_at_its_socket, _put_a_stale_socket_at_its_socket, _remove_its_directory]
)
def test_our_control_daemon_is_found_whatever_is_at_its_socket(bench: Bench, hide: Hide) -> None:
    ours = bench.control()
    hide(bench.plan, ours.pid)
    assert running_here(bench.plan) == [(ours.pid, bench.plan.gpu_uuids)]


def test_a_control_daemon_with_a_full_queue_is_found_by_its_process(bench: Bench) -> None:
    ours = bench.control()
    with full_queue(bench.plan.pipe_directory):
        peer = peer_of(bench.plan.pipe_directory)
    assert peer is not None
    assert (peer.pid, peer.uid) == (ours.pid, os.geteuid())


@pytest.mark.parametrize("stopped", [False, True])
def test_a_control_daemon_with_a_full_queue_is_adopted(bench: Bench, stopped: bool) -> None:
    ours = bench.control()
    with full_queue(bench.plan.pipe_directory, STRANGER) as user_s:
        if stopped:
            stop_process(ours.pid)
        run = bench.domain().start().until_in_time(WEDGED)
        assert (run.pid, run.states) == (ours.pid, [STOPPED, STARTING, APPLYING, WEDGED])
        if stopped:
            assert "it was stopped by a signal" in run.domain.reason
        else:
            assert f"its queue is full, so no other process can connect: PID {user_s} (" in (
                run.domain.reason
            )
            assert ", nobody) has 1" in run.domain.reason
    run.until_in_time(READY, step_s=0.001)  # or its patience ends while a loaded machine lets it wait
    assert (run.pid, run.states[-2:]) == (ours.pid, [APPLYING, READY])


class KilledError(BaseException):
    """Stands for our own death."""


def test_a_control_daemon_is_found_if_its_daemon_dies_at_the_spawn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its PID can be recorded, and before a script has come as far as NVIDIA's program."""
    started, really_spawn = [], os.posix_spawn

    def spawn_and_die(*words: Any, **how: Any) -> int:
        started.append(really_spawn(*words, **how))
        raise KilledError

    monkeypatch.setattr(os, "posix_spawn", spawn_and_die)
    with pytest.raises(KilledError):
        start(bench.script("exec sleep 1000"), bench.plan)
    (pid,) = started
    try:
        assert [one for one, _ in running_here(bench.plan)] == [pid]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_recorded_control_daemon_is_found_without_its_mark(bench: Bench) -> None:
    """As if a script started it in another environment."""
    process = start(bench.script("exec env -i sleep 1000"), bench.plan)
    try:
        eventually(lambda: program_name(process.pid) == "sleep")
        assert running_here(bench.plan) == [(process.pid, bench.plan.gpu_uuids)]
    finally:
        process.kill()


def test_an_environment_is_waited_for_while_a_program_is_loaded(
    plan: DomainPlan, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is empty until then, as this shell's is."""
    monkeypatch.setattr(processes, "EXEC_S", PATIENCE_S)
    program = named(place, PROGRAM, os.path.realpath("/bin/sh"))
    variables = [f"{name}={value}" for name, value in control_environment(plan).items()]
    script = 'read line; exec env -i "$@" "$0" -c "kill -STOP \\$\\$"'
    control = subprocess.Popen([program, "-c", script, program, *variables], env={}, stdin=-1)
    go = control.stdin
    assert go is not None
    try:
        with pytest.MonkeyPatch.context() as patch:

            def go_on(_: float) -> None:
                patch.undo()
                go.close()
                eventually(lambda: MARK in environment_of(control.pid))

            patch.setattr(time, "sleep", go_on)
            assert running_here(plan) == [(control.pid, plan.gpu_uuids)]
        assert go.closed, "its environment was empty when it was found"
    finally:
        control.kill()
        control.wait()


def test_a_server_that_was_just_forked_is_not_a_control_daemon(plan: DomainPlan, place: Path) -> None:
    """Between fork and exec it is another process of the same program, as this shell's is."""
    program = named(place, PROGRAM, os.path.realpath("/bin/sh"))
    forks = [str(program), "-c", "exec 3<&0; (echo; read line <&3) & wait"]
    with subprocess.Popen(forks, env=control_environment(plan), stdin=-1, stdout=-1) as control:
        assert control.stdout is not None
        control.stdout.readline()
        (server,) = children_of(control.pid)
        kinds = {one.pid: one.is_server for one in our_processes() if one.pid in (control.pid, server)}
        found = server_pids(control.pid)
        control.communicate()
    assert kinds == {control.pid: False, server: True}
    assert found == [server]


def test_a_failed_spawn_leaves_no_record(plan: DomainPlan) -> None:
    """Else every process of the host would be looked at as if it could be that one."""
    with pytest.raises(HostError):
        start("/nowhere/nvidia-cuda-mps-control", plan)
    assert not os.path.exists(Paths.from_environment().control_daemons)


def test_a_pid_that_was_given_again_since_the_search_is_not_adopted(bench: Bench) -> None:
    bench.control()
    (ours,) = (one for one in our_processes() if one.pipe_directory == bench.plan.pipe_directory)
    found = find(bench.plan, [ours])
    assert found is not None
    found.process.close()
    assert find(bench.plan, [ours._replace(started_ticks=ours.started_ticks - 1)]) is None


def test_a_recorded_process_needs_no_mark(bench: Bench) -> None:
    unmarked = {name: value for name, value in control_environment(bench.plan).items() if name != MARK}
    control = bench.control(environment=unmarked)
    assert running_here(bench.plan) == []
    record(bench.plan, control.pid)
    assert running_here(bench.plan) == [(control.pid, bench.plan.gpu_uuids)]


def test_a_record_of_a_newer_version_is_read(bench: Bench) -> None:
    record(bench.plan, os.getpid())
    (file,) = Path(Paths.from_environment().control_daemons).iterdir()
    value = json.loads(file.read_text())
    value["plan"]["of_a_newer_version"] = value["of_a_newer_version"] = [1]
    file.write_text(json.dumps(value))
    assert running_here(bench.plan) == [(os.getpid(), bench.plan.gpu_uuids)]
    assert plan_from_json(value["plan"]) == bench.plan


def test_a_plan_is_recorded_by_name_and_was_by_position() -> None:
    pool = Pool("GPU-2", "host", 128, 1024, 2048, 64, 48, thread_overcommit=None, thread_percentage=25)
    gpus = (
        PlannedGpu("GPU-0", 1024, 2, 50.0, (Slice(1024, 50.0, "below_normal"), Slice(512, 12.5))),
        PlannedGpu("GPU-1", None),
        PlannedGpu("GPU-2", 1024, thread_percentage=25.0, pool=pool),
    )
    plan = DomainPlan("host", "/pipe", "/log", gpus, 50.0, multiuser=True, pipe_group="mps")
    by_name = json.loads(json.dumps(domain_plan_json(plan)))
    assert plan_from_json(by_name) == plan
    for gpu in by_name["gpus"]:
        gpu["of_a_newer_version"] = 1
    assert plan_from_json(by_name) == plan
    by_position = json.loads(json.dumps(plan._asdict()))
    assert isinstance(by_position["gpus"][0], list)
    assert plan_from_json(by_position) == plan
    by_position["gpus"][0].append(1)
    assert plan_from_json(by_position) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "more": 1}'])
def test_a_record_that_cannot_be_understood_hides_nothing(bench: Bench, text: str) -> None:
    control = bench.control()
    directory = Path(Paths.from_environment().control_daemons)
    directory.mkdir(parents=True)
    (directory / "torn").write_text(text)
    assert running_here(bench.plan) == [(control.pid, bench.plan.gpu_uuids)]


def test_another_process_with_the_recorded_pid_is_not_adopted(bench: Bench) -> None:
    record(bench.plan, os.getpid())
    (file,) = Path(Paths.from_environment().control_daemons).iterdir()
    value = json.loads(file.read_text())
    assert running_here(bench.plan) == [(os.getpid(), bench.plan.gpu_uuids)], "as it was recorded"
    file.write_text(json.dumps({**value, "started_ticks": value["started_ticks"] - 1}))
    assert running_here(bench.plan) == []


def test_a_control_daemon_of_another_root_is_not_ours(bench: Bench) -> None:
    bench.control(environment={**control_environment(bench.plan), ROOT_VARIABLE: "/elsewhere"})
    assert running_here(bench.plan) == []


def named(place: Path, name: str, program: str, mode: int = 0o755) -> Path:
    """A copy of the program under this name."""
    copy = place / name
    copy.write_bytes(Path(program).read_bytes())
    copy.chmod(mode)
    return copy


@as_root
def test_a_user_s_process_that_forbids_its_dump_is_still_that_user_s(plan: DomainPlan, place: Path) -> None:
    """Its directory in /proc belongs to root then, and its name and environment are its user's choice."""
    code = (
        f"import ctypes, sys; ctypes.CDLL(None).prctl({_PR_SET_DUMPABLE}, 0);"
        " print(flush=True); sys.stdin.read()"
    )
    real = named(place, PROGRAM, os.path.realpath(sys.executable))
    with subprocess.Popen(
        [real, "-IS", "-c", code], env=control_environment(plan), user=STRANGER, stdin=-1, stdout=-1
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert uid_of(process.pid) == STRANGER
        assert running_here(plan) == []
        process.communicate()


@pytest.fixture
def set_user_id_place(place: Path) -> Iterator[Path]:
    """A folder whose file system honours the set-user-ID bit; that of /tmp does not in Debian 13."""
    if not os.statvfs(place).f_flag & os.ST_NOSUID:
        yield place
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@as_root
@pytest.mark.parametrize("name", [PROGRAM, SERVER])
def test_a_set_user_id_program_started_by_a_user_is_not_ours(
    bench: Bench, set_user_id_place: Path, name: str
) -> None:
    """It runs as root, but with the environment that the user chose."""
    program = named(set_user_id_place, name, "/bin/sleep", 0o4755)
    environment = control_environment(bench.plan)
    with subprocess.Popen([program, "300"], env=environment, user=STRANGER, group=STRANGER) as process:
        eventually(lambda: program_name(process.pid) == name)
        uid, found = uid_of(process.pid), our_processes()
        process.kill()
    assert (uid, found) == (0, [])


@as_root
def test_a_users_process_with_our_mark_and_name_is_not_a_server(plan: DomainPlan, place: Path) -> None:
    """It would keep compute modes from being restored, or be asked for an environment without end."""
    fake = named(place, SERVER, "/bin/sleep")
    environment = control_environment(plan)
    with subprocess.Popen([fake, "300"], env=environment, user=STRANGER, group=STRANGER) as process:
        assert our_processes() == []
        process.kill()


def test_a_server_of_another_user_is_ours(bench: Bench) -> None:
    bench.serving()
    bench.jobs.attach(STRANGER)
    (server,) = bench.jobs.servers()
    assert uid_of(server) == STRANGER
    assert server in [one.pid for one in our_processes() if one.is_server]


def test_a_server_that_outlives_its_control_daemon_is_still_ours(bench: Bench) -> None:
    run = bench.serving()
    server = run.begin_job(bench.jobs)
    os.kill(run.pid, signal.SIGKILL)
    run.until_ended()
    left = [one for one in our_processes() if one.pipe_directory == bench.plan.pipe_directory]
    assert [(one.pid, one.is_server, one.gpu_uuids) for one in left] == [(server, True, bench.plan.gpu_uuids)]
    assert str(left[0]) == f"an MPS server (PID {server})"


_NAMED_LIKE_A_SERVER = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"nvidia-cuda-mps")
print(flush=True)
time.sleep(1000)
"""


@as_root
@pytest.mark.parametrize(("uid", "gid", "expected"), [(STRANGER, STRANGER, False), (STRANGER, 0, True)])
def test_only_with_the_group_of_a_control_daemon_is_it_an_mps_server(
    uid: int, gid: int, expected: bool
) -> None:
    """Every user can give a process that name, so that it would not count as a job."""
    command = [sys.executable, "-ISc", _NAMED_LIKE_A_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, user=uid, group=gid, extra_groups=[]) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            assert is_server(process.pid) is expected
        finally:
            process.kill()
