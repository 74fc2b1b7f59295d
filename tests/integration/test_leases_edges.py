"""Leases at the moments when two things happen at once, and where the host has no more of something."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.tampering import Levers
from integration.daemon_host import Daemon, eventually
from integration.lease_host import (
    ADDRESSES,
    Connection,
    Requester,
    await_queue,
    leased_addresses,
    queued,
    queued_requests,
    restart,
    take,
)

pytestmark = pytest.mark.gpus({"kind": "v100"})


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """What happens meanwhile happens to the daemon in one moment."""
    daemon.signal(signal.SIGSTOP)
    try:
        eventually(lambda: "\nState:\tT" in Path(f"/proc/{daemon.pid}/status").read_text(), "its halt")
        yield
    finally:
        daemon.signal(signal.SIGCONT)


def test_a_device_that_is_freed_just_when_a_wait_runs_out_is_given_or_free(ready_daemon: Daemon) -> None:
    holder = Requester(ready_daemon, "holder.kind=connection&devices=00:06.0-0")
    assert holder.answer()[0] == 201
    waiter = Requester(ready_daemon, "devices=00:06.0-0&holder.name=a&holder.ttl_s=600&wait_s=1")
    end_s = time.monotonic() + 1.1
    eventually(lambda: queued_requests(ready_daemon) or time.monotonic() > end_s, "the wait")
    with stopped(ready_daemon):
        holder.close()
        eventually(lambda: time.monotonic() > end_s, "the end of the wait")
    status, answer = waiter.answer()
    assert status in (201, 423), answer
    assert leased_addresses(ready_daemon) == ([ADDRESSES[0]] if status == 201 else [])
    waiter.close()


@pytest.mark.parametrize("first", ["device", "asker"])
def test_a_client_that_leaves_just_when_its_device_is_freed_has_none(
    ready_daemon: Daemon, sleeper: subprocess.Popen[bytes], first: str
) -> None:
    take(ready_daemon, f"devices=00:06.0-0&holder.pid={sleeper.pid}")
    waiter = queued(ready_daemon, "devices=00:06.0-0&holder.name=a&holder.ttl_s=600")
    with stopped(ready_daemon):
        if first == "asker":
            waiter.close()
        sleeper.kill()
        sleeper.wait()
        waiter.close()
    eventually(lambda: not queued_requests(ready_daemon), "that the queue is empty")
    eventually(lambda: leased_addresses(ready_daemon) == [], "that all is free")


@pytest.mark.gpus({"kind": "v100", "count": 2})
def test_a_lease_without_its_control_daemon_is_reported(ready_daemon: Daemon) -> None:
    daemon = ready_daemon
    before = take(daemon, "holder.name=before&holder.ttl_s=600")
    assert wrong_at(daemon) == []
    daemon.configure(cuda_mps_scope="gpu")
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    ready = ["ready", "ready"]
    eventually(lambda: [one["state"] for one in daemon.status()["domains"]] == ready, "the new ones")
    take(daemon, "holder.name=after&holder.ttl_s=600")
    (one,) = wrong_at(daemon)
    whose = f"lease {before['id'][:8]} of root ({ADDRESSES[0]})"
    assert one.startswith(f"{whose}: its control daemon is gone")


def wrong_at(daemon: Daemon) -> list[str]:
    told = json.loads(daemon.host.run(["yunion-mps", "status", "-o", "json"]).stdout)
    return [one["text"] for one in told["problems"]]


def test_the_next_daemon_ties_a_connection_s_lease_to_its_process(ready_daemon: Daemon) -> None:
    holder = Requester(ready_daemon, "holder.kind=connection")
    assert holder.answer()[0] == 201
    assert ready_daemon.ask("POST", "/v1/reexec")[0] == 200
    assert holder.sock.recv(1) == b""
    assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
    holder.close()
    assert ready_daemon.stop() == 0
    ready_daemon.start().wait_ready()
    assert leased_addresses(ready_daemon) == [ADDRESSES[0]]


def test_a_process_has_its_lease_until_all_its_threads_have_ended(ready_daemon: Daemon) -> None:
    code = """
import ctypes, platform, sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
sys.stdin.readline()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        take(ready_daemon, f"holder.pid={process.pid}")
        assert process.stdin
        process.stdin.close()
        status = Path(f"/proc/{process.pid}/status")
        eventually(lambda: "\nState:\tZ" in status.read_text(), "the end of its first thread")
        restart(ready_daemon)
        assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
        process.kill()
        eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_a_shortage_of_descriptors_ends_no_running_process_s_lease(
    daemon: Daemon, sleeper: subprocess.Popen[bytes]
) -> None:
    daemon.host.divide(48)
    daemon.start().wait_ready()
    for _ in range(48):
        take(daemon, f"holder.pid={sleeper.pid}")
    used = daemon.descriptors
    daemon.kill()
    daemon.descriptor_limit = used - 24
    daemon.start()
    daemon.wait()
    assert "Too many open files" in daemon.log
    daemon.descriptor_limit = None
    daemon.start().wait_ready()
    assert len(leased_addresses(daemon)) == 48


