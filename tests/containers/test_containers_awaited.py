"""Leases for containers that are about to start: what takes them knows no process yet, but gives a name."""

from __future__ import annotations

import pytest

from containers.image import IMAGE
from containers.podman_host import Podman, mps
from integration.cdi_files import files_of
from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leases_of, needs_root, restart, stranger, take

pytestmark = pytest.mark.gpus({"kind": "v100"})

REQUEST = f"holder.kind=container&holder.name=k8s-17&devices={ADDRESSES[1]}&cdi=true"


def test_the_hook_binds_it_once_to_the_container_of_its_name(ready_daemon: Daemon, podman: Podman) -> None:
    lease = take(ready_daemon, REQUEST)
    assert (lease["binding"], lease["name"], lease["pid"]) == ("container", "k8s-17", None)
    assert (lease["cdi"], lease["expires"]) == ("yunion.io/mps=k8s-17", None)
    podman.good("run", "--detach", "--name", "trainer", *mps("k8s-17"), IMAGE, "sleep", "600")
    (bound,) = leases_of(ready_daemon)
    assert (bound["id"], bound["pid"]) == (lease["id"], podman.pid_of("trainer"))
    assert (bound["name"], bound["container"]) == ("k8s-17", "trainer")
    assert take(ready_daemon, REQUEST)["pid"] == bound["pid"]
    second = podman.run(*mps("k8s-17"), IMAGE, "true")
    assert "already belongs to a container" in second.stderr
    assert "kubectl describe pod" in second.stderr, "the pod's owner cannot take another lease"
    podman.good("kill", "trainer")
    eventually(lambda: not leases_of(ready_daemon), "the end of the lease")
    assert f"yunion-mps-lease-{lease['id']}.json" not in files_of(ready_daemon.host)
    assert take(ready_daemon, REQUEST)["id"] != lease["id"]


def test_it_waits_for_its_container_across_restarts_of_the_daemon(
    ready_daemon: Daemon, podman: Podman
) -> None:
    lease = take(ready_daemon, REQUEST)
    restart(ready_daemon)
    assert [one["id"] for one in leases_of(ready_daemon)] == [lease["id"]]
    assert (
        podman.good("run", "--rm", *mps("k8s-17"), IMAGE, "sh", "-c", "echo $YUNION_MPS_LEASE") == lease["id"]
    )
    eventually(lambda: not leases_of(ready_daemon), "the end of the lease")


def test_the_same_request_gets_it_while_the_device_is_served(ready_daemon: Daemon) -> None:
    lease = take(ready_daemon, REQUEST)
    assert ready_daemon.ask("POST", "/v1/leases", REQUEST)[1]["id"] == lease["id"]
    status, other = ready_daemon.ask("POST", "/v1/leases", REQUEST.replace("17", "18"))
    assert (status, other["code"]) == (423, "nothing_free")
    ready_daemon.host.gpus[0].lose()
    ready_daemon.polls()

    def refusal() -> dict[str, str]:
        status, answer = ready_daemon.ask("POST", "/v1/leases", REQUEST)
        return dict(answer) if status == 409 else {}

    refused = eventually(refusal, "the refusal")
    assert refused["detail"].startswith(f"device {ADDRESSES[1]} is unavailable: ")
    assert ready_daemon.ask("DELETE", "/v1/leases/k8s-17")[0] == 200
    assert leases_of(ready_daemon) == []


@needs_root
def test_only_root_may_take_it(ready_daemon: Daemon) -> None:
    with stranger(ready_daemon) as connection:
        status, answer = connection.ask("POST", "/v1/leases", REQUEST)
    assert (status, answer["code"]) == (403, "not_allowed")
    assert leases_of(ready_daemon) == []
