"""A process, a GPU and a driver with hostile names, on a whole host: nothing obeys what they say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon
from integration.lease_host import take
from unit.hostile_names import WORST, steers

#: Takes the name of its first argument, and keeps the control daemon waiting until its input ends.
PROGRAM = """
import socket, sys
open("/proc/self/comm", "wb").write(sys.argv[1].encode())
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[2])
print("connected", flush=True)
sys.stdin.read()
"""
NAME = "\nSTOPPING=1\nx"
ASCII = "".join(char for char in WORST if char.isascii())
#: What unit/cli/test_hostile_names.py does not run.
COMMANDS = ("doctor", "doctor -o json", "plan", "config show", "config show -o json", "metrics", "status")


@pytest.fixture
def host_of_hostile_names(make_host: MakeHost, make_daemon: MakeDaemon) -> Daemon:
    gpu = {"kind": "tesla-p40", "pci": "0000:00:06.0", "name": ASCII[:90]}
    host = make_host({"driver": {"version": f"535{ASCII}"[:60]}, "gpus": [gpu]})
    return make_daemon(host).start().wait_ready()


@pytest.fixture
def hostile(host_of_hostile_names: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    """A process that uses a GPU, has a lease, and keeps the control daemon from answering others."""
    daemon = host_of_hostile_names
    words = [NAME, str(daemon.pipe_directory / "control"), WORST.replace("\ud800", "\udcff")]
    command = [sys.executable, "-c", PROGRAM, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"connected\n"
        daemon.host.gpus[0].add_process(process.pid, 9000, "M+C")
        request = f"holder.pid={process.pid}&devices=00:06.0-0&allow_unlimited=true"
        take(daemon, request)
        daemon.configure(cuda_mps_thread_percentage="none")
        daemon.signal(signal.SIGHUP)  # the daemon asks the control daemon now, and not within 10 s
        yield process
        process.kill()


def test_hostile_names_are_escaped_in_every_output(
    host_of_hostile_names: Daemon, hostile: subprocess.Popen[bytes]
) -> None:
    daemon = host_of_hostile_names
    who = f"PID {hostile.pid} (\\nSTOPPING=1\\nx, root) is connected to it but sends nothing"
    daemon.wait_message(who)
    daemon.wait_log(who)
    for command in COMMANDS:
        done = daemon.host.run(["yunion-mps", *command.split()], env=daemon.env)
        printed = done.stdout + done.stderr
        assert "Traceback" not in printed, command
        assert printed, command
        assert steers(printed) == set(), command
    for path in ("status", "gpus", "devices", "leases", "clients", "events"):
        status, answer = daemon.get(f"/v1/{path}")
        assert status == 200, path
        assert steers("".join(texts(answer))) == set(), path
        assert not [text for text in texts(answer) if "\n" in text and path != "events"], path
    assert {line.partition("=")[0] for line in daemon.notifications} == {"STATUS", "READY"}
    assert steers(daemon.log) == set()
    assert [line for line in daemon.log.splitlines() if not re.match(r"<[34567]>", line)] == []


def texts(answer: object) -> list[str]:
    if isinstance(answer, dict):
        return [text for key, value in answer.items() for text in (*texts(key), *texts(value))]
    if isinstance(answer, list):
        return [text for value in answer for text in texts(value)]
    return [answer] if isinstance(answer, str) else []
