"""Spawning, signalling and watching processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.host.proc import (
    environment_of,
    group_leaders_of,
    is_exiting,
    process_name,
    program_of,
    started_s,
    started_ticks,
    users_of,
    variable_of,
)
from yunion_mps.host.processes import Process, describe_exit, find_program, spawn

from integration.daemon_host import eventually
from unit.as_user import needs_root

PATIENCE_MS = 60_000


def start(script: str, environment: dict[str, str], output: int, stdin: int | None = None) -> Process:
    return spawn(["/bin/sh", "-c", script], environment, stdin=stdin, stdout=output, stderr=output)


def wait(process: Process) -> int:
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    assert poll.poll(PATIENCE_MS)
    status = process.status()
    assert status is not None
    return status


def output_of(script: str, environment: dict[str, str], stdin: int | None = None) -> str:
    output, into = os.pipe()
    process = start(script, environment, into, stdin)
    os.close(into)
    with open(output, "rb") as file:
        text = file.read().decode()
    assert wait(process) == 0
    process.close()
    return text


@pytest.fixture
def null() -> Iterator[int]:
    with open(os.devnull, "r+b") as file:
        yield file.fileno()


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("exit 0", 0, "exited with status 0"),
        ("exit 7", 7, "exited with status 7"),
        ("kill -TERM $$", -15, "was killed by signal 15"),
    ],
)
def test_the_end_of_a_child_is_noticed_and_described(script: str, status: int, words: str, null: int) -> None:
    process = start(script, {}, null)
    assert wait(process) == status
    assert process.status() == status
    assert describe_exit(status) == words
    process.close()


def test_a_running_child_has_no_status_and_kill_ends_and_reaps_it(null: int) -> None:
    process = start("exec sleep 1000", {"PATH": "/usr/bin:/bin"}, null)
    assert process.status() is None
    process.kill()
    assert process.status() == -9
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def test_a_child_has_exactly_the_environment_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    with_shells_own = ["A=1", "B=x=y", f"PWD={os.getcwd()}"]
    assert sorted(output_of("exec /usr/bin/env", {"A": "1", "B": "x=y"}).split()) == with_shells_own


def test_a_child_inherits_no_descriptor_and_reads_nothing(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as secret:
        listed = output_of("cat; ls -l /proc/$$/fd", {"PATH": "/usr/bin:/bin"})
    assert "0 -> /dev/null" in listed
    assert secret.name not in listed


def test_a_child_leads_its_own_session_with_no_signal_blocked(null: int) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = start("exec sleep 1000", {"PATH": "/usr/bin:/bin"}, null)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert os.getsid(process.pid) == process.pid
    process.signal(signal.SIGTERM)
    assert wait(process) == -signal.SIGTERM
    process.close()


def test_sigpipe_which_python_ignores_ends_a_child() -> None:
    """Otherwise a front-end whose reader is gone would go on."""
    reading, writing = os.pipe()
    os.close(reading)
    process = start("while :; do echo x || exit 3; done", {}, writing)
    os.close(writing)
    assert wait(process) == -signal.SIGPIPE
    process.close()


def test_a_signal_to_a_process_that_has_ended_does_nothing(null: int) -> None:
    process = start("exit 0", {}, null)
    wait(process)
    process.signal(signal.SIGKILL)
    process.kill()
    assert process.status() == 0


def test_another_process_s_child_is_watched_until_its_end() -> None:
    script = "sleep 1000 & echo $!; wait; echo gone; read x"
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        process = Process.adopt(int(parent.stdout.readline()))
        assert process is not None
        assert not process.is_child
        assert process.status() is None
        process.signal(signal.SIGKILL)
        assert parent.stdout.readline() == "gone\n", "it is not ours to reap"
        status = wait(process)
        assert describe_exit(status) == "ended"
        process.close()


def test_a_child_that_is_adopted_is_reaped_by_its_new_parent(null: int) -> None:
    """As after a daemon has replaced its own code: its children are still its children."""
    started = start("exit 7", {}, null)
    process = Process.adopt(started.pid)
    assert process is not None
    assert process.is_child
    assert wait(process) == 7
    assert started.status() == -1000, "another waiter has reaped it"
    process.close()
    started.close()


def test_the_start_of_a_process_is_known_until_its_end(null: int) -> None:
    child = start("exec sleep 1000", {"PATH": "/usr/bin:/bin"}, null)
    own_s, child_s = started_s(os.getpid()), started_s(child.pid)
    assert own_s is not None
    assert child_s is not None
    ticks = (started_ticks(child.pid) or 0) - (started_ticks(os.getpid()) or 0)
    assert child_s - own_s == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))
    child.kill()
    assert started_s(child.pid) is None


#: Ends its main thread alone, as pthread_exit(3) does, while another thread goes on.
_WITHOUT_MAIN_THREAD = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_a_process_without_its_main_thread_has_not_ended() -> None:
    with subprocess.Popen([sys.executable, "-ISc", _WITHOUT_MAIN_THREAD]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        try:
            assert started_ticks(process.pid) is not None
            assert not is_exiting(process.pid)
            assert process_name(process.pid)
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started_ticks(process.pid) is None
        assert is_exiting(process.pid)
        assert process_name(process.pid) == ""


def test_the_makers_of_a_process_s_group_and_session_are_known(null: int) -> None:
    child = start("exec sleep 1000", {"PATH": "/usr/bin:/bin"}, null)
    assert group_leaders_of(child.pid) == (child.pid, child.pid)
    child.kill()
    assert group_leaders_of(os.getpid()) == (os.getpgrp(), os.getsid(0))


def test_a_process_that_has_ended_cannot_be_adopted() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    assert Process.adopt(gone.pid) is None


def test_environment_and_program_of_a_process_are_read_from_the_kernel(null: int) -> None:
    process = start("exec sleep 1000", {"PATH": "/usr/bin:/bin", "MARK": "a=b"}, null)
    try:
        # posix_spawn returns after the exec of sh, which then becomes sleep: first without an environment.
        end_s = time.monotonic() + 60
        while not (
            program_of(process.pid).endswith(("sleep", "coreutils", "busybox"))
            and environment_of(process.pid)
        ):
            assert time.monotonic() < end_s, program_of(process.pid)
            time.sleep(0.001)
        assert environment_of(process.pid)["MARK"] == variable_of(process.pid, "MARK") == "a=b"
    finally:
        process.kill()
    assert environment_of(process.pid) == {}
    assert variable_of(process.pid, "MARK") is None
    assert program_of(process.pid) == ""


#: Says that 1 GiB of memory, of which almost nothing is there, is its environment.
ENDLESS = """
import ctypes, mmap, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:17] = b"MARK=yes\\0LATER=1\\0"
begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
stat = ["", "", *open("/proc/self/stat").read().rpartition(")")[2].split()]
known = [int(stat[field - 1]) for field in (26, 27, 45, 46, 47, 28, 48, 49)]  # see proc(5)
fields = [*known[:5], libc.sbrk(0), *known[5:], begin, begin + len(memory)]
layout = ctypes.create_string_buffer(struct.pack("11QQIi", *fields, 0, 0, -1))
PR_SET_MM, PR_SET_MM_MAP = 35, 14
failed = libc.prctl(PR_SET_MM, PR_SET_MM_MAP, layout, ctypes.c_ulong(len(layout) - 1), 0)
print(ctypes.get_errno() if failed else 0, flush=True)
sys.stdin.read()
"""


def test_an_endless_environment_is_read_only_as_far_as_one_can_be_given() -> None:
    """Any user can have such a process, and the daemon reads the environments of all that use the GPUs."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n", "a kernel without CONFIG_CHECKPOINT_RESTORE"
        tracemalloc.start()
        try:
            assert variable_of(process.pid, "MARK") == "yes"
            assert variable_of(process.pid, "MAR") == variable_of(process.pid, "NONE") == ""
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            process.communicate()
        assert most < 32 << 20


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("#!/bin/sh\n", 0o644, "Permission denied"),
        ("no program", 0o755, "Exec format error"),
        ("#!/no/such/shell\n", 0o755, "No such file or directory"),
    ],
)
def test_a_program_that_cannot_be_started_is_an_error_with_a_hint(
    tmp_path: Path, null: int, content: str, mode: int, words: str
) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(mode)
    with pytest.raises(HostError) as caught:
        spawn([str(program)], {}, stdin=None, stdout=null, stderr=null)
    assert caught.value.message == f"{program} cannot be started: {words}"
    assert caught.value.hint == "reinstall it"


