"""That `yunion-mps run` becomes its command: signals, terminal, process group and exit status are its own."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from integration.daemon_host import Daemon, eventually
from integration.lease_host import given
from integration.tmux import Tmux

#: One GPU, divided by four: `run` and the client take nothing of the reference case, which has no limits.
pytestmark = pytest.mark.gpus({"kind": "v100"})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_is_sent_to_it_is_the_command_s(ready_daemon: Daemon, number: signal.Signals) -> None:
    caught = f"trap 'echo caught; exit 9' {number.name[3:]}; echo begun; while :; do read -rt 0.1 line; done"
    for script, expected in ((caught, (9, "caught\n")), ("echo begun; exec cat", (-number, ""))):
        job = ready_daemon.host.popen(
            ["yunion-mps", "run", "--", "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert job.stdout
        assert job.stdout.readline() == "begun\n"
        job.send_signal(number)
        said = job.stdout.read()
        job.communicate()
        assert (job.returncode, said) == expected
    eventually(lambda: given(ready_daemon) == [], "the end of the leases")


def test_the_command_is_the_same_process_in_the_same_group_and_session(ready_daemon: Daemon) -> None:
    for is_new in (False, True):
        job = ready_daemon.host.popen(
            ["yunion-mps", "run", "cat", "/proc/self/stat"], stdout=subprocess.PIPE, start_new_session=is_new
        )
        pid, command, _, parent, group, session, *_ = job.communicate()[0].split()
        assert (int(pid), command, int(parent)) == (job.pid, "(cat)", os.getpid())
        expected = (job.pid, job.pid) if is_new else (os.getpgrp(), os.getsid(0))
        assert (int(group), int(session)) == expected


def test_on_a_terminal_it_is_in_the_foreground_and_keys_are_its_own(ready_daemon: Daemon) -> None:
    host = ready_daemon.host
    with Tmux({**host.env, "LC_ALL": "C.UTF-8"}, 100, 20) as screen:
        screen.type("tty; yunion-mps run -- sh -c 'tty; test -t 0 -a -t 1 && echo a terminal'", "Enter")
        lines = screen.wait("^a terminal")
        assert len({line for line in lines if line.startswith("/dev/")}) == 1
        screen.type("clear; yunion-mps run -- sh -c 'echo begun; exec cat'", "Enter")
        screen.wait("^begun")
        screen.type("typed", "Enter")
        eventually(lambda: screen.lines().count("typed") == 2, "what is typed, and what cat makes of it")
        screen.type("C-c")
        screen.wait_prompt()
        screen.type("echo ended with $?", "Enter")
        screen.wait(rf"ended with {128 + signal.SIGINT}$")
        screen.type("clear; set -m; yunion-mps run -- sh -c 'echo second; exec cat'", "Enter")
        screen.wait("^second")  # another word, for what was said before may not be cleared away yet
        screen.type("C-z")
        screen.wait("Stopped")
        assert given(ready_daemon) == ["00:06.0-0"], "who is stopped still has its device"
        screen.type("fg", "Enter")
        screen.type("again", "Enter")
        eventually(lambda: screen.lines().count("again") == 2, "that it goes on")
        screen.type("C-d")
        eventually(lambda: given(ready_daemon) == [], "the end of the lease")


def test_a_pipeline_ends_as_its_commands_do(ready_daemon: Daemon) -> None:
    pipeline = "set -o pipefail; seq 5 | yunion-mps run -- sh -c 'cat; exit 3' | yunion-mps run tail -n 1"
    done = ready_daemon.host.run(["bash", "-c", pipeline])
    assert (done.returncode, done.stdout) == (3, "5\n")
