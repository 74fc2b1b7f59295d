"""Leases on a Daemon of daemon_host.py: through its socket, by `yunion-mps run` and by other users."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from integration.daemon_host import Daemon, eventually
from request_bodies import request_body
from simhost import SimHost
from unit.http.server_host import as_user

#: The devices of a GPU that is divided by four, where it is the only one.
ADDRESSES = [f"00:06.0-{slot}" for slot in range(4)]
#: nobody: a user who is neither root nor us.
STRANGER = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")


def reason_code(line: str) -> str:
    """The reason code at the end of a command's error, such as `nothing_free`."""
    assert line.endswith("]"), line
    return line.rpartition(" [")[2].rstrip("]")


class Connection(http.client.HTTPConnection):
    """HTTP over the daemon's socket, on a connection that is kept: some leases end with it."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__("localhost", timeout=60)
        self._path = str(daemon.socket_path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)

    def ask(self, method: str, target: str, words: str = "") -> tuple[int, Any]:
        if method == "POST":
            self.post(target, words)
        else:
            self.request(method, target)
        return self.answer()

    def post(self, target: str, words: str) -> None:
        """Send a request whose body has these members."""
        self.request("POST", target, *request_body(words))

    def answer(self) -> tuple[int, Any]:
        response = self.getresponse()
        return response.status, json.loads(response.read())


class Requester(Connection):
    def __init__(self, daemon: Daemon, query: str) -> None:
        super().__init__(daemon)
        self.post("/v1/leases", query)


def queued(daemon: Daemon, query: str, position: int = 1) -> Requester:
    """Ask for a lease, and wait until that is in this position of the queue."""
    requester = Requester(daemon, f"wait_s=600&{query}")
    await_queue(daemon, position)
    return requester


def restart(daemon: Daemon) -> None:
    """Kill the daemon, and start the next one."""
    daemon.kill()
    daemon.start().wait_ready()


@contextlib.contextmanager
def stranger(daemon: Daemon) -> Iterator[Connection]:
    """A connection of another user's, whom the socket lets in."""
    daemon.socket_path.chmod(0o666)
    with contextlib.closing(Connection(daemon)) as connection:
        with as_user(STRANGER):
            connection.connect()
        yield connection


def take(daemon: Daemon | Connection, query: str) -> dict[str, Any]:
    status, lease = daemon.ask("POST", "/v1/leases", query)
    assert status in (200, 201), lease
    return dict(lease)


def take_all(daemon: Daemon) -> None:
    for address in ADDRESSES:
        take(daemon, f"holder.name={address}&holder.ttl_s=600&devices={address}")


def leases_of(daemon: Daemon) -> list[dict[str, Any]]:
    return list(daemon.get("/v1/leases")[1]["leases"])


def leased_addresses(daemon: Daemon) -> list[str]:
    """The addresses of the leased devices."""
    return sorted(address for lease in leases_of(daemon) for address in lease["devices"])


def holders(daemon: Daemon) -> set[int]:
    return {lease["pid"] for lease in leases_of(daemon)}


def queued_requests(daemon: Daemon) -> list[dict[str, Any]]:
    return list(daemon.get("/v1/leases")[1]["waiting"])


def await_queue(daemon: Daemon, number: int) -> None:
    eventually(lambda: len(queued_requests(daemon)) == number, f"{number} that wait")


def run_job(host: SimHost, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return host.run(["yunion-mps", "run", *arguments], **more)


def start_job(host: SimHost, *arguments: str) -> subprocess.Popen[str]:
    """A job that says when it has begun, and runs until its standard input is closed."""
    job = host.popen(
        ["yunion-mps", "run", *arguments, "--", "sh", "-c", "echo begun; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "begun\n"
    return job


def end_job(job: subprocess.Popen[str]) -> None:
    job.kill()
    job.communicate()
