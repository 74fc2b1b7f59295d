"""Slurm's jobs that are cancelled or reach their time limit end without harming others on the GPU."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from engines.slurm import Slurm
from integration.daemon_host import Daemon
from integration.lease_host import leases_of
from integration.mps_jobs import STUBBORN_JOB, terminations_of
from simhost import SimHost
from simhost.mps import StandIns

pytestmark = pytest.mark.gpus({"kind": "v100"})

#: Enough to end before Slurm kills the job, after its KillWait.
KILL_WAIT_S = 30


@pytest.fixture
def stand_ins(host: SimHost) -> Iterator[StandIns]:
    with StandIns(host) as stand_ins:
        yield stand_ins


@pytest.fixture
def patient_slurm(stand_ins: StandIns, daemon: Daemon, version: str) -> Iterator[Slurm]:
    """A node whose jobs may reach the daemon, as members of the group yunion-mps do."""
    del stand_ins
    daemon.start().wait_ready()
    daemon.socket_path.chmod(0o666)
    with Slurm(daemon.host, version) as slurm:
        slurm.install()
        configuration = slurm.folder / "slurm.conf"
        text = re.sub(
            "^KillWait=.*$", f"KillWait={KILL_WAIT_S}", configuration.read_text(), flags=re.MULTILINE
        )
        configuration.write_text(text)
        yield slurm.start()


@pytest.mark.parametrize("end", ["scancel", "time limit"])
def test_a_client_is_disconnected_before_slurm_kills_its_job(
    patient_slurm: Slurm, daemon: Daemon, end: str
) -> None:
    slurm = patient_slurm
    script = f"srun yunion-mps run --inherit --safe-stop=0s -- {shlex.join(STUBBORN_JOB)}"
    job = slurm.submit(script, "--gres=gpu:mps:1")
    slurm.wait(lambda: "attached" in slurm.output(job), f"the client: {slurm.output(job)}")
    if end == "scancel":
        slurm.ask("scancel", job)
    else:
        slurm.ask("scontrol", "update", f"JobId={job}", "EndTime=now")
    slurm.wait_job(job, "CANCELLED", "TIMEOUT")
    slurm.wait(lambda: leases_of(daemon) == [], "the release of the device")
    assert terminations_of(daemon) == ["its MPS server disconnected it"], daemon.log
