"""Each way of sharing a GPU, one after another, of one daemon that restarts meanwhile, beside nvidia-smi.

tests/unit/supervisor/test_transitions.py has every change from one way to another.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from integration.daemon_host import Daemon
from integration.lease_host import leases_of, take
from unit.supervisor.test_transitions import ADDRESS, NOTHING, WAYS, Way

#: Of the GPU while the daemon sets no compute mode.
ORIGINAL_MODE = "exclusive_process"

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "h100", "count": 2})]


@pytest.fixture
def daemon(daemon: Daemon) -> Daemon:
    nvidia_smi(daemon, "-i", "1", "-c", ORIGINAL_MODE.upper())
    daemon.configure(cuda_mps_scope="gpu", cuda_mps_pipe_directory="/run/nvidia-mps/pipe")
    daemon.host.divide(2)
    return daemon.start().wait_ready()


def devices(daemon: Daemon) -> dict[str, dict[str, Any]]:
    rows = daemon.get("/v1/devices?limit=0")[1]["isolated_devices"]
    return {row["addr"]: row for row in rows if row["addr"].startswith(ADDRESS)}


def nvidia_smi(daemon: Daemon, *arguments: str) -> str:
    return daemon.host.run(("nvidia-smi", *arguments), check=True).stdout


def reload(daemon: Daemon, *options: str) -> None:
    done = daemon.host.run(("yunion-mps", "reload", *options))
    assert done.returncode == 0, done.stdout + done.stderr


def check_transition(daemon: Daemon, before: Way, way: Way) -> None:
    """Nothing of `before` is left, except for the instances of a GPU without an entry."""
    rows = devices(daemon).values()
    assert [(row["state"], row["sharing"]) for row in rows] == [("free", way.sharing)] * way.devices
    instances = before.instances if way.instances is None else way.instances
    mode = nvidia_smi(daemon, "-i", "1", "--query-gpu=compute_mode", "--format=csv,noheader")
    assert mode.strip().lower() == (way.mode if way.entry or instances else ORIGINAL_MODE)
    assert nvidia_smi(daemon, "-L").count("MIG ") == instances
    status = daemon.status()
    assert status["problems"] == []
    assert [one["state"] for one in status["domains"]] == ["ready"] * (1 + way.control_daemons)
    assert "would change nothing" in daemon.host.run(("yunion-mps", "plan")).stdout


def test_a_leased_gpu_goes_through_all_ways_of_sharing_across_restarts(daemon: Daemon) -> None:
    for before, after in itertools.pairwise([*WAYS, NOTHING]):
        daemon.host.divide(2, *([after.entry] if after.entry else []))
        if not before.devices:
            reload(daemon)
            continue
        address, device = next(iter(devices(daemon).items()))
        take(daemon, f"holder.name=job&holder.ttl_s=600&allow_unlimited=true&devices={address}")
        reload(daemon)
        assert daemon.stop() == 0
        daemon.start().wait_ready()
        assert daemon.polls()
        kept = devices(daemon)[address]
        # After a stop, an instance without a control daemon needs nothing but to exist.
        states = {"leased", "pending"} if before.is_divided_instance else {"leased"}
        assert (kept["state"] in states, kept["gpu_uuid"]) == (True, device["gpu_uuid"])
        (lease,) = leases_of(daemon)
        assert daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
        reload(daemon, "--drain")
        check_transition(daemon, before, after)
