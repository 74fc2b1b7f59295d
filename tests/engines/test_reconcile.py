"""`yunion-mps lease take` and `lease reconcile`, as the scripts of a scheduler use them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.attached import attach
from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, leased_addresses, leases_of
from simhost.mps import StandIns

pytestmark = pytest.mark.gpus({"kind": "v100"})


def take(daemon: Daemon, name: str, *devices: str) -> Any:
    """Take a lease that does not expire; its exit status or, if that is 0, the lease."""
    words = [word for device in devices for word in ("--device", device)]
    command = [
        "yunion-mps",
        "lease",
        "take",
        name,
        "--ttl",
        "infinity",
        "--for",
        "slurm",
        *words,
        "-o",
        "json",
    ]
    done = daemon.host.run(command)
    return done.returncode or json.loads(done.stdout)


def reconcile(daemon: Daemon, live: str) -> Any:
    """The names of the leases that were ended; or the exit status."""
    command = ["yunion-mps", "lease", "reconcile", "--for", "slurm", "--live", live, "-o", "json"]
    done = daemon.host.run(command)
    return done.returncode or [lease["name"] for lease in json.loads(done.stdout)["leases"]]


@pytest.fixture
def ready(daemon: Daemon) -> Daemon:
    daemon.configure(cuda_mps_combine=2)
    return daemon.start().wait_ready()


def test_a_repeated_take_returns_the_same_lease_of_several_devices(ready: Daemon) -> None:
    lease = take(ready, "slurm:17", *ADDRESSES[:2])
    assert lease["devices"] == ADDRESSES[:2]
    assert take(ready, "slurm:17", *ADDRESSES[:2]) == lease
    assert take(ready, "slurm:17", *ADDRESSES[1:3]) == 1
    assert take(ready, "slurm:18", *ADDRESSES[1:3]) == 5
    assert leased_addresses(ready) == ADDRESSES[:2]


def test_the_leases_of_all_jobs_that_are_not_live_are_ended(ready: Daemon) -> None:
    for name, device in zip(("slurm:17", "slurm:18", "slurm:19", "claim:a/b@c"), ADDRESSES):
        take(ready, name, device)
    assert reconcile(ready, "18, 20") == ["slurm:17", "slurm:19"]
    assert reconcile(ready, "18") == []
    assert reconcile(ready, "") == ["slurm:18"]
    assert leased_addresses(ready) == ADDRESSES[3:]


def test_a_job_id_with_a_typo_ends_no_lease(ready: Daemon) -> None:
    take(ready, "slurm:17", ADDRESSES[0])
    for live in ("18,x", "18,,19", "slurm:18", "18 19"):
        assert reconcile(ready, live) == 2
    assert leased_addresses(ready) == ADDRESSES[:1]


def test_a_lease_is_kept_while_a_process_uses_its_device(jobs: StandIns, ready: Daemon) -> None:
    lease = take(ready, "slurm:17", ADDRESSES[0])
    with attach(jobs, ready, lease):
        assert reconcile(ready, "") == []
        assert leased_addresses(ready) == ADDRESSES[:1]
    eventually(lambda: reconcile(ready, "") == ["slurm:17"], "the end of the lease")
    assert leases_of(ready) == []
