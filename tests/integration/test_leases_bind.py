"""A lease that passes to a container's first process: by whom, to whom, and what ends it then."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from integration.daemon_host import Daemon, eventually
from integration.test_leases import _Connection, ask, given


@pytest.fixture
def inside() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a container's first one."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def test_it_ends_with_that_process_and_with_nothing_else_that_had_it(
    ready_daemon: Daemon, inside: subprocess.Popen[bytes]
) -> None:
    connection = _Connection(ready_daemon)
    status, lease = connection.ask("POST", "/v1/leases?binding=connection")
    assert status == 200
    status, bound = ask(ready_daemon, "POST", f"/v1/leases/{lease['id']}/bind?pid={inside.pid}")
    assert (status, bound["binding"], bound["pid"]) == (200, "container", inside.pid)
    connection.close()
    ready_daemon.get("/v1/status")
    ready_daemon.kill()
    ready_daemon.start().wait_ready()
    (known,) = ask(ready_daemon, "GET", "/v1/leases")[1]["leases"]
    assert (known["id"], known["binding"], known["pid"]) == (lease["id"], "container", inside.pid)
    status, again = ask(ready_daemon, "POST", f"/v1/leases/{lease['id']}/bind?pid={inside.pid}")
    assert (status, again["id"]) == (200, lease["id"]), "as a hook asks whose first answer was lost"
    status, refused = ask(ready_daemon, "POST", f"/v1/leases/{lease['id']}/bind?pid={os.getpid()}")
    assert (status, refused["detail"]) == (
        409,
        f"the lease of {lease['devices'][0]} is a container's already (PID {inside.pid})",
    )
    inside.kill()
    inside.wait()
    eventually(lambda: given(ready_daemon) == [], "the end of the lease")


def test_one_of_a_name_stays_its_name_s(ready_daemon: Daemon, inside: subprocess.Popen[bytes]) -> None:
    _, lease = ask(ready_daemon, "POST", "/v1/leases?name=job-17&ttl=600")
    assert lease["cdi"] == f"yunion.io/mps={lease['id']}"
    status, bound = ask(ready_daemon, "POST", f"/v1/leases/{lease['id']}/bind?pid={inside.pid}")
    assert (status, bound["binding"], bound["pid"]) == (200, "name", None)
    inside.kill()
    inside.wait()
    assert given(ready_daemon) == lease["devices"]


def test_it_cannot_pass_to_a_process_that_has_ended(ready_daemon: Daemon) -> None:
    _, lease = ask(ready_daemon, "POST", "/v1/leases")
    assert lease["cdi"] is None
    with subprocess.Popen(["true"]) as gone:
        pass
    status, answer = ask(ready_daemon, "POST", f"/v1/leases/{lease['id']}/bind?pid={gone.pid}")
    assert (status, answer["detail"]) == (404, f"there is no process with PID {gone.pid}")
    assert ask(ready_daemon, "POST", f"/v1/leases/nothing/bind?pid={os.getpid()}")[0] == 404
    assert given(ready_daemon) == lease["devices"], "as before"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_only_its_owner_and_root_pass_it_on_and_only_to_a_process_of_their_own(
    ready_daemon: Daemon, inside: subprocess.Popen[bytes]
) -> None:
    ready_daemon.socket_path.chmod(0o666)
    _, ours = ask(ready_daemon, "POST", "/v1/leases")
    with contextlib.closing(_Connection(ready_daemon)) as stranger:
        os.seteuid(65534)
        try:
            stranger.connect()
        finally:
            os.seteuid(0)
        _, theirs = stranger.ask("POST", "/v1/leases?name=theirs&ttl=600")
        status, answer = stranger.ask("POST", f"/v1/leases/{theirs['id']}/bind?pid={inside.pid}")
        assert (status, answer["detail"]) == (403, f"PID {inside.pid} is another user's")
        with subprocess.Popen(["sleep", "300"], user=65534) as own:
            status, answer = stranger.ask("POST", f"/v1/leases/{ours['id']}/bind?pid={own.pid}")
            own.kill()
        assert (status, answer["hint"]) == (403, "only root and its owner may end or renew it")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_it_stays_its_owner_s_whoever_runs_in_the_container(ready_daemon: Daemon) -> None:
    """Else a user of whose id a container of root's makes use could end its lease, and take its device."""
    ready_daemon.socket_path.chmod(0o666)
    with subprocess.Popen(["sleep", "300"], user=65534) as inside, contextlib.ExitStack() as end:
        end.callback(inside.kill)
        _, ours = ask(ready_daemon, "POST", "/v1/leases")
        status, bound = ask(ready_daemon, "POST", f"/v1/leases/{ours['id']}/bind?pid={inside.pid}")
        assert (status, bound["pid"], bound["uid"]) == (200, inside.pid, 0)
        status, taken = ask(ready_daemon, "POST", f"/v1/leases?binding=container&pid={inside.pid}")
        assert (status, taken["pid"], taken["uid"]) == (200, inside.pid, 0)
        with contextlib.closing(_Connection(ready_daemon)) as stranger:
            os.seteuid(65534)
            try:
                stranger.connect()
            finally:
                os.seteuid(0)
            for one in (bound, taken):
                assert stranger.ask("DELETE", f"/v1/leases/{one['id']}")[0] == 403
            status, theirs = stranger.ask("POST", "/v1/leases?name=theirs&ttl=600")
            assert (status, theirs["uid"]) == (200, 65534)
