"""When a MIG layout takes effect, as `plan` predicts and `reload` then confirms."""

from __future__ import annotations

import pytest

from integration.conftest import MakeDivided
from integration.daemon_host import Daemon
from integration.mig_devices import instances
from integration.test_mig import daemon

__all__ = ["daemon"]

AT_ONCE = "at once"


def effects(daemon: Daemon, method: str, path: str) -> dict[tuple[str, str], str]:
    """Return when the changes of a plan or reload take effect, by their kind and subject."""
    status, answer = daemon.ask(method, path)
    assert status == 200, answer
    return {(one["kind"], one["subject"]): one["effect"] for one in answer["changes"]}


def of_layout(daemon: Daemon) -> tuple[str, str]:
    """Return when the layout takes effect, according to `plan` and to the `reload` after it."""
    planned, made = (
        effects(daemon, *call)["MIG layout", "00:06.0"]
        for call in (("GET", "/v1/plan"), ("POST", "/v1/reload"))
    )
    return planned, made


def take(daemon: Daemon, address: str) -> None:
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
    assert of_layout(daemon) == (AT_ONCE, AT_ONCE)


def test_a_layout_does_not_wait_for_leases_on_instances_that_it_keeps(daemon: Daemon) -> None:
    daemon.host.divide("mig: all-1g.10gb")
    daemon.start().wait_ready()
    take(daemon, f"00:06.0-g{sorted(one.gpu_instance for one in instances(daemon))[2]}")
    daemon.host.divide("mig: all-balanced")
    assert of_layout(daemon) == (AT_ONCE, AT_ONCE)


def test_a_budget_waits_for_the_lease_of_its_instance(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    (big,) = [one.gpu_instance for one in instances(daemon) if one.profile == "3g.40gb"]
    take(daemon, f"00:06.0-g{big}")
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
    assert of_layout(daemon) == (AT_ONCE, AT_ONCE)


def test_a_layout_waits_for_a_process_on_an_instance_that_it_removes(daemon: Daemon) -> None:
    daemon.host.divide("mig: [3g.40gb, 1g.10gb]")
    daemon.start().wait_ready()
    (small,) = [one for one in instances(daemon) if one.profile == "1g.10gb"]
    daemon.host.gpus[0].add_process(4321, 100, on=(small.gpu_instance, 0))
    daemon.host.divide("mig: 7g.80gb")
    assert of_layout(daemon) == ("once nothing uses what the layout removes",) * 2


def test_a_plan_does_not_promise_a_mode_that_may_need_a_reset(make_divided: MakeDivided) -> None:
    daemon = make_divided([{"kind": "a100"}], "virtual_number: 2").start().wait_ready()
    daemon.host.divide("mig: 3g.20gb")
    assert AT_ONCE not in of_layout(daemon)