def test_a_program_is_found_on_path_first_and_only_when_it_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, mode in (("plain", 0o644), ("first", 0o755), ("second", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a-program").write_text("#!/bin/sh\n")
        (tmp_path / folder / "a-program").chmod(mode)
    monkeypatch.setenv("PATH", f"relative:{tmp_path}/plain:{tmp_path}/first:{tmp_path}/second")
    assert find_program("a-program", "") == f"{tmp_path}/first/a-program"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative").mkdir()
    (tmp_path / "relative/a-program").symlink_to(tmp_path / "second/a-program")
    assert find_program("a-program", "") == f"{tmp_path}/first/a-program", "a relative entry is passed over"


def test_a_program_beside_path_is_found_in_the_drivers_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_program("env", "") == "/usr/bin/env"


def test_a_missing_program_is_an_error_with_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError) as caught:
        find_program("no-such-program", "install it: so and so")
    assert (caught.value.message, caught.value.hint) == (
        "no-such-program is not installed",
        "install it: so and so",
    )


_INTERRUPTED = """
import os, signal
from yunion_mps.host.processes import outcome_of

def spawn_and_interrupt(*arguments, **options):
    pids.append(spawn(*arguments, **options))
    os.kill(os.getpid(), signal.SIGINT)
    return pids[0]

pids, spawn, os.posix_spawn = [], os.posix_spawn, spawn_and_interrupt
try:
    outcome_of(["/bin/sleep", "600"])
except KeyboardInterrupt:
    print("runs" if os.path.exists(f"/proc/{pids[0]}") else "ended")
"""


def test_an_interrupt_while_a_program_starts_ends_it() -> None:
    """It can run before posix_spawn returns, so Ctrl-C may come while its PID is unknown."""
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended\n", "")


_NAMESPACE = """
import ctypes, os
os.setuid(2000)
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print("made", flush=True)
input()
os.setuid(33)
print("changed", flush=True)
input()
"""


@needs_root
def test_a_process_in_a_user_namespace_is_also_that_of_its_maker() -> None:
    """As in a rootless container: the process has a user id that no user of the host has."""
    command = [sys.executable, "-IS", "-c", _NAMESPACE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            assert process.stdout.readline() == "made\n"
            Path(f"/proc/{process.pid}/uid_map").write_text("0 2000 1\n33 100033 1\n")
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "changed\n"
            assert users_of(process.pid) == {100_033, 2000}
        finally:
            process.kill()


@needs_root
def test_a_process_belongs_to_its_real_and_saved_users_as_for_kill() -> None:
    """The kernel lets no other user signal it, even if it acts as that one now."""
    program = "import os, time; os.setresuid(0, 2000, 0); print('acts', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "acts\n"
        assert users_of(process.pid) == {0}
        process.kill()


def test_a_process_belongs_to_its_user_and_after_its_end_to_none() -> None:
    assert users_of(os.getpid()) == {os.geteuid()}
    assert users_of(1 << 22) == frozenset()
