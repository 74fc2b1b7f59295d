"""Whose a lease is, who else may change it, how many an owner may have, and who binds it to a container."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from yunion_mps.core.reasons import NOT_ALLOWED

from control_groups import ControlGroup, unique_name
from integration.daemon_host import Daemon, eventually
from integration.lease_host import (
    STRANGER,
    Connection,
    leased_addresses,
    leases_of,
    needs_root,
    restart,
    stranger,
    take,
)
from packages.machine import systemd_hierarchies
from request_bodies import request_body
from simhost.host import Closes

pytestmark = [needs_root, pytest.mark.gpus({"kind": "v100"})]

#: Puts itself into control groups, becomes another user, and asks the daemon, by a connection that it, or a
#: child that ends before, has opened.
_ASK = """
import http.client, os, socket, sys
path, method, target, body, uid, connects, *groups = sys.argv[1:]
for group in groups:
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
os.setuid(int(uid))
if connects == "child" and (child := os.fork()):
    os.waitpid(child, 0)
else:
    connection.sock.connect(path)
    connects == "child" and os._exit(0)
connection.request(method, target, body, {"Content-Type": "application/json"} if body else {})
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""


class Job(Closes):
    """A job's unit, as systemd makes its control groups; all jobs are of one user. A context manager."""

    def __init__(self, daemon: Daemon, unit: str) -> None:
        self._daemon = daemon
        self._top = ControlGroup(unique_name(), systemd_hierarchies()).make()
        self.group = self._top.below("system.slice").below(unit)

    def ask(self, method: str, target: str, words: str = "", connects: str = "self") -> tuple[int, Any]:
        path, groups = str(self._daemon.socket_path), map(str, self.group.folders)
        body = request_body(words)[0].decode() if words else ""
        asked = [path, method, target, body, str(STRANGER), connects]
        command = [sys.executable, "-IS", "-c", _ASK, *asked, *groups]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        status, _, body = done.stdout.partition(" ")
        return int(status), json.loads(body)

    def close(self) -> None:
        self._top.close()


@pytest.fixture
def jobs(ready_daemon: Daemon) -> Iterator[tuple[Job, Job, Job]]:
    ready_daemon.socket_path.chmod(0o666)
    units = ("yunion-mps-job@train.service", "yunion-mps-job@test.service", "other.service")
    with contextlib.ExitStack() as stack:
        found = []
        for unit in units:
            found.append(stack.enter_context(Job(ready_daemon, unit)))
        yield found[0], found[1], found[2]


def test_a_name_given_by_root_never_finds_another_user_s_lease(ready_daemon: Daemon) -> None:
    with stranger(ready_daemon) as other:
        _, theirs = other.ask("POST", "/v1/leases", "holder.name=job&holder.ttl_s=600")
    ours = take(ready_daemon, "holder.name=job&holder.ttl_s=600")
    assert ready_daemon.ask("DELETE", "/v1/leases/job")[1]["id"] == ours["id"]
    assert ready_daemon.ask("POST", "/v1/leases/job/renew")[0] == 404
    assert ready_daemon.ask("DELETE", "/v1/leases/job")[0] == 404
    assert leased_addresses(ready_daemon) == theirs["devices"]
    assert ready_daemon.ask("DELETE", f"/v1/leases/{theirs['id'][:8]}")[0] == 200


def test_a_job_s_lease_is_its_unit_s(ready_daemon: Daemon, jobs: tuple[Job, Job, Job]) -> None:
    train, test, other = jobs
    _, lease = train.ask("POST", "/v1/leases", "holder.name=model&holder.ttl_s=600")
    for job in (test, other):
        status, answer = job.ask("DELETE", f"/v1/leases/{lease['id']}")
        assert (status, answer["detail"]) == (
            403,
            "the lease of 00:06.0-0 belongs to yunion-mps-job@train.service",
        )
        assert job.ask("POST", f"/v1/leases/{lease['id']}/renew")[0] == 403
        assert job.ask("DELETE", "/v1/leases/model")[0] == 404
    assert test.ask("POST", "/v1/leases", "holder.name=model&holder.ttl_s=600")[0] == 201, (
        "its name is its own, too"
    )
    restart(ready_daemon)
    ready_daemon.socket_path.chmod(0o666)
    assert test.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 403
    assert train.ask("POST", "/v1/leases/model/renew")[1]["id"] == lease["id"]
    assert train.ask("DELETE", "/v1/leases/model")[1]["id"] == lease["id"]
    _, again = train.ask("POST", "/v1/leases", "holder.name=model&holder.ttl_s=600")
    assert ready_daemon.ask("DELETE", f"/v1/leases/{again['id']}")[0] == 200, "root may"


