"""Jobs with devices of several GPUs, of several users, and on several nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engines.slurm import Slurm, environment, wait_unused
from integration.conftest import MakeDaemon, MakeHost
from integration.daemon_host import Daemon
from integration.lease_host import ADDRESSES

SHARE = "--gres=gpu:mps:1"
V100 = {"kind": "v100"}


@pytest.mark.gpus({**V100, "count": 2})
def test_a_job_with_devices_on_two_gpus_has_a_budget_on_each(slurm: Slurm, daemon: Daemon) -> None:
    daemon.configure(cuda_mps_combine=4)
    assert daemon.ask("POST", "/v1/reload")[0] == 200
    done = slurm.srun("--gres=gpu:mps:6", "env")
    assert done.returncode == 0, f"{done.stderr}{slurm.logs()}"
    found = environment(done.stdout)
    assert found["YUNION_MPS_DEVICE"] == ",".join([*ADDRESSES, "00:07.0-0", "00:07.0-1"])
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=16384M,1=8192M"
    wait_unused(slurm, daemon)


@pytest.fixture
def daemons(make_host: MakeHost, make_daemon: MakeDaemon) -> list[Daemon]:
    return [make_daemon(make_host([V100])).start().wait_ready() for _ in range(2)]


@pytest.fixture
def cluster(daemons: list[Daemon], version: str, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """Two nodes with a daemon each; the parameter is an option of gres-conf."""
    with Slurm(daemons[0].host, version, daemons[1].host) as slurm:
        yield slurm.install(*getattr(request, "param", ())).start()


@pytest.mark.parametrize(
    ("cluster", "gres"),
    [((), SHARE), (("--shards",), "--gres=shard:1")],
    ids=["mps", "shard"],
    indirect=["cluster"],
)
def test_a_job_on_two_nodes_has_a_device_on_each(cluster: Slurm, daemons: list[Daemon], gres: str) -> None:
    done = cluster.srun("-N2", gres, "printenv", "CUDA_MPS_PIPE_DIRECTORY")
    assert done.returncode == 0, f"{done.stderr}{cluster.logs()}"
    assert sorted(done.stdout.split()) == sorted(str(daemon.pipe_directory) for daemon in daemons)
    wait_unused(cluster, *daemons)


def test_each_component_of_a_heterogeneous_job_has_a_device(cluster: Slurm, daemons: list[Daemon]) -> None:
    show = ["printenv", "CUDA_MPS_PIPE_DIRECTORY"]
    done = cluster.srun(SHARE, *show, ":", SHARE, *show)
    assert done.returncode == 0, f"{done.stderr}{cluster.logs()}"
    assert sorted(done.stdout.split()) == sorted(str(daemon.pipe_directory) for daemon in daemons)
    step = f"srun --quiet --het-group=1 {' '.join(show)}\necho end"
    job = cluster.submit(f"#SBATCH {SHARE}\n#SBATCH hetjob\n#SBATCH {SHARE}\n{step}")
    cluster.wait(lambda: "end" in cluster.output(job), "the output")
    assert cluster.output(job).split() in ([str(daemon.pipe_directory), "end"] for daemon in daemons)
    wait_unused(cluster, *daemons)


def test_each_task_of_a_heterogeneous_job_has_a_device(cluster: Slurm, daemons: list[Daemon]) -> None:
    """The tasks of all components have the id of the first, and Slurm 22.05 tells them of no device."""
    for daemon in daemons:
        daemon.configure(cuda_mps_combine=2)
        assert daemon.ask("POST", "/v1/reload")[0] == 200
    words = ["--gpus-per-task=mps:1", "-n2", "printenv", "CUDA_MPS_PIPE_DIRECTORY"]
    done = cluster.srun(*words, ":", *words)
    assert done.returncode == 0, f"{done}{cluster.logs()}"
    assert sorted(done.stdout.split()) == sorted([str(daemon.pipe_directory) for daemon in daemons] * 2)


def test_a_node_at_fault_leaves_the_other_to_the_jobs(cluster: Slurm, daemons: list[Daemon]) -> None:
    daemons[0].stop()
    cluster.check_health()
    assert cluster.state() == "drained"
    jobs = [cluster.submit("echo $CUDA_MPS_PIPE_DIRECTORY", SHARE) for _ in range(5)]
    for job in jobs:
        cluster.wait_job(job, "COMPLETED")
    cluster.wait(lambda: all(map(cluster.output, jobs)), "their output")
    assert {cluster.output(job).strip() for job in jobs} == {str(daemons[1].pipe_directory)}
    assert not cluster.state("node2").startswith("drain")
