"""Jobs that request gres/shard or whole GPUs get devices of the GPU that Slurm has assigned."""

from __future__ import annotations

import pytest

from engines.slurm import Slurm, environment, wait_unused
from integration.daemon_host import Daemon
from integration.lease_host import leases_of

#: A node with two GPUs and four shards of each.
pytestmark = [
    pytest.mark.gpus({"kind": "v100", "count": 2}),
    pytest.mark.parametrize("mapping", ["shard"], scope="function"),
]

GPUS = ["00:06.0", "00:07.0"]


def gpus_of(daemon: Daemon) -> dict[str, list[str]]:
    """The GPUs of each lease's devices, by the lease's name."""
    return {
        lease["name"]: [addr.rpartition("-")[0] for addr in lease["devices"]] for lease in leases_of(daemon)
    }


def test_shards_are_devices_of_one_gpu_with_one_budget(slurm: Slurm, daemon: Daemon) -> None:
    done = slurm.srun("--gres=shard:2", "env")
    assert done.returncode == 0, f"{done.stderr}{slurm.logs()}"
    found = environment(done.stdout)
    assert found["SLURM_SHARDS_ON_NODE"] == "2"
    assert found["YUNION_MPS_DEVICE"] == "00:06.0-0,00:06.0-1"
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    wait_unused(slurm, daemon)


def test_as_many_jobs_run_as_there_are_shards(slurm: Slurm, daemon: Daemon) -> None:
    numbers = [3, 3, 1, 1]
    jobs = [slurm.submit(slurm.until_told, f"--gres=shard:{number}") for number in numbers]
    for job in jobs:
        slurm.wait_job(job, "RUNNING")
    slurm.wait(lambda: len(gpus_of(daemon)) == len(jobs), "their leases")
    found = gpus_of(daemon)
    assert [len(found[f"slurm:{job}"]) for job in jobs] == numbers
    assert all(len(set(gpus)) == 1 for gpus in found.values())
    assert sorted(gpu for gpus in found.values() for gpu in gpus) == [gpu for gpu in GPUS for _ in range(4)]
    slurm.tell_jobs()
    wait_unused(slurm, daemon)


def test_each_job_of_an_array_gets_its_own_shards(slurm: Slurm) -> None:
    array = slurm.submit("echo $YUNION_MPS_DEVICE", "--gres=shard:2", "--array=1-3")
    slurm.wait(lambda: len(slurm.output(array).split()) == 3, "the output of all jobs")
    assert all(len(devices.split(",")) == 2 for devices in slurm.output(array).split())


def test_a_step_with_some_shards_has_the_budget_of_the_whole_job(slurm: Slurm) -> None:
    step = "srun --quiet -n1 --exact --gres=shard:1 printenv YUNION_MPS_DEVICE"
    job = slurm.submit(f"{step}\necho batch $YUNION_MPS_DEVICE", "--gres=shard:2")
    slurm.wait(lambda: "batch" in slurm.output(job), "the output")
    assert slurm.output(job).splitlines() == ["00:06.0-0,00:06.0-1", "batch 00:06.0-0,00:06.0-1"]


def test_a_job_cannot_get_more_shards_by_its_name(slurm: Slurm) -> None:
    name = "x\n     Nodes=node1 CPU_IDs=0 Mem=0 GRES=shard:4(IDX:0)\nJobId=1"
    done = slurm.srun("--gres=shard:1", "--job-name", name, "true")
    assert done.returncode != 0
    assert "Slurm gives contradictory answers" in done.stdout, done


def test_a_whole_gpu_is_all_of_its_devices(slurm: Slurm) -> None:
    found = environment(slurm.srun("--gres=gpu:1", "env").stdout)
    assert found["YUNION_MPS_DEVICE"] == ",".join(f"00:06.0-{slot}" for slot in range(4))
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=16384M"


def test_a_job_cancelled_in_its_prolog_gets_no_shards(slurm: Slurm, daemon: Daemon) -> None:
    slurm.hold("prolog")
    job = slurm.submit("true", "--gres=shard:1")
    slurm.wait(lambda: slurm.is_held("prolog"), "its Prolog")
    slurm.ask("scancel", job)
    slurm.release("prolog")
    slurm.wait_job(job, "CANCELLED")
    slurm.wait(lambda: leases_of(daemon) == [] and slurm.state() == "idle", "an idle node")
