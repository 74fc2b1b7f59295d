"""`yunion-mps run --safe-stop`: what it passes on, and that it disconnects clients before it kills them."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess

import pytest
from yunion_mps.host.proc import parent_of

from integration.conftest import AtWork
from integration.daemon_host import PATIENCE_S, Daemon, eventually, is_running
from integration.lease_host import holders, leased_addresses, leases_of
from integration.mps_jobs import JOB, STUBBORN_JOB, end_of, started_job, terminations_of
from integration.tmux import Tmux

pytestmark = pytest.mark.gpus({"kind": "v100"})

RUN = ("yunion-mps", "run", "--safe-stop")
AT_ONCE = ("yunion-mps", "run", "--safe-stop=0s", "--")
KILLED, TERMINATED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
DISCONNECTED = "its MPS server disconnected it"


def test_a_stubborn_client_is_disconnected_before_it_is_killed(at_work: AtWork) -> None:
    daemon, servers = at_work.daemon, at_work.jobs.servers()
    with started_job(daemon.host, *AT_ONCE, *STUBBORN_JOB) as job:
        job.terminate()
        assert end_of(job)[::2] == (KILLED, "")
    assert terminations_of(daemon) == [DISCONNECTED]
    assert (at_work.jobs.servers(), is_running(at_work.job.pid)) == (servers, True)
    eventually(lambda: leased_addresses(daemon) == [], "the end of the lease")


def test_a_client_that_would_die_of_a_signal_is_disconnected_before_it(at_work: AtWork) -> None:
    with started_job(at_work.daemon.host, *RUN, "--", *JOB) as job:
        job.terminate()
        assert end_of(job)[2] == ""
    (how,) = terminations_of(at_work.daemon)
    assert how.startswith(DISCONNECTED)


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGRTMIN], ids=str)
def test_the_signals_of_batch_systems_harm_no_other_job(at_work: AtWork, number: int) -> None:
    with started_job(at_work.daemon.host, *RUN, "--", *JOB) as job:
        job.send_signal(number)
        end_of(job)
    (how,) = terminations_of(at_work.daemon)
    assert how.startswith(DISCONNECTED)


def test_all_processes_are_killed_even_if_the_messages_are_not_read(at_work: AtWork) -> None:
    daemon = at_work.daemon
    reader, writer = os.pipe()
    job = daemon.host.popen([*AT_ONCE, *STUBBORN_JOB], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    os.close(reader)
    assert job.stdout
    assert [job.stdout.readline() for _ in range(2)] == ["asking\n", "attached\n"]
    daemon.kill()
    job.terminate()
    out, _ = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, out) == (KILLED, "")


def test_the_command_is_killed_even_if_nobody_reads_a_full_stderr(at_work: AtWork) -> None:
    daemon = at_work.daemon
    reader, writer = os.pipe()
    job = daemon.host.popen([*AT_ONCE, *STUBBORN_JOB], stdout=subprocess.PIPE, stderr=writer)
    assert job.stdout
    assert [job.stdout.readline() for _ in range(2)] == ["asking\n", "attached\n"]
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))
    daemon.kill()
    job.terminate()
    out, _ = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, out) == (KILLED, "")
    os.close(writer)
    os.close(reader)


@pytest.mark.parametrize("kind", ["careful", "waiting"])
def test_a_client_that_handles_sigterm_and_ends_in_time_is_left_alone(at_work: AtWork, kind: str) -> None:
    with started_job(at_work.daemon.host, *RUN, "--", *JOB, kind) as job:
        job.terminate()
        assert end_of(job) == (0, ["saved"], "")
    assert terminations_of(at_work.daemon) == []


def test_processes_that_outlive_the_command_are_terminated(at_work: AtWork) -> None:
    script = f"{shlex.join(STUBBORN_JOB)} & exec sleep 600"
    with started_job(at_work.daemon.host, *AT_ONCE, "sh", "-c", script) as job:
        job.terminate()
        assert end_of(job)[::2] == (TERMINATED, "")
    assert terminations_of(at_work.daemon) == [DISCONNECTED]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hanging"])
def test_the_command_is_killed_even_without_the_daemon(at_work: AtWork, number: signal.Signals) -> None:
    daemon = at_work.daemon
    with started_job(daemon.host, *AT_ONCE, *STUBBORN_JOB) as job:
        daemon.signal(number)
        job.terminate()
        status, said, err = end_of(job)
        daemon.signal(signal.SIGCONT)
    assert (status, said, err.count("\n")) == (KILLED, [], 1)
    assert err.startswith("yunion-mps: COMMAND was not disconnected from MPS before its signal: the daemon ")


def test_the_daemon_may_restart_during_a_safe_stop(at_work: AtWork) -> None:
    daemon = at_work.daemon
    with started_job(daemon.host, *AT_ONCE, *STUBBORN_JOB) as job:
        daemon.kill()
        job.terminate()
        daemon.start()
        assert end_of(job)[::2] == (KILLED, "")
    assert terminations_of(daemon) == [DISCONNECTED]


def test_the_command_outlives_its_parent_and_keeps_the_device(shared_daemon: Daemon) -> None:
    run = [*RUN, "--", "sh", "-c", "echo begun; exec cat"]
    job = shared_daemon.host.popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout
    assert job.stdin
    assert job.stdout.readline() == "begun\n"
    (command,) = holders(shared_daemon)
    assert parent_of(command) == job.pid
    job.kill()
    job.wait()
    job.stdin.write("typed\n")
    job.stdin.flush()
    assert job.stdout.readline() == "typed\n"
    assert holders(shared_daemon) == {command}
    job.communicate()
    eventually(lambda: leased_addresses(shared_daemon) == [], "the end of the lease")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_passed_on_once(shared_daemon: Daemon, number: signal.Signals) -> None:
    traps = f"trap 'echo caught' {number.name[3:]}; trap 'exit 9' USR2"
    caught = f"{traps}; echo begun; while :; do read -rt 0.1 x; done"
    for script, expected in ((caught, (9, "caught\n")), ("echo begun; exec cat", (128 + number, ""))):
        run = [*RUN, "--", "bash", "-c", script]
        job = shared_daemon.host.popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert job.stdout
        assert job.stdout.readline() == "begun\n"
        job.send_signal(number)
        said = job.stdout.readline()
        job.send_signal(signal.SIGUSR2)
        assert (job.wait(), said + job.stdout.read()) == expected
        job.communicate()


def test_on_a_terminal_keys_reach_the_command_once(shared_daemon: Daemon) -> None:
    host = shared_daemon.host
    with Tmux({**host.env, "LC_ALL": "C.UTF-8"}, 100, 20) as screen:
        loop = "until [ x$word = xenough ]; do read -r word; echo got $word; done"
        script = f"trap 'echo caught' INT; echo begun; {loop}"
        screen.type(f"set -m; clear; {' '.join(RUN)} -- bash -c {shlex.quote(script)}", "Enter")
        screen.wait("^begun")
        screen.type("C-c")
        screen.wait("caught")
        screen.type("C-z")
        screen.wait("Stopped")
        assert leased_addresses(shared_daemon) == ["00:06.0-0"]
        screen.type("fg", "Enter")
        screen.type("word", "Enter")
        lines = screen.wait("^got word")
        assert sum(line.endswith("caught") for line in lines) == 1
        screen.type("enough", "Enter")
        eventually(lambda: leased_addresses(shared_daemon) == [], "the end of the lease")


@pytest.mark.parametrize(("command", "status"), [(["sh", "-c", "exit 3"], 3), (["/no/such/program"], 127)])
def test_the_exit_status_is_that_of_the_command(
    shared_daemon: Daemon, command: list[str], status: int
) -> None:
    assert shared_daemon.host.run([*RUN, "--", *command]).returncode == status


def test_a_signal_ends_a_request_that_waits(shared_daemon: Daemon) -> None:
    host = shared_daemon.host
    with host.popen(["yunion-mps", "run", "--device", "all", "sleep", "600"]) as holder:
        eventually(lambda: leases_of(shared_daemon), "a lease of everything")
        with host.popen([*RUN, "--wait", "--", "true"], stderr=subprocess.PIPE) as waiting:
            eventually(lambda: shared_daemon.get("/v1/leases")[1]["waiting"], "the request")
            waiting.terminate()
            assert waiting.wait() == TERMINATED
        holder.kill()


def test_the_device_of_a_job_is_inherited(shared_daemon: Daemon) -> None:
    inner = "yunion-mps run --inherit --safe-stop -- printenv YUNION_MPS_LEASE YUNION_MPS_DEVICE"
    script = f'echo "$YUNION_MPS_LEASE"; {inner}; yunion-mps lease list -o csv | wc -l'
    done = shared_daemon.host.run(["yunion-mps", "run", "sh", "-c", script], check=True)
    outer, lease, device, lines = done.stdout.split()
    assert (lease, device, lines) == (outer, "00:06.0-0", "2")


def test_inherit_requires_a_lease_and_excludes_a_request(shared_daemon: Daemon) -> None:
    done = shared_daemon.host.run(["yunion-mps", "run", "--inherit", "true"])
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1, "yunion-mps: --inherit: this environment has no device: YUNION_MPS_DEVICE is not set [host_error]",
    )  # fmt: skip
    script = "yunion-mps lease release $YUNION_MPS_LEASE; yunion-mps run --inherit echo started"
    done = shared_daemon.host.run(["yunion-mps", "run", "sh", "-c", script])
    assert (done.returncode, "started" in done.stdout) == (1, False)
    assert "of this environment has ended, so another job may have its devices" in done.stderr
    done = shared_daemon.host.run(["yunion-mps", "run", "--inherit", "--gpu", "00:06.0", "true"])
    assert (done.returncode, "omit --gpu" in done.stderr) == (2, True)


def test_in_another_pid_namespace_a_safe_stop_is_refused(shared_daemon: Daemon) -> None:
    """PIDs differ there: to the daemon, one of the command's PIDs may be that of another job's client."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = shared_daemon.host.run([*inside, *RUN, "--", "echo", "begun"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("yunion-mps: --safe-stop: the daemon is in another PID namespace, so ")
    assert leased_addresses(shared_daemon) == []
    done = shared_daemon.host.run([*inside, "yunion-mps", "run", "--", "echo", "begun"])
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


def test_a_command_may_use_a_pid_namespace_of_its_own(at_work: AtWork) -> None:
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    with started_job(at_work.daemon.host, *AT_ONCE, *inside, *STUBBORN_JOB) as job:
        job.terminate()
        assert end_of(job)[2] == ""
    assert terminations_of(at_work.daemon) == [DISCONNECTED]


def test_the_parent_keeps_no_pipe_open(shared_daemon: Daemon) -> None:
    run = [*RUN, "--", "sh", "-c", "exec >&-; read -r word"]
    job = shared_daemon.host.popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout
    assert job.stdout.read() == ""
    job.communicate("end\n")
    assert job.returncode == 0
