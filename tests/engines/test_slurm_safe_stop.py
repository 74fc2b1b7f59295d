"""Slurm's jobs that are cancelled or reach their time limit end without harming others on the GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest

from engines.slurm import Slurm, wait_unused
from integration.daemon_host import Daemon
from integration.mps_jobs import JOB, STUBBORN_JOB, terminations_of
from simhost.mps import StandIns

pytestmark = pytest.mark.gpus({"kind": "v100"})


@pytest.fixture
def patient_slurm(jobs: StandIns, daemon: Daemon, version: str) -> Iterator[Slurm]:
    """A node whose jobs may reach the daemon, as members of the group yunion-mps do."""
    del jobs
    daemon.start().wait_ready()
    daemon.socket_path.chmod(0o666)
    with Slurm(daemon.host, version) as slurm:
        slurm.install().start()
        slurm.set(KillWait=30)  # enough to end before Slurm kills the job
        yield slurm


def end_job(slurm: Slurm, job: str, end: str) -> None:
    if end == "scancel":
        slurm.ask("scancel", job)
    else:
        slurm.end_by_time_limit(job)
    slurm.wait_job(job, "CANCELLED", "TIMEOUT")


@pytest.mark.parametrize("end", ["scancel", "time limit"])
def test_a_client_is_disconnected_before_slurm_kills_its_job(
    patient_slurm: Slurm, daemon: Daemon, end: str
) -> None:
    slurm = patient_slurm
    script = f"srun yunion-mps run --inherit --safe-stop=0s -- {shlex.join(STUBBORN_JOB)}"
    job = slurm.submit(script, "--gres=gpu:mps:1")
    slurm.wait(lambda: "attached" in slurm.output(job), f"the client: {slurm.output(job)}")
    end_job(slurm, job, end)
    wait_unused(slurm, daemon)
    assert terminations_of(daemon) == ["its MPS server disconnected it"], daemon.log


@pytest.mark.parametrize(("start", "end"), [("srun --quiet", "scancel"), ("exec", "time limit")])
def test_the_health_check_disconnects_a_client_before_slurm_kills_it(
    patient_slurm: Slurm, daemon: Daemon, start: str, end: str
) -> None:
    """The client ignores SIGTERM, and ends by itself once it is disconnected."""
    slurm = patient_slurm
    slurm.set(KillWait=21, HealthCheckInterval=1)
    ignore = shlex.join(["sh", "-c", f"trap '' TERM; exec {shlex.join(JOB)}"])
    job = slurm.submit(f"{start} {ignore}", "--gres=gpu:mps:1", "--array=7")
    slurm.wait(lambda: "attached" in slurm.output(job), f"the client: {slurm.output(job)}")
    end_job(slurm, job, end)
    wait_unused(slurm, daemon)
    how, *_ = terminations_of(daemon)  # the next check repeats it for a client that has not ended yet
    assert how.startswith("its MPS server disconnected it"), daemon.log
