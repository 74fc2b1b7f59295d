"""Every change from one way of sharing a GPU to another, in one walk of one daemon, beside nvidia-smi."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

from integration.daemon_host import Daemon
from integration.lease_host import leases_of, take

ADDRESS = "00:07.0"
LAYOUT = "mig: [3g.40gb, 2g.20gb]"
NO_LAYOUT = "mig: all-disabled"

pytestmark = [pytest.mark.processes, pytest.mark.gpus({"kind": "h100", "count": 2})]


class Way(NamedTuple):
    """What an entry of the device file makes of the GPU; None: nothing is said of its instances."""

    entry: str | None
    devices: int
    instances: int | None
    sharing: str
    mode: str = "Default"

    @property
    def control_daemons(self) -> int:
        return (self.instances or 1) if self.sharing == "mps" else 0

    @property
    def is_divided_instance(self) -> bool:
        return bool(self.instances) and self.sharing != "mps"


NOTHING = Way(None, 0, None, "")
WAYS = (
    NOTHING,
    Way(f"{NO_LAYOUT}; virtual_number: 2", 2, 0, "mps", "Exclusive_Process"),
    Way(f"{NO_LAYOUT}; type: NVIDIA_GPU_SHARE; virtual_number: 3", 3, 0, "time-slicing"),
    Way(LAYOUT, 2, 2, "none"),
    Way(f"{LAYOUT}; virtual_number: 2", 4, 2, "mps"),
    Way(f"{LAYOUT}; type: NVIDIA_GPU_SHARE; virtual_number: 3", 6, 2, "time-slicing"),
)


def all_changes() -> list[tuple[Way, Way]]:
    """Each ordered pair of ways, such that each begins as the one before has ended (an Eulerian circuit)."""
    left = {way: [other for other in WAYS if other != way] for way in WAYS}
    path, circuit = [NOTHING], list[Way]()
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            circuit.append(path.pop())
    return list(itertools.pairwise(circuit))


@pytest.fixture(params=["Default", "Exclusive_Process"])
def original(request: pytest.FixtureRequest) -> str:
    """The compute mode of the GPU while the daemon sets none."""
    return str(request.param)


@pytest.fixture
def daemon(daemon: Daemon, original: str) -> Daemon:
    nvidia_smi(daemon, "-i", "1", "-c", original.upper())
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


def check(daemon: Daemon, original: str, before: Way, way: Way) -> None:
    """Nothing of `before` is left, except for the instances of a GPU without an entry."""
    rows = devices(daemon).values()
    assert [(row["state"], row["sharing"]) for row in rows] == [("free", way.sharing)] * way.devices
    instances = before.instances if way.instances is None else way.instances
    mode = nvidia_smi(daemon, "-i", "1", "--query-gpu=compute_mode", "--format=csv,noheader")
    assert mode.strip() == (way.mode if way.entry or instances else original)
    assert nvidia_smi(daemon, "-L").count("MIG ") == instances
    status = daemon.status()
    assert status["problems"] == []
    assert [one["state"] for one in status["domains"]] == ["ready"] * (1 + way.control_daemons)
    assert "would change nothing" in daemon.host.run(("yunion-mps", "plan")).stdout


def test_the_walk_has_each_change_once() -> None:
    assert sorted(all_changes(), key=repr) == sorted(itertools.permutations(WAYS, 2), key=repr)


def test_each_change_of_an_idle_gpu_is_in_effect_after_a_reload(daemon: Daemon, original: str) -> None:
    for before, after in all_changes():
        daemon.host.divide(2, *([after.entry] if after.entry else []))
        reload(daemon)
        check(daemon, original, before, after)


@pytest.mark.parametrize("stops", [False, True], ids=["running", "stopped-meanwhile"])
def test_each_change_of_a_leased_gpu_waits_for_the_lease(daemon: Daemon, original: str, stops: bool) -> None:
    for before, after in all_changes():
        daemon.host.divide(2, *([after.entry] if after.entry else []))
        if not before.devices:
            reload(daemon)
            continue
        address, device = next(iter(devices(daemon).items()))
        take(daemon, f"holder.name=job&holder.ttl_s=600&allow_unlimited=true&devices={address}")
        reload(daemon)
        if stops:
            assert daemon.stop() == 0
            daemon.start().wait_ready()
        assert daemon.polls()
        kept = devices(daemon)[address]
        # after a stop, nothing has to be kept for a share of an instance, or a whole one, except the instance
        states = {"leased", "pending"} if stops and before.is_divided_instance else {"leased"}
        assert (kept["state"] in states, kept["gpu_uuid"]) == (True, device["gpu_uuid"])
        (lease,) = leases_of(daemon)
        assert daemon.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
        reload(daemon, "--drain")
        check(daemon, original, before, after)
