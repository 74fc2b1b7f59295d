"""MIG modes that wait for a reset, and that no entry has anymore: what of them is cancelled and shown."""

from __future__ import annotations

import pytest
from yunion_mps.core import reasons

from simhost import SimHost
from unit.supervised import Supervise
from unit.supervisor.test_mig_devices import MIG, StartWork, apply_layouts, begun, configured, waits

__all__ = ["begun"]


def requested(host: SimHost) -> tuple[bool, bool]:
    """Whether the first GPU is in MIG mode, and whether it will be after a reset."""
    return host.gpus[0].mig, host.gpus[0].mig_pending


@pytest.mark.parametrize("was", [False, True])
def test_without_its_entry_a_request_for_a_mode_is_cancelled(begun: StartWork, was: bool) -> None:
    asks = f"type: NVIDIA_MPS; mig: {'all-disabled; virtual_number: 4' if was else 'all-3g.20gb'}"
    host, made = begun(asks, description=[{"kind": "a100", "mig": was}])
    assert requested(host) == (was, not was)
    (host.root / "etc/yunion/host_container_device.yml").write_text("devices: []\n")
    shown = [(one.before, one.after, one.effect) for one in made.accept() if one.kind == "MIG layout"]
    before, after = ("off", "on") if was else ("on", "off")
    assert shown == [(f"MIG mode {before} after a reset", f"MIG mode {after}", "at once")]
    apply_layouts(made)
    assert requested(host) == (was, was)
    assert made.supervisor.reconciliation.layouts_due(made.supervisor.nvml) is None
    cancelled = f"MIG mode will not be switched {before}"
    (cause,) = (event.cause for event in made.events if event.what == cancelled)
    assert cause == "the configuration no longer has a MIG layout for this GPU"
    host.run(["nvidia-smi", "-i", "0", "-mig", str(int(not was))], check=True)
    apply_layouts(made)
    assert requested(host) == (was, not was), "another program's request"


def test_the_next_start_cancels_a_request_for_a_mode(begun: StartWork, supervise: Supervise) -> None:
    host, made = begun("type: NVIDIA_MPS; mig: all-3g.20gb", description=[{"kind": "a100"}])
    made.stop()
    configured(host, "type: NVIDIA_MPS; virtual_number: 4")
    made = supervise(host).start()
    assert requested(host) == (False, False)
    host.gpus[0].reset()
    made.rescan()
    assert made.available == 4


def test_a_plan_without_mig_does_not_name_a_layout_that_waits(begun: StartWork) -> None:
    host, made = begun("type: NVIDIA_MPS; virtual_number: 2")
    configured(host, MIG)
    made.accept()
    apply_layouts(made, {host.gpus[0].uuid})
    assert waits(made).code == reasons.MIG_IN_USE
    configured(host, "type: NVIDIA_MPS; virtual_number: 2")
    assert [change for change in made.accept() if change.kind == "MIG layout"] == []
