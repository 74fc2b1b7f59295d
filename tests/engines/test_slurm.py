"""Jobs of a real Slurm get exactly the devices that Slurm has assigned, and leave none behind."""

from __future__ import annotations

import stat
import subprocess

import pytest
from yunion_mps.core.enums import DEVICE_VARIABLES

from engines.slurm import Slurm, environment, wait_unused
from integration.daemon_host import Daemon
from integration.lease_host import ADDRESSES, leased_addresses, leases_of

pytestmark = pytest.mark.gpus({"kind": "v100"})

SHARE = "--gres=gpu:mps:1"


def test_srun_gets_the_assigned_device_with_its_budget(slurm: Slurm, daemon: Daemon) -> None:
    done = slurm.srun(SHARE, "env")
    assert done.returncode == 0, f"{done.stderr}{slurm.logs()}"
    found = environment(done.stdout)
    expected = daemon.get("/v1/devices/00:06.0-0")[1]["client_environment"]
    assert {name: found[name] for name in expected} == expected
    assert found["YUNION_MPS_DEVICE"] == "00:06.0-0"
    libraries = f"LD_LIBRARY_PATH={daemon.env['LD_LIBRARY_PATH']}"
    assert found["CUDA_VISIBLE_DEVICES"] in slurm.srun(SHARE, "env", libraries, "nvidia-smi", "-L").stdout
    assert slurm.srun("printenv", "YUNION_MPS_DEVICE").returncode == 1  # a job without devices
    wait_unused(slurm, daemon)
    assert list((slurm.host.root / "run/yunion-mps/slurm").iterdir()) == []


def test_four_jobs_run_and_the_fifth_waits_for_a_device(slurm: Slurm, daemon: Daemon) -> None:
    script = f"echo $YUNION_MPS_DEVICE; {slurm.until_told}"
    jobs = [slurm.submit(script, SHARE) for _ in ADDRESSES]
    for job in jobs:
        slurm.wait_job(job, "RUNNING")
    slurm.wait(
        lambda: leased_addresses(daemon) == ADDRESSES, "the leases"
    )  # a batch job runs before its Prolog has ended
    slurm.wait(lambda: all(map(slurm.output, jobs)), "their output")
    assert {lease["name"] for lease in leases_of(daemon)} == {f"slurm:{job}" for job in jobs}
    fifth = slurm.submit("echo $YUNION_MPS_DEVICE", SHARE)
    assert slurm.job_state(fifth) == "PENDING"
    slurm.ask("scancel", jobs[2])
    slurm.wait_job(fifth, "COMPLETED")
    slurm.wait(lambda: slurm.output(fifth), "its output")
    assert slurm.output(fifth).split() == slurm.output(jobs[2]).split()[:1]
    slurm.tell_jobs()
    for job in jobs:
        slurm.wait_job(job, "COMPLETED", "CANCELLED")
    assert sorted(slurm.output(job).split()[0] for job in jobs) == ADDRESSES
    wait_unused(slurm, daemon)


def test_two_shares_are_one_budget_and_a_step_can_have_one_share(slurm: Slurm) -> None:
    show = (
        "sh -c 'echo $SLURM_STEP_GPUS $YUNION_MPS_DEVICE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT $YUNION_MPS_LEASE'"
    )
    steps = f"srun --quiet -n1 {show}\nsrun --quiet -n1 --exact {SHARE} {show}"
    job = slurm.submit(f"{steps}\necho batch $YUNION_MPS_DEVICE $YUNION_MPS_LEASE", "--gres=gpu:mps:2")
    slurm.wait_job(job, "COMPLETED")
    slurm.wait(lambda: "batch" in slurm.output(job), "the output")
    lease = slurm.output(job).split()[-1]
    assert slurm.output(job).splitlines() == [
        f"0,1 00:06.0-0,00:06.0-1 0=8192M {lease}",
        f"0 00:06.0-0 0=4096M {lease}",
        f"batch 00:06.0-0,00:06.0-1 {lease}",
    ]


@pytest.mark.parametrize("submitter", ["", "srun --quiet "], ids=["script", "step"])
def test_a_job_inherits_no_device_of_the_job_that_submits_it(slurm: Slurm, submitter: str) -> None:
    show = slurm.folder / "out/show"
    job = slurm.submit(
        f"echo '#!/bin/sh\nenv' > {show}; {submitter}sbatch -W --output={show}.%j {show}; echo end", SHARE
    )
    slurm.wait(lambda: "end" in slurm.output(job), "the output")
    (output,) = show.parent.glob("show.*")
    found = environment(output.read_text())
    assert {name for name in found if name in DEVICE_VARIABLES} == set()
    assert found["SLURM_JOB_ID"] != job
    slurm.wait_job(job, "COMPLETED")


