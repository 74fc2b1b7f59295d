"""Leases of several devices, including devices that are shared in different ways."""

from __future__ import annotations

import pytest

from integration.conftest import MakeDivided
from integration.daemon_host import Daemon
from simhost.host import SHARED

pytestmark = pytest.mark.processes

WHOLE, SHARE = "00:06.0-g1", "00:07.0-g1-0"
UNENFORCED = "GPU 00:07.0-g1, which is time-sliced"
NOTICE = f"yunion-mps: budgets are not enforced on {UNENFORCED}: a job can use all of its memory"


@pytest.fixture
def instances(make_divided: MakeDivided) -> Daemon:
    """A daemon with a whole MIG instance, and with an instance that is time-sliced."""
    made = make_divided([{"kind": "h100", "count": 2}], "mig: 3g.40gb", f"mig: 3g.40gb; {SHARED}")
    return made.start().wait_ready()


def test_a_lease_with_a_time_sliced_share_names_what_is_unenforced(instances: Daemon) -> None:
    both = ("--allow-unlimited", "--device", WHOLE, "--device", SHARE)
    taken = instances.host.run(("yunion-mps", "lease", "take", "job", "--ttl", "1h", *both), check=True)
    assert NOTICE in taken.stderr.splitlines()
    shown = instances.host.run(("yunion-mps", "lease", "show", "job"), check=True).stdout
    assert f"% of the SM threads (not enforced on {UNENFORCED})\n" in shown
    (lease,) = instances.get("/v1/leases")[1]["leases"]
    assert (lease["sharing"], lease["unenforced_gpus"]) == ("time-slicing", [SHARE.rpartition("-")[0]])


@pytest.mark.gpus({"kind": "v100"})
def test_the_budget_of_a_combined_lease_is_that_of_its_environment(daemon: Daemon) -> None:
    daemon.configure(cuda_mps_combine=2)
    daemon.start().wait_ready()
    take = ("yunion-mps", "lease", "take", "job", "--ttl", "1h", "--count", "2")
    taken = daemon.host.run(take, check=True).stdout
    assert "Budget:      8192 MiB, 50 % of the SM threads\n" in taken
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50\n" in taken
    (lease,) = daemon.get("/v1/leases")[1]["leases"]
    assert (lease["thread_percentage"], [one["thread_percentage"] for one in lease["budgets"]]) == (
        50,
        [25, 25],
    )
    daemon.host.run(("yunion-mps", "lease", "release", "job"), check=True)
    whole = daemon.host.run((*take[:6], "--device", "all"), check=True).stdout
    assert "Budget:      8192 MiB, 50 % of the SM threads\n" in whole, (
        "more than two devices are not combined"
    )
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M\n" in whole


def test_run_across_an_instance_and_a_share_names_what_is_unenforced(instances: Daemon) -> None:
    words = ("yunion-mps", "run", "--count", "2", "--across", "--allow-unlimited")
    shown = instances.host.run((*words, "--dry-run"), check=True)
    assert NOTICE in shown.stderr.splitlines()
    started = instances.host.run((*words, "printenv", "YUNION_MPS_DEVICE"), check=True)
    assert (started.stdout, NOTICE in started.stderr) == (f"{WHOLE},{SHARE}\n", True)
