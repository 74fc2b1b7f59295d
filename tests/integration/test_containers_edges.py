"""Containers where somebody looks closely: GPUs that are lost or too old, jobs that start them, new names."""

from __future__ import annotations

import shutil

import pytest

from integration.conftest import MakeDaemon, MakeHost, MakePodman
from integration.daemon_host import Daemon, eventually
from integration.podman_host import IMAGE, Podman, mps, spec_of
from integration.test_leases import ADDRESSES, ask, given
from simhost import SimHost

ALLOWED = "YUNION_MPS_ALLOW_UNLIMITED"


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


def test_on_a_gpu_that_enforces_no_budget_a_container_says_that_it_knows(
    make_host: MakeHost, make_daemon: MakeDaemon, make_podman: MakePodman
) -> None:
    host = make_host()
    daemon = make_daemon(host).start().wait_ready()
    eventually(lambda: spec_of(host), "the file of the devices")
    podman = make_podman(host)
    refused = podman.run(*mps(ADDRESSES[1]), IMAGE, "true")
    assert refused.returncode != 0
    why = "no budget is enforced on GPU 00:06.0 (Tesla P40), which is older than Volta"
    assert f"yunion-mps: {why}" in refused.stderr
    assert f"for a container: -e {ALLOWED}=1)" in refused.stderr
    assert ask(daemon, "GET", "/v1/events?kind=lease")[1]["events"] == [], "no lease was taken for it"
    inside = "echo $YUNION_MPS_DEVICE"
    done = podman.run("-e", f"{ALLOWED}=1", *mps(ADDRESSES[1]), IMAGE, "sh", "-c", inside)
    assert done.stdout == f"{ADDRESSES[1]}\n", done.stderr
    assert podman.good("run", "--rm", *mps("all"), IMAGE, "id"), "who has all harms nobody"
    command = ["yunion-mps", "run", "--podman", "--allow-unlimited", "--", "--rm", IMAGE, "id"]
    assert host.run(command).returncode == 0, "it was said there"
    status, lease = ask(daemon, "POST", "/v1/leases?name=job-17&ttl=600")
    assert (status, lease["budget_enforced"]) == (200, False)
    assert podman.good("run", "--rm", *mps(lease["id"]), IMAGE, "id"), "who took it was told"


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
