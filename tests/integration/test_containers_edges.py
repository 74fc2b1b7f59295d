"""Containers where somebody looks closely: GPUs that are lost or too old, jobs that start them, new names."""

from __future__ import annotations

import re
import shutil
import socket

import pytest

from integration.conftest import MakeDaemon, MakeHost, MakePodman
from integration.daemon_host import Daemon, eventually
from integration.podman_host import IMAGE, Podman, mps, spec_of
from integration.test_leases import ADDRESSES, ask, given
from simhost import SimHost


@pytest.fixture
def host(make_host: MakeHost) -> SimHost:
    """A GPU whose budgets are enforced, divided by four."""
    return make_host([{"kind": "v100"}])


@pytest.mark.parametrize("scope", ["host", "gpu"])
def test_a_device_of_a_lost_gpu_is_refused_with_the_reason_also_after_a_restart(
    make_host: MakeHost, make_daemon: MakeDaemon, make_podman: MakePodman, scope: str
) -> None:
    """A restart is as after a reboot: the GPU's pipe directory is gone."""
    host = make_host([{"kind": "v100", "count": 2}])
    daemon = make_daemon(host)
    daemon.configure(cuda_mps_scope=scope)
    daemon.start().wait_ready()
    assert daemon.stop() == 0, daemon.log
    shutil.rmtree(daemon.pipe_directory)
    host.gpus[1].lose()
    daemon.start().wait_ready()
    names = ("00:07.0-1", ask(daemon, "GET", "/v1/devices/00:07.0-1")[1]["id"])
    eventually(lambda: spec_of(host), "the file of the devices")
    assert {one["name"] for one in spec_of(host)["devices"]} >= set(names)
    podman = make_podman(host)
    for name in names:
        refused = podman.run(*mps(name), IMAGE, "true")
        assert refused.returncode != 0
        why = "yunion-mps: device 00:07.0-1 cannot be had now: 1 unavailable ("
        assert why in refused.stderr
        assert "lost" in refused.stderr.rpartition(why)[2]
    podman.good("run", "--rm", *mps("00:06.0-1"), IMAGE, "id")
    assert daemon.get("/v1/leases")[1]["leases"] == []


def test_within_a_job_that_hands_on_its_environment_a_container_gets_its_own_device(
    ready_daemon: Daemon, podman: Podman
) -> None:
    host = ready_daemon.host
    inside = "echo $YUNION_MPS_DEVICE/$YUNION_MPS_LEASE"
    container = ["podman", "run", "--rm", "--env-host", *mps(ADDRESSES[3]), IMAGE, "sh", "-c", inside]
    done = host.run(["yunion-mps", "run", "--device", ADDRESSES[0], "--", *container])
    assert (done.returncode, done.stdout) == (0, f"{ADDRESSES[3]}/\n"), done.stderr
    own = ["podman", "run", "--rm", "--env-host", *mps(ADDRESSES[0]), IMAGE, "true"]
    refused = host.run(["yunion-mps", "run", "--device", ADDRESSES[0], "--", *own])
    assert f"device {ADDRESSES[0]} is taken: " in refused.stderr, "it is the job's"
    eventually(lambda: given(ready_daemon) == [], "that nothing is taken")


def test_on_a_gpu_that_enforces_no_budget_a_container_starts_and_the_log_tells_of_it(
    make_host: MakeHost, make_daemon: MakeDaemon, make_podman: MakePodman
) -> None:
    host = make_host()
    make_daemon(host).start().wait_ready()
    eventually(lambda: spec_of(host), "the file of the devices")
    podman = make_podman(host)
    place = host.root / "dev/log"
    place.parent.mkdir(exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.settimeout(60)
        log.bind(str(place))
        inside = "echo $YUNION_MPS_DEVICE"
        assert podman.good("run", "--rm", *mps(ADDRESSES[1]), IMAGE, "sh", "-c", inside) == ADDRESSES[1]
        told = log.recv(4096).decode()
    why = f"nothing holds it to the budget of {ADDRESSES[1]}: the GPU is older than Volta"
    assert re.fullmatch(rf"<12>yunion-mps\[\d+\]: container [0-9a-f]{{12}}: {why}", told)
    command = ["yunion-mps", "run", "--podman", "--", "--rm", IMAGE, "id"]
    refused = host.run(command)
    assert (refused.returncode, refused.stdout) == (1, ""), "whoever chooses, chooses one that limits"
    assert host.run([*command[:3], "--allow-unlimited", *command[3:]]).returncode == 0


def test_a_renamed_container_is_known_by_its_new_name(ready_daemon: Daemon, podman: Podman) -> None:
    host = ready_daemon.host
    (host.root / "var/lib/containers").mkdir(parents=True)
    (host.root / "var/lib/containers/storage").symlink_to(podman.storage)
    podman.good("run", "--detach", "--name", "trainer", *mps(ADDRESSES[1]), IMAGE, "sleep", "300")

    def name() -> str:
        (lease,) = ask(ready_daemon, "GET", "/v1/leases")[1]["leases"]
        return str(lease["container"])

    assert name() == "trainer"
    podman.good("rename", "trainer", "teacher")
    assert name() == "teacher"
    assert "teacher: sleep 300" in host.run(["yunion-mps", "who"]).stdout
