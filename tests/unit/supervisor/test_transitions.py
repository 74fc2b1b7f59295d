"""Every change from one way of sharing a GPU to another: of an idle GPU, of a leased one, across restarts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from yunion_mps.core.enums import FREE, LEASED, MPS, NOT_SHARED, PENDING, READY, TIME_SLICING
from yunion_mps.core.models import Device, Holder, Lease
from yunion_mps.leases.storage import LeaseStorage
from yunion_mps.supervisor import Change
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.views.devices import devices_json

from unit.supervised import MakeHost, Supervise, Supervised
from unit.supervisor.test_mig_devices import apply_layouts

ADDRESS = "00:07.0"
LAYOUT = "mig: [3g.40gb, 2g.20gb]"
NO_LAYOUT = "mig: all-disabled"
LEASE_ID = "0" * 36
#: How many polls a change takes at most after its lease has ended.
_MOST_POLLS = 3


class Way(NamedTuple):
    """What an entry of the device file makes of the GPU; None: nothing is said of its instances."""

    entry: str | None
    devices: int
    instances: int | None
    sharing: str
    mode: str = "default"

    @property
    def control_daemons(self) -> int:
        return (self.instances or 1) if self.sharing == MPS else 0

    @property
    def is_divided_instance(self) -> bool:
        return bool(self.instances) and self.sharing != MPS


NOTHING = Way(None, 0, None, "")
WAYS = (
    NOTHING,
    Way(f"{NO_LAYOUT}; virtual_number: 2", 2, 0, MPS, "exclusive_process"),
    Way(f"{NO_LAYOUT}; type: NVIDIA_GPU_SHARE; virtual_number: 3", 3, 0, TIME_SLICING),
    Way(LAYOUT, 2, 2, NOT_SHARED),
    Way(f"{LAYOUT}; virtual_number: 2", 4, 2, MPS),
    Way(f"{LAYOUT}; type: NVIDIA_GPU_SHARE; virtual_number: 3", 6, 2, TIME_SLICING),
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


class ChangingGpu:
    """A supervisor of two GPUs, of which the second one changes, and the lease of one of its devices."""

    def __init__(self, made: Supervised, original: str) -> None:
        """`original` is the compute mode of the second GPU while the daemon sets none."""
        self.host, self.made, self.original = made.host, made, original
        self._begin(made)

    def _begin(self, made: Supervised, leases: Iterable[Lease] = ()) -> None:
        """Start a supervisor, and let it know the leases, as the daemon does."""
        self.made = made
        made.start()
        self.ledger = made.hold(leases)

    @property
    def devices(self) -> list[Device]:
        return [device for device in self.made.snapshot.plan.devices if device.addr.startswith(ADDRESS)]

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = devices_json(self.made.snapshot, self.ledger)
        return {row["addr"]: dict(row) for row in rows if row["addr"].startswith(ADDRESS)}

    def lease(self) -> Device:
        """Lease the first device."""
        device = self.devices[0]
        lease = Lease(LEASE_ID, (device,), Holder("name", 0, name="job"), time.time())
        self.ledger.add(lease)
        self._storage().write(lease)
        return device

    def release(self) -> None:
        self.ledger.remove(LEASE_ID)
        self._storage().delete(LEASE_ID)

    def _storage(self) -> LeaseStorage:
        return LeaseStorage(self.made.supervisor.store())

    def reload(self, entry: object, *, now: bool | None = None) -> list[Change]:
        """Reload after the second GPU got this entry, or after its entry was removed; return the changes."""
        self.host.divide(2, *([entry] if entry else []))
        changes = self.made.reload()
        self.poll(now=now)
        return changes

    def poll(self, *, now: bool | None = None) -> None:
        apply_layouts(self.made, now=now)
        self.made.until(lambda: self.made.supervisor.fleet.settled)
        self.made.reconcile()

    def settle(self) -> None:
        """Poll until nothing waits: one poll ends the control daemon, the next one changes the layout."""
        self.poll()
        for _ in range(_MOST_POLLS):
            if not self.made.supervisor.is_urgent:
                break
            self.poll()

    def restart(self, *, is_crash: bool = False) -> None:
        if not is_crash:
            self.made.stop()
        self._begin(self.made.next_supervisor(), self.ledger.leases.values())
        self.poll()

    def check(self, before: Way, way: Way) -> None:
        """Nothing of `before` is left, except for the instances of a GPU without an entry."""
        rows = self.rows().values()
        assert [(row["state"], row["sharing"]) for row in rows] == [(FREE, way.sharing)] * way.devices
        gpu = self.host.gpus[1]
        instances = before.instances if way.instances is None else way.instances
        assert gpu.compute_mode == (way.mode if way.entry or instances else self.original)
        assert len(gpu.mig_devices()) == instances
        assert self.made.warnings == []
        assert [status.state for status in self.made.snapshot.domains] == [READY] * (1 + way.control_daemons)
        assert self.planned() == []

    def planned(self) -> list[object]:
        """What a reload of the same files would change."""
        preflight = run_preflight(self.made.paths, self.made.supervisor.nvml)
        _, changes = self.made.supervisor.desired.plan_for(preflight)
        return [*changes]


@pytest.fixture(params=["default", "exclusive_process"])
def gpu(make_host: MakeHost, supervise: Supervise, request: pytest.FixtureRequest) -> ChangingGpu:
    gpus = [{"kind": "h100"}, {"kind": "h100", "compute_mode": request.param}]
    keys = {"cuda_mps_scope": "gpu", "cuda_mps_pipe_directory": "/run/mps"}
    host = make_host(gpus, **keys)
    host.divide(2)
    return ChangingGpu(supervise(host), request.param)


def test_the_walk_has_each_change_once() -> None:
    assert sorted(all_changes(), key=repr) == sorted(itertools.permutations(WAYS, 2), key=repr)


def test_each_change_of_an_idle_gpu_is_in_effect_after_a_reload(gpu: ChangingGpu) -> None:
    for before, after in all_changes():
        gpu.reload(after.entry)
        gpu.check(before, after)


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted-meanwhile"])
def test_each_change_of_a_leased_gpu_waits_for_the_lease(gpu: ChangingGpu, restarts: bool) -> None:
    for before, after in all_changes():
        if not before.devices:
            gpu.reload(after.entry)
            continue
        leased = gpu.lease()
        gpu.reload(after.entry)
        if restarts:
            gpu.restart()
        kept = gpu.rows()[leased.addr]
        # After a stop, an instance without a control daemon needs nothing but to exist.
        states = {LEASED, PENDING} if restarts and before.is_divided_instance else {LEASED}
        assert (kept["state"] in states, kept["gpu_uuid"]) == (True, leased.gpu_uuid)
        gpu.release()
        gpu.settle()
        gpu.check(before, after)