def test_a_job_process_s_lease_is_its_unit_s_whichever_user_took_it(
    ready_daemon: Daemon, jobs: tuple[Job, Job, Job]
) -> None:
    train, test, other = jobs
    with subprocess.Popen(["sleep", "300"], user=STRANGER) as process, contextlib.ExitStack() as end:
        end.callback(process.kill)
        train.group.add(process.pid)
        lease = take(ready_daemon, f"holder.pid={process.pid}")
        assert test.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 403
        bind = f"/v1/leases/{lease['id']}/bind", f"pid={process.pid}"
        assert test.ask("POST", *bind)[0] == 403, "another job would end it with a process of its own"
        engine = other.ask("POST", *bind)
        assert (engine[0], engine[1]["binding"]) == (200, "container"), "an engine may have left the unit"
        assert other.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 403
        assert train.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200


def test_no_job_passes_for_another_by_a_process_that_ended(
    ready_daemon: Daemon, jobs: tuple[Job, Job, Job]
) -> None:
    train, test, _ = jobs
    with subprocess.Popen(["sleep", "300"], user=STRANGER) as process, contextlib.ExitStack() as end:
        end.callback(process.kill)
        train.group.add(process.pid)
        lease, own = take(ready_daemon, f"holder.pid={process.pid}"), f"holder.pid={process.pid}"
        for method, target, words in (
            ("DELETE", f"/v1/leases/{lease['id']}", ""),
            ("POST", f"/v1/leases/{lease['id']}/bind", f"pid={process.pid}"),
            ("POST", "/v1/leases", own),
        ):
            assert test.ask(method, target, words, "child")[0] == 403, target
        status, answer = test.ask("POST", "/v1/leases", own)
        assert (status, answer["detail"]) == (403, f"PID {process.pid} belongs to another systemd unit")
        assert leased_addresses(ready_daemon) == lease["devices"]


def test_a_reload_sets_how_many_leases_and_how_long_ones_are_allowed(daemon: Daemon) -> None:
    daemon.start().wait_ready()
    month_s = 30 * 86_400
    take(daemon, f"holder.name=a&holder.ttl_s={month_s}")
    daemon.configure(max_lease_ttl_s=60, max_leases_per_user=1)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    status, answer = daemon.ask("POST", "/v1/leases", "holder.name=b&holder.ttl_s=61")
    what = "a time to live of 61s exceeds the limit of 1m"
    assert (status, answer["detail"], answer["code"]) == (403, what, "not_allowed")
    take(daemon, "holder.name=b&holder.ttl_s=60")
    with stranger(daemon) as other:
        assert other.ask("POST", "/v1/leases", "holder.name=a&holder.ttl_s=60")[0] == 201
        status, answer = other.ask("POST", "/v1/leases", "holder.name=b&holder.ttl_s=60&wait_s=60")
        what = "nobody already has 1 leases and queued requests; max_leases_per_user is 1"
        assert (status, answer["detail"]) == (403, what)


