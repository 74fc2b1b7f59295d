"""The compute mode of GPUs in MIG mode: planned, corrected and restored, for all uses of the instances.

In MIG mode, the driver allows only Default and Prohibited.
"""

from __future__ import annotations

import os

import pytest
from yunion_mps.core import reasons
from yunion_mps.leases.ledger import Ledger
from yunion_mps.views.devices import devices_json

from simhost import SimHost
from unit.supervised import MakeHost, Supervise, Supervised
from unit.supervisor.test_mig_devices import apply_layouts, devices

WAYS = {
    "whole": "type: NVIDIA_MPS; mig: all-3g.40gb",
    "mps": "type: NVIDIA_MPS; mig: all-3g.40gb; virtual_number: 2",
    "time-sliced": "type: NVIDIA_GPU_SHARE; mig: all-3g.40gb; virtual_number: 2",
}
FREE = {("free", "")}


@pytest.fixture
def host(make_host: MakeHost, request: pytest.FixtureRequest) -> SimHost:
    """A host whose GPU is in MIG mode."""
    host = make_host([{"kind": "h100"}], **getattr(request, "param", {}))
    host.gpus[0].mig = True
    return host


def begin(host: SimHost, supervise: Supervise, way: str) -> Supervised:
    host.divide(WAYS[way])
    made = supervise(host).start()
    apply_layouts(made)
    return made


def states(made: Supervised) -> set[tuple[str, str]]:
    return {(row["state"], row["reason_code"]) for row in devices_json(made.snapshot, Ledger())}


@pytest.mark.parametrize("way", WAYS)
def test_the_compute_mode_is_default_and_restored(host: SimHost, supervise: Supervise, way: str) -> None:
    host.gpus[0].compute_mode = "prohibited"
    made = begin(host, supervise, way)
    assert (host.gpus[0].compute_mode, states(made)) == ("default", FREE)
    made.stop()
    assert host.gpus[0].compute_mode == "prohibited"


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_compute_mode_is_noticed_and_corrected(
    host: SimHost, supervise: Supervise, way: str
) -> None:
    made = begin(host, supervise, way)
    host.gpus[0].compute_mode = "prohibited"
    made.rescan()
    assert states(made) == {("unavailable", reasons.COMPUTE_MODE_CHANGED)}
    made.reconcile()
    assert (host.gpus[0].compute_mode, states(made)) == ("default", FREE)
    changes = [event.what for event in made.events if event.kind == "compute_mode"]
    assert changes == ["Default -> Prohibited", "Prohibited -> Default"]


@pytest.mark.parametrize("host", [{"cuda_mps_compute_mode": "keep"}], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_with_keep_a_strict_mode_makes_instances_unavailable(
    host: SimHost, supervise: Supervise, way: str
) -> None:
    host.gpus[0].compute_mode = "prohibited"
    made = begin(host, supervise, way)
    assert (devices(made), host.gpus[0].compute_mode) == ((), "prohibited")
    codes = {reason.code for reason in made.snapshot.plan.unavailable.values()}
    assert codes == {reasons.COMPUTE_MODE_EXCLUSIVE}
    assert (
        "MIG requires compute mode Default, but it is Prohibited"
        in f"{list(made.snapshot.plan.unavailable.values())}"
    )


def test_a_process_on_an_instance_holds_the_compute_mode(host: SimHost, supervise: Supervise) -> None:
    host.gpus[0].compute_mode = "prohibited"
    made = begin(host, supervise, "whole")
    number = host.gpus[0].mig_devices()[0].gpu_instance
    host.gpus[0].add_process(os.getpid(), 100, on=(number, 0))
    made.stop()
    assert host.gpus[0].compute_mode == "default"


def test_another_layout_takes_effect_although_a_mode_is_recorded(host: SimHost, supervise: Supervise) -> None:
    host.gpus[0].compute_mode = "prohibited"
    made = begin(host, supervise, "whole")
    host.divide("type: NVIDIA_MPS; mig: all-7g.80gb")
    made.reload()
    apply_layouts(made)
    assert ([one.profile for one in host.gpus[0].mig_devices()], states(made)) == (["7g.80gb"], FREE)
