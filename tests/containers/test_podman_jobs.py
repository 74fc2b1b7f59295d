"""Containers of podman whose jobs are clients of MPS; the clients and their MPS servers are stand-ins."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from containers.conftest import MakePodman, MakePodmanAtWork
from containers.image import IMAGE
from containers.podman_host import mps
from integration.cdi_files import spec_of
from integration.daemon_host import Daemon, eventually, is_running
from integration.device_nodes import publish_nodes
from integration.lease_host import leased_addresses, leases_of, take
from integration.mps_jobs import JOB, STUBBORN_JOB, end_of, started_job, terminations_of
from integration.test_job_budgets import termination
from integration.test_leases_combined import SHARE, UNENFORCED, WHOLE, instances
from integration.test_safe_stop import DISCONNECTED, KILLED
from simhost.mps import CLIENT

__all__ = ["instances"]

pytestmark = pytest.mark.processes

LEASE = "YUNION_MPS_LEASE"


def job_in_container(*words: str, job: Sequence[str] = STUBBORN_JOB) -> list[str]:
    """What follows `podman run`: options, image and command of a client, with our own Python."""
    folders = {"/usr", "/lib", "/lib64", sys.base_prefix, str(CLIENT.parent)}
    mounts = [f"--volume={folder}:{folder}:ro" for folder in sorted(folders) if Path(folder).exists()]
    return [*words, *mounts, IMAGE, *inside_container(job)]


def inside_container(job: Sequence[str]) -> list[str]:
    """The job, as it is named in such a container."""
    return [os.path.realpath(job[0]), *job[1:]]


@pytest.mark.parametrize("names", [("CUDA_MPS_PIPE_DIRECTORY",), ("CUDA_MPS_PIPE_DIRECTORY", LEASE)])
def test_a_container_over_its_budget_loses_its_newest_process_only(
    make_podman_at_work: MakePodmanAtWork, names: Sequence[str]
) -> None:
    """It is one job, whether or not a process that is started in it later knows the lease."""
    (daemon, _, neighbour), podman = make_podman_at_work(over_budget="terminate", over_budget_grace_s=1)
    host, gpu = daemon.host, daemon.host.gpus[0]
    run = ["yunion-mps", "run", "--podman", "--", *job_in_container("--name", "trainer")]
    with started_job(host, *run):
        (lease,) = leases_of(daemon)
        budget_mib, old = lease["budgets"][0]["memory_mib"], podman.pid_of("trainer")
        gpu.add_process(neighbour.pid, 4 * budget_mib, "M+C")
        gpu.add_process(old, budget_mib, "M+C")
        variables = [f"--env={name}={lease['environment'][name]}" for name in names]
        with started_job(host, "podman", "exec", *variables, "trainer", *inside_container(JOB)) as newest:
            inside = [one for one in daemon.get("/v1/clients")[1]["clients"] if one["container"] == "trainer"]
            (pid,) = (one["pid"] for one in inside if one["pid"] != old)
            gpu.add_process(pid, 512, "M+C")
            eventually(lambda: daemon.polls() and not is_running(pid), "its end")
            gpu.remove_process(pid)
            line = end_of(newest)[2].splitlines()[0]
        used = f"the processes of lease {lease['id'][:8]} together use {budget_mib + 512} of {budget_mib} MiB"
        assert line.startswith(f"yunion-mps: terminating PID {pid} because {used} ({lease['devices'][0]})")
        event = termination(daemon, gpu.uuid)
        assert f"(PID {pid})" in event["what"]
        assert event["what"].endswith(": its MPS server disconnected it; ended by SIGTERM")
        assert event["cause"].startswith(used)
        for _ in range(3):
            daemon.polls()
        assert (is_running(old), is_running(neighbour.pid)) == (True, True)


@pytest.mark.parametrize("is_dead", [False, True], ids=["", "without the daemon"])
def test_clients_in_a_container_are_disconnected_before_it_is_killed(
    make_podman_at_work: MakePodmanAtWork, is_dead: bool
) -> None:
    (daemon, *_), podman = make_podman_at_work()
    run = ["yunion-mps", "run", "--podman", "--safe-stop=0s", "--", *job_in_container("--name", "trainer")]
    with started_job(daemon.host, *run) as job:
        if is_dead:
            daemon.kill()
        job.terminate()
        status, _, err = end_of(job)
    assert status == KILLED, err
    state = podman.good("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", "trainer")
    assert state == f"exited {KILLED}"
    if not is_dead:
        assert terminations_of(daemon) == [DISCONNECTED]
        eventually(lambda: leased_addresses(daemon) == [], "the end of the lease")


def test_a_container_with_an_instance_and_a_share_starts_with_a_log_line(
    instances: Daemon, make_podman: MakePodman
) -> None:
    publish_nodes(instances)
    eventually(lambda: spec_of(instances.host), "the file of the devices")
    podman = make_podman(instances.host)
    both = f"devices={WHOLE},{SHARE}&allow_unlimited=true"
    lease = take(instances, f"{both}&holder.name=job&holder.ttl_s=600&cdi=true")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.settimeout(60)
        log.bind(str(instances.host.root / "dev/log"))
        started = podman.good("run", "--rm", *mps(lease["id"]), IMAGE, "sh", "-c", "echo $YUNION_MPS_DEVICE")
        told = log.recv(4096).decode()
    assert started == f"{WHOLE},{SHARE}"
    assert told.endswith(f": {lease['id']}: budgets are not enforced on {UNENFORCED}")