@pytest.fixture
def inside() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a container's first one."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def test_it_ends_with_that_process_and_with_nothing_else_that_had_it(
    ready_daemon: Daemon, inside: subprocess.Popen[bytes]
) -> None:
    connection = Connection(ready_daemon)
    lease = take(connection, "holder.kind=connection")
    status, bound = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={inside.pid}")
    assert (status, bound["binding"], bound["pid"]) == (200, "container", inside.pid)
    connection.close()
    ready_daemon.get("/v1/status")
    restart(ready_daemon)
    (known,) = leases_of(ready_daemon)
    assert (known["id"], known["binding"], known["pid"]) == (lease["id"], "container", inside.pid)
    status, again = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={inside.pid}")
    assert (status, again["id"]) == (200, lease["id"]), "as a hook asks whose first answer was lost"
    status, refused = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={os.getpid()}")
    assert (status, refused["detail"], refused["hint"]) == (
        409,
        f"the lease of {lease['devices'][0]} already belongs to a container (PID {inside.pid})",
        "take another lease: yunion-mps run --podman",
    )
    inside.kill()
    inside.wait()
    eventually(lambda: leased_addresses(ready_daemon) == [], "the end of the lease")


def test_binding_to_a_container_leaves_a_named_lease_named(
    ready_daemon: Daemon, inside: subprocess.Popen[bytes]
) -> None:
    lease = take(ready_daemon, "holder.name=job-17&holder.ttl_s=600")
    assert lease["cdi"] == f"yunion.io/mps={lease['id']}"
    status, bound = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={inside.pid}")
    assert (status, bound["binding"], bound["pid"]) == (200, "name", None)
    (event, *_) = reversed(ready_daemon.get("/v1/events")[1]["events"])
    assert event["what"].startswith("used by ")
    inside.kill()
    inside.wait()
    assert leased_addresses(ready_daemon) == lease["devices"]


def test_it_cannot_pass_to_a_process_that_has_ended(ready_daemon: Daemon) -> None:
    _, lease = ready_daemon.ask("POST", "/v1/leases")
    assert lease["cdi"] is None
    with subprocess.Popen(["true"]) as gone:
        pass
    status, answer = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={gone.pid}")
    assert (status, answer["detail"]) == (404, f"there is no process with PID {gone.pid}")
    assert ready_daemon.ask("POST", "/v1/leases/nothing/bind", f"pid={os.getpid()}")[0] == 404
    assert leased_addresses(ready_daemon) == lease["devices"], "as before"


def test_only_owner_and_root_bind_it_and_only_to_their_own_process(
    ready_daemon: Daemon, inside: subprocess.Popen[bytes]
) -> None:
    _, ours = ready_daemon.ask("POST", "/v1/leases", "holder.name=ours&holder.ttl_s=600")
    with stranger(ready_daemon) as other:
        _, theirs = other.ask("POST", "/v1/leases", "holder.name=theirs&holder.ttl_s=600")
        status, answer = other.ask("POST", f"/v1/leases/{theirs['id']}/bind", f"pid={inside.pid}")
        assert (status, answer["detail"]) == (403, f"PID {inside.pid} belongs to another user")
        with subprocess.Popen(["sleep", "300"], user=STRANGER) as own:
            status, answer = other.ask("POST", f"/v1/leases/{ours['id']}/bind", f"pid={own.pid}")
            own.kill()
        assert (status, answer["code"]) == (403, NOT_ALLOWED)


def test_its_owner_does_not_change_with_the_container_s_user(ready_daemon: Daemon) -> None:
    """Else a user of whose id a container of root's makes use could end its lease, and take its device."""
    with subprocess.Popen(["sleep", "300"], user=STRANGER) as inside, contextlib.ExitStack() as end:
        end.callback(inside.kill)
        _, ours = ready_daemon.ask("POST", "/v1/leases")
        status, bound = ready_daemon.ask("POST", f"/v1/leases/{ours['id']}/bind", f"pid={inside.pid}")
        assert (status, bound["pid"], bound["uid"]) == (200, inside.pid, 0)
        status, taken = ready_daemon.ask(
            "POST", "/v1/leases", f"holder.kind=container&holder.pid={inside.pid}"
        )
        assert (status, taken["pid"], taken["uid"]) == (201, inside.pid, 0)
        with stranger(ready_daemon) as other:
            for one in (bound, taken):
                assert other.ask("DELETE", f"/v1/leases/{one['id']}")[0] == 403
            status, theirs = other.ask("POST", "/v1/leases", "holder.name=theirs&holder.ttl_s=600")
            assert (status, theirs["uid"]) == (201, STRANGER)
