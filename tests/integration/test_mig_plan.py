"""When a MIG layout takes effect, as `plan` predicts and `reload` then confirms."""

from __future__ import annotations

import re

import pytest

from integration.conftest import MakeDivided
from integration.daemon_host import Daemon
from integration.mig_devices import gpu, instances
from integration.test_mig import daemon

__all__ = ["daemon"]

AT_ONCE = "at once"


def effects(daemon: Daemon, method: str, path: str) -> dict[tuple[str, str], str]:
    """Return when the changes of a plan or reload take effect, by their kind and subject."""
    status, answer = daemon.ask(method, path)
    assert status == 200, answer
    return {(one["kind"], one["subject"]): one["effect"] for one in answer["changes"]}


def layout_effects(daemon: Daemon) -> tuple[str, str]:
    """Return when the layout takes effect, according to `plan` and to the `reload` after it."""
    planned, made = (
        effects(daemon, *call)["MIG layout", "00:06.0"]
        for call in (("GET", "/v1/plan"), ("POST", "/v1/reload"))
    )
    return planned, made


def lease_device(daemon: Daemon, address: str) -> None:
    words = f"holder.name=job&holder.ttl_s=600&devices={address}"
    assert daemon.ask("POST", "/v1/leases", words)[0] == 201


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[3g.40gb, 1g.10gb]", "[3g.40gb, 1g.10gb, 1g.10gb]"),
        ("[3g.40gb, 1g.10gb]", "7g.80gb"),
        ("[3g.40gb, 1g.10gb]", "all-disabled"),
        ("all-disabled", "[3g.40gb, 1g.10gb]"),
    ],
)
def test_a_layout_that_waits_for_nothing_takes_effect_at_once(
    daemon: Daemon, before: str, after: str
) -> None:
    daemon.host.divide(f"mig: {before}\n  virtual_number: 2")
    daemon.start().wait_ready()
    daemon.host.divide(f"mig: {after}\n  virtual_number: 2")
    assert layout_effects(daemon) == (AT_ONCE, AT_ONCE)


def test_a_layout_does_not_wait_for_leases_on_instances_that_it_keeps(daemon: Daemon) -> None:
    daemon.host.divide("mig: all-1g.10gb")
    daemon.start().wait_ready()
    lease_device(daemon, f"00:06.0-g{sorted(one.gpu_instance for one in instances(daemon))[2]}")
    daemon.host.divide("mig: all-balanced")
    assert layout_effects(daemon) == (AT_ONCE, AT_ONCE)


def test_a_budget_waits_for_the_lease_of_its_instance(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    (big,) = [one.gpu_instance for one in instances(daemon) if one.profile == "3g.40gb"]
    lease_device(daemon, f"00:06.0-g{big}")
    daemon.host.divide("type: NVIDIA_GPU_SHARE\n  mig: [3g.40gb, 2g.20gb]\n  virtual_number: 2")
    planned, made = (effects(daemon, *call) for call in (("GET", "/v1/plan"), ("POST", "/v1/reload")))
    assert planned["budget", f"00:06.0-g{big}"] == "once lease job of root has ended"
    assert made == planned


def test_a_layout_that_another_program_has_made_takes_effect_at_once(daemon: Daemon) -> None:
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()
    for profile in ("2g.20gb", "1g.10gb"):
        daemon.host.create_mig_devices(0, profile)
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    assert layout_effects(daemon) == (AT_ONCE, AT_ONCE)


def test_a_layout_waits_for_a_process_on_an_instance_that_it_removes(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    (small,) = [one for one in instances(daemon) if one.profile == "1g.10gb"]
    daemon.host.gpus[0].add_process(4321, 100, on=(small.gpu_instance, 0))
    daemon.host.divide("mig: 7g.80gb")
    assert layout_effects(daemon) == ("once the process (PID 4321) has ended",) * 2


def test_a_plan_says_that_a_layout_may_require_a_reset(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "a100"}], "virtual_number: 2").start().wait_ready()
    daemon.host.divide("mig: 3g.20gb")
    certain = "later: MIG mode will be on after the next reset of the GPU"
    assert layout_effects(daemon) == ("after a reset of the GPU, if the driver requires one", certain)
    daemon.host.divide("mig: 2g.10gb")
    assert layout_effects(daemon) == (certain, certain)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_layout_waits_for_an_instance_of_another_program(daemon: Daemon, is_used: bool) -> None:
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()
    daemon.host.create_mig_devices(0, "1g.10gb")
    (foreign,) = [one for one in instances(daemon) if one.profile == "1g.10gb"]
    if is_used:
        daemon.host.gpus[0].add_process(4321, 100, on=(foreign.gpu_instance, 0))
    daemon.host.divide("mig: 7g.80gb")
    named = "another program created" + " and the process (PID 4321) uses" * is_used
    what = f"instance g{foreign.gpu_instance} (1g.10gb), which {named}, is in the way of its MIG layout"
    assert layout_effects(daemon) == (f"later: {what}",) * 2
    assert what in gpu(daemon)["reason"]