def test_a_job_that_a_step_submits_has_all_of_its_devices(slurm: Slurm) -> None:
    """Its script inherits the indices of the step."""
    show = slurm.folder / "out/show"
    write = f"echo '#!/bin/sh\necho $SLURM_STEP_GPUS $YUNION_MPS_DEVICE' > {show}"
    submit = f"srun --quiet sbatch -W --gres=gpu:mps:2 --output={show}.txt {show}"
    job = slurm.submit(f"{write}; {submit}; echo end", SHARE)
    slurm.wait(lambda: "end" in slurm.output(job), "the output")
    assert show.with_suffix(".txt").read_text().split()[-1] == "00:06.0-1,00:06.0-2"
    slurm.wait_job(job, "COMPLETED")


def test_a_job_that_cannot_have_its_devices_fails_with_the_reason(slurm: Slurm, daemon: Daemon) -> None:
    done = slurm.srun("--gres=gpu:mps:3", "true")
    assert done.returncode != 0
    assert "yunion-mps: 3 devices cannot be combined into one budget" in done.stdout, done
    assert "set cuda_mps_combine: 3 in host.conf" in done.stdout
    slurm.wait(lambda: slurm.state() == "idle", "the node")
    assert leases_of(daemon) == []


@pytest.mark.parametrize("end", ["failure", "scancel", "time limit", "requeue"])
def test_a_device_is_released_however_its_job_ends(slurm: Slurm, daemon: Daemon, end: str) -> None:
    job = slurm.submit("exit 3" if end == "failure" else slurm.until_told, SHARE)
    if end != "failure":
        slurm.wait_job(job, "RUNNING")
        slurm.wait(lambda: leased_addresses(daemon) == ADDRESSES[:1], "the lease")
    if end == "time limit":
        slurm.end_by_time_limit(job)
    elif end != "failure":
        slurm.ask(*(("scancel", job) if end == "scancel" else ("scontrol", "requeue", job)))
    if end == "requeue":
        slurm.start_again(job)
        slurm.wait(lambda: leased_addresses(daemon) == ADDRESSES[:1], "another lease")
        slurm.ask("scancel", job)
    slurm.wait_job(job, "FAILED", "CANCELLED", "TIMEOUT")
    wait_unused(slurm, daemon)
    assert slurm.reason() == "none"


def test_each_task_of_an_array_has_a_device_of_its_own(slurm: Slurm, daemon: Daemon) -> None:
    script = f"echo $YUNION_MPS_DEVICE; {slurm.until_told}"
    array = slurm.submit(script, SHARE, "--array=1-6")
    slurm.wait(lambda: len(slurm.output(array).split()) == 4, "the output of the first tasks")
    assert sorted(slurm.output(array).split()) == leased_addresses(daemon) == ADDRESSES
    slurm.tell_jobs()
    slurm.wait(lambda: len(slurm.output(array).split()) == 6, "the output of all tasks")
    wait_unused(slurm, daemon)


def test_users_can_neither_change_nor_read_each_others_files(slurm: Slurm) -> None:
    job = slurm.submit(slurm.until_told, SHARE)
    slurm.wait_job(job, "RUNNING")
    path = slurm.host.root / f"run/yunion-mps/slurm/{job}.json"
    slurm.wait(path.exists, "the job's file")
    found = path.stat()
    assert (oct(found.st_mode & 0o777), found.st_uid, found.st_gid) == ("0o640", 0, 65534)
    assert slurm.run("sh", "-c", f"cat {path}").returncode == 0
    assert slurm.run("sh", "-c", f"cat {path}", user=1).returncode != 0
    assert slurm.run("rm", "-f", path).returncode != 0
    assert path.parent.stat().st_uid == 0


def test_beside_the_job_of_another_user_a_job_fails_with_the_reason(slurm: Slurm, daemon: Daemon) -> None:
    """Slurm knows only devices, not that MPS serves one user at a time. The node can run other jobs."""
    job = slurm.submit(slurm.until_told, SHARE)
    slurm.wait_job(job, "RUNNING")
    slurm.wait(lambda: leased_addresses(daemon) == ADDRESSES[:1], "the lease")
    done = slurm.srun(SHARE, "true", user=1)
    assert done.returncode != 0
    assert f"now nobody (lease slurm:{job} on 00:06.0-0, since " in done.stdout, done
    assert "ExclusiveUser=YES" in done.stdout
    assert slurm.reason() == "none"
    own = slurm.srun(SHARE, "printenv", "YUNION_MPS_DEVICE")
    assert own.stdout.strip() in ADDRESSES[1:]
    slurm.tell_jobs()
    slurm.wait_job(job, "COMPLETED")
    wait_unused(slurm, daemon)
    assert slurm.srun(SHARE, "true", user=1).returncode == 0, "once the other job has ended"


def test_the_device_nodes_are_created_again_at_each_boot(slurm: Slurm) -> None:
    nodes = sorted((slurm.host.root / "dev/yunion-mps").iterdir())
    numbers = [node.stat().st_rdev for node in nodes]
    assert len(numbers) == len(ADDRESSES)
    for node in nodes:
        node.unlink()
    command = ["systemd-tmpfiles", "--boot", "--create", f"--root={slurm.host.root}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert [node.stat().st_rdev for node in nodes] == numbers
    assert all(stat.S_ISCHR(node.stat().st_mode) for node in nodes)
