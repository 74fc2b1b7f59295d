"""Slurm's jobs get MIG instances and time-sliced devices, like other devices."""

from __future__ import annotations

import pytest

from engines.slurm import VERSIONS, Slurm, environment
from engines.test_slurm import UNTIL_TOLD
from integration.daemon_host import Daemon
from integration.lease_host import leases_of
from simhost import SimHost

pytestmark = [
    pytest.mark.gpus({"kind": "h100", "count": 2}),
    pytest.mark.parametrize("version", VERSIONS[-1:]),
]


@pytest.fixture
def host(host: SimHost) -> SimHost:
    """A GPU with one MIG instance beside one that two jobs share in turn."""
    host.divide("mig: 3g.40gb", "type: NVIDIA_GPU_SHARE\n  virtual_number: 2")
    return host


def test_jobs_get_an_instance_and_a_time_sliced_device(slurm: Slurm, daemon: Daemon) -> None:
    (instance,) = daemon.host.gpus[0].mig_devices()
    gres = (slurm.folder / "gres.conf").read_text()
    assert f"# 0: 00:06.0-g{instance.gpu_instance} (40448 MiB)\n# 1: 00:07.0-0 (" in gres
    assert gres.count("\nNodeName=node1 Name=gpu Type=mps File=") == 2, "one for the instance"
    jobs = [slurm.submit(f"env; {UNTIL_TOLD.format(slurm.folder)}", "--gres=gpu:mps:1") for _ in range(2)]
    slurm.wait(lambda: all("YUNION_MPS_DEVICE" in slurm.output(job) for job in jobs), "their environments")
    uses = [environment(slurm.output(job)) for job in jobs]
    assert [(one["YUNION_MPS_DEVICE"], one["CUDA_VISIBLE_DEVICES"]) for one in uses] == [
        (f"00:06.0-g{instance.gpu_instance}", instance.uuid),
        ("00:07.0-0", daemon.host.gpus[1].uuid),
    ]
    assert not [name for one in uses for name in one if name.startswith("CUDA_MPS_")]
    (slurm.folder / "go").touch()
    slurm.wait(lambda: leases_of(daemon) == [], "the release of the devices")