@pytest.mark.parametrize("entry", ["type: NVIDIA_GPU_SHARE\n  virtual_number: 2", ""])
def test_an_original_compute_mode_waits_for_the_lease_of_an_instance(daemon: Daemon, entry: str) -> None:
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()
    lease_device(daemon, f"00:06.0-g{instances(daemon)[0].gpu_instance}")
    if entry:
        daemon.host.divide(entry)
    else:
        daemon.write_host_conf({"enable_cuda_mps": False})
    planned, made = (effects(daemon, *call) for call in (("GET", "/v1/plan"), ("POST", "/v1/reload")))
    assert planned["compute mode", "00:06.0"] == "once lease job of root has ended"
    assert made == planned


def test_a_gpu_that_leaves_mig_mode_keeps_its_original_compute_mode(daemon: Daemon) -> None:
    daemon.host.gpus[0].compute_mode = "prohibited"
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()
    daemon.host.divide("mig: all-disabled\n  virtual_number: 2")
    assert ("compute mode", "00:06.0") not in effects(daemon, "GET", "/v1/plan")
    effects(daemon, "POST", "/v1/reload")
    assert gpu(daemon)["compute_mode"] == "Exclusive_Process"
    daemon.stop()
    assert daemon.host.gpus[0].compute_mode == "prohibited"


def test_the_mode_of_a_gpu_that_leaves_mig_mode_is_not_said_to_be_default(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "h100", "count": 2}], "virtual_number: 2").start().wait_ready()
    daemon.host.gpus[1].mig = True
    daemon.host.run(["nvidia-smi", "-i", 1, "-c", "PROHIBITED"], check=True)
    assert daemon.polls()
    daemon.host.divide("virtual_number: 2", "mig: all-disabled\n  virtual_number: 2")
    assert {*effects(daemon, "GET", "/v1/plan")} == {("MIG layout", "00:07.0")}


@pytest.mark.parametrize("way", ["NVIDIA_MPS", "NVIDIA_GPU_SHARE"])
def test_plan_and_reload_say_what_to_do_if_mig_mode_blocks_an_entry(daemon: Daemon, way: str) -> None:
    daemon.host.divide("mig: 3g.40gb")
    daemon.start().wait_ready()
    daemon.host.divide(f"type: {way}\n  virtual_number: 2")
    for command in (["plan"], ["reload"], ["plan"], ["reload", "--drain"]):
        shown = " ".join(daemon.host.run(["yunion-mps", *command], check=True).stdout.split())
        assert re.search(r"Pending: GPU 00:06.0( \(.*\))?: the GPU is in MIG mode, so ", shown), shown
        assert f"disable MIG mode: nvidia-smi -i {gpu(daemon)['uuid']} -mig 0" in shown
