"""Jobs of a real Slurm get exactly the devices that Slurm has assigned, and leave none behind."""

from __future__ import annotations

import pytest

from engines.slurm import Slurm
from integration.daemon_host import Daemon
from integration.lease_host import given, leases_of

pytestmark = pytest.mark.gpus({"kind": "v100"})

SHARE = "--gres=gpu:mps:1"


def environment(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_srun_gets_the_assigned_device_with_its_budget(slurm: Slurm, daemon: Daemon) -> None:
    done = slurm.srun(SHARE, "env")
    assert done.returncode == 0, f"{done.stderr}{slurm.logs()}"
    found = environment(done.stdout)
    expected = daemon.get("/v1/devices/00:06.0-0")[1]["client_environment"]
    assert {name: found[name] for name in expected} == expected
    assert found["YUNION_MPS_DEVICE"] == "00:06.0-0"
    slurm.wait(lambda: given(daemon) == [], "the release of the device")
    assert leases_of(daemon) == []
