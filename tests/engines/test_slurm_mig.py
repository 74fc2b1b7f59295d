"""Slurm's jobs get MIG instances and time-sliced devices, like other devices."""

from __future__ import annotations

import pytest

from engines.slurm import VERSIONS, Slurm, environment
from integration.daemon_host import Daemon
from integration.lease_host import leases_of
from simhost import SimHost

pytestmark = [
    pytest.mark.gpus({"kind": "h100"}),
    pytest.mark.parametrize("version", VERSIONS[-1:]),
]


@pytest.fixture
def host(host: SimHost, entry: str) -> SimHost:
    host.divide(entry)
    return host


def environment_of_job(slurm: Slurm, daemon: Daemon) -> dict[str, str]:
    done = slurm.srun("--gres=gpu:mps:1", "env")
    assert done.returncode == 0, f"{done.stderr}{slurm.logs()}"
    slurm.wait(lambda: leases_of(daemon) == [], "the release of the device")
    found = environment(done.stdout)
    assert not [name for name in found if name.startswith("CUDA_MPS_")]
    return found


@pytest.mark.parametrize("entry", ["mig: 3g.40gb"])
def test_a_job_gets_a_mig_instance(slurm: Slurm, daemon: Daemon) -> None:
    found = environment_of_job(slurm, daemon)
    (instance,) = daemon.host.gpus[0].mig_devices()
    assert found["YUNION_MPS_DEVICE"] == f"00:06.0-g{instance.gpu_instance}"
    assert found["CUDA_VISIBLE_DEVICES"] == instance.uuid


@pytest.mark.parametrize("entry", ["type: NVIDIA_GPU_SHARE\n  virtual_number: 2"])
def test_a_job_gets_a_time_sliced_device(slurm: Slurm, daemon: Daemon) -> None:
    found = environment_of_job(slurm, daemon)
    assert (found["YUNION_MPS_DEVICE"], found["YUNION_MPS_MEMORY_MIB"]) == ("00:06.0-0", "40779")
    assert found["CUDA_VISIBLE_DEVICES"] == daemon.host.gpus[0].uuid
