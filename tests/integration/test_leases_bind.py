"""A lease that passes to a container's first process: by whom, to whom, and what ends it then."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from integration.daemon_host import Daemon, eventually
from integration.lease_host import STRANGER, Connection, given, leases_of, needs_root, restart, stranger, take

pytestmark = pytest.mark.gpus({"kind": "v100"})


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
    assert (status, refused["detail"]) == (
        409,
        f"the lease of {lease['devices'][0]} already belongs to a container (PID {inside.pid})",
    )
    inside.kill()
    inside.wait()
    eventually(lambda: given(ready_daemon) == [], "the end of the lease")


def test_one_of_a_name_stays_its_name_s(ready_daemon: Daemon, inside: subprocess.Popen[bytes]) -> None:
    lease = take(ready_daemon, "holder.name=job-17&holder.ttl_s=600")
    assert lease["cdi"] == f"yunion.io/mps={lease['id']}"
    status, bound = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={inside.pid}")
    assert (status, bound["binding"], bound["pid"]) == (200, "name", None)
    inside.kill()
    inside.wait()
    assert given(ready_daemon) == lease["devices"]


def test_it_cannot_pass_to_a_process_that_has_ended(ready_daemon: Daemon) -> None:
    _, lease = ready_daemon.ask("POST", "/v1/leases")
    assert lease["cdi"] is None
    with subprocess.Popen(["true"]) as gone:
        pass
    status, answer = ready_daemon.ask("POST", f"/v1/leases/{lease['id']}/bind", f"pid={gone.pid}")
    assert (status, answer["detail"]) == (404, f"there is no process with PID {gone.pid}")
    assert ready_daemon.ask("POST", "/v1/leases/nothing/bind", f"pid={os.getpid()}")[0] == 404
    assert given(ready_daemon) == lease["devices"], "as before"


@needs_root
def test_only_owner_and_root_bind_it_and_only_to_their_own_process(
    ready_daemon: Daemon, inside: subprocess.Popen[bytes]
) -> None:
    _, ours = ready_daemon.ask("POST", "/v1/leases")
    with stranger(ready_daemon) as nobody:
        _, theirs = nobody.ask("POST", "/v1/leases", "holder.name=theirs&holder.ttl_s=600")
        status, answer = nobody.ask("POST", f"/v1/leases/{theirs['id']}/bind", f"pid={inside.pid}")
        assert (status, answer["detail"]) == (403, f"PID {inside.pid} belongs to another user")
        with subprocess.Popen(["sleep", "300"], user=STRANGER) as own:
            status, answer = nobody.ask("POST", f"/v1/leases/{ours['id']}/bind", f"pid={own.pid}")
            own.kill()
        assert (status, answer["hint"]) == (403, "only root and its owner may end or renew it")


@needs_root
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
        with stranger(ready_daemon) as nobody:
            for one in (bound, taken):
                assert nobody.ask("DELETE", f"/v1/leases/{one['id']}")[0] == 403
            status, theirs = nobody.ask("POST", "/v1/leases", "holder.name=theirs&holder.ttl_s=600")
            assert (status, theirs["uid"]) == (201, STRANGER)