def test_a_shortage_of_descriptors_is_reported_and_nothing_granted(
    ready_daemon: Daemon, sleeper: subprocess.Popen[bytes]
) -> None:
    with contextlib.closing(Connection(ready_daemon)) as connection:
        connection.ask("GET", "/v1/leases")
        before = resource.prlimit(ready_daemon.pid, resource.RLIMIT_NOFILE)
        for spare in range(4):
            used = max(map(int, os.listdir(f"/proc/{ready_daemon.pid}/fd"))) + 1
            resource.prlimit(ready_daemon.pid, resource.RLIMIT_NOFILE, (used + spare, before[1]))
            status, answer = connection.ask("POST", "/v1/leases", f"holder.pid={sleeper.pid}")
            resource.prlimit(ready_daemon.pid, resource.RLIMIT_NOFILE, before)
            if status != 201:
                assert "has ended" not in answer["detail"], answer
                assert connection.ask("GET", "/v1/leases")[1]["total"] == 0
            else:
                assert connection.ask("DELETE", f"/v1/leases/{answer['id']}")[0] == 200


def test_a_clock_that_is_set_back_changes_no_order(daemon: Daemon, tmp_path: Path) -> None:
    levers = Levers(tmp_path)
    daemon.start(**levers.environment).wait_ready()
    held = take(daemon, "holder.name=a&holder.ttl_s=600&devices=00:06.0-0")
    waiters = []
    for number in range(2):
        waiters.append(
            queued(daemon, f"devices=00:06.0-0&holder.name=w{number}&holder.ttl_s=600", number + 1)
        )
        levers.set_clock(-3600)
    waiting = queued_requests(daemon)
    assert [one["name"] for one in waiting] == ["w0", "w1"]
    daemon.ask("DELETE", f"/v1/leases/{held['id']}")
    assert waiters[0].answer()[1]["name"] == "w0"
    for waiter in waiters:
        waiter.close()


def test_an_unfinished_lease_copy_is_not_a_second_lease(ready_daemon: Daemon) -> None:
    lease = take(ready_daemon, "holder.name=a&holder.ttl_s=600")
    copies = ready_daemon.host.root / "run/yunion-mps/leases"
    (copies / f"{lease['id']}.new").write_bytes((copies / lease["id"]).read_bytes())
    ready_daemon.kill()
    (ready_daemon.host.root / "var/lib/yunion-mps/state.db").write_bytes(b"torn" * 100)
    for end in ("-wal", "-shm"):
        (ready_daemon.host.root / f"var/lib/yunion-mps/state.db{end}").unlink(missing_ok=True)
    ready_daemon.start().wait_ready()
    assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
    assert ready_daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
    restart(ready_daemon)
    assert leased_addresses(ready_daemon) == []


@pytest.mark.gpus({"kind": "v100"}, {"kind": "a100"})
@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_request_waits_for_a_lost_gpu_and_gets_it_when_it_is_back(daemon: Daemon, scope: str) -> None:
    """Also over a reload and an end of all control daemons; they are not told that it is infeasible."""
    host = daemon.host
    daemon.configure(
        container_device_config_file="/etc/yunion/host_container_device.yml", cuda_mps_scope=scope
    )
    daemon.start().wait_ready()
    host.gpus[1].lose()
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    with contextlib.closing(
        Requester(daemon, "gpu=00:07.0&holder.name=a&holder.ttl_s=600&wait_s=120")
    ) as waiter:
        await_queue(daemon, 1)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        for domain in daemon.status()["domains"]:
            os.kill(domain["pid"], signal.SIGKILL)
        eventually(lambda: daemon.status()["domains"][0]["restarts"] == 1, "another control daemon")
        await_queue(daemon, 1)
        host.gpus[1].restore()
        assert daemon.ask("POST", "/v1/reload")[0] == 200
        status, lease = waiter.answer()
    assert (status, lease["gpus"]) == (201, ["00:07.0"])


def test_a_pid_of_another_pid_namespace_holds_no_lease(ready_daemon: Daemon) -> None:
    """PID 1 there is the caller, and here the first process of this machine, which never ends."""
    script = (
        "from yunion_mps.http.client import DaemonClient as Client\n"
        "from yunion_mps.http.operations import TAKE_LEASE\n"
        "from yunion_mps.core.paths import Paths\n"
        "Client(Paths.from_environment()).call(TAKE_LEASE, holder={'pid': 1})"
    )
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = ready_daemon.host.run([*inside, sys.executable, "-c", script])
    assert "NotFoundError: PID 1 belongs to the caller's PID namespace, not the daemon's" in done.stderr
    assert leased_addresses(ready_daemon) == []
