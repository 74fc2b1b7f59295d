"""Slurm's node and jobs, and the leases of its jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.reasons import GPU_LOST, Reason
from yunion_mps.slurm.gres_conf import pending_change
from yunion_mps.slurm.job import is_about_to_be_killed, job_of, stale_leases
from yunion_mps.slurm.job_leases import Assignment, held_outside
from yunion_mps.slurm.node_state import NodeState, SlurmNode, drain_reason, parse_jobs, parse_state

from unit.slurm.slurm_answers import MIXED, lease


def test_some_devices_of_a_gpu_are_requested_by_count() -> None:
    addresses = ["00:06.0-0", "00:06.0-1"]
    assert Assignment(addresses).request == Assignment(addresses, 2).request == {"devices": addresses}
    assert Assignment(addresses, 1).request == {"count": 1, "gpu": "00:06.0"}
    assert Assignment(addresses, 1).matches(lease("slurm:17", ("00:06.0-1",)))
    assert not Assignment(addresses, 1).matches(lease("slurm:17", ("00:07.0-1",)))
    assert not Assignment(addresses).matches(lease("slurm:17", ("00:06.0-1",)))


def test_only_a_lease_without_expiry_that_is_named_after_a_job_is_slurms() -> None:
    assert job_of(lease("slurm:17")) == "17"
    others = [lease(name) for name in (None, "slurm:", "slurm:17-a", "slurm:017", "Slurm:17", "claim:a/b@c")]
    others += [lease("slurm:17", binding="container"), lease("slurm:17", expires="2026-11-20T13:45:00Z")]
    assert [job_of(one) for one in others] == [""] * len(others)
    assert stale_leases([lease("slurm:17"), lease("slurm:18"), *others], ["18"]) == [lease("slurm:17")]


def test_a_device_leased_outside_slurm_is_named_with_its_holder() -> None:
    assert held_outside([lease("slurm:17")], ["00:06.0-0"]) is None
    assert held_outside([lease("by-hand")], ["00:06.0-1"]) is None
    held = held_outside([lease(None, user="alice", pid=4260)], ["00:06.0-0"])
    assert held == "device 00:06.0-0 is leased outside Slurm: alice (PID 4260)"


@pytest.mark.parametrize(
    ("problem", "is_change"),
    [
        ({"code": "leases_pending", "gpu": "00:07.0"}, True),
        ({"code": "leases_pending", "gpu": "00:09.0-g1"}, True),
        ({"code": "mig_in_use", "gpu": "00:09.0"}, True),
        ({"code": "mig_pending", "gpu": "00:09.0"}, True),
        ({"code": "mig_in_use", "gpu": "00:05.0"}, False),
        ({"code": "limits_pending", "gpu": "00:07.0"}, False),
        ({"code": "client_waiting", "gpu": None}, False),
    ],
)
def test_a_change_is_pending_if_a_gpu_of_slurm_changes_its_type(problem: Any, is_change: bool) -> None:
    row: Any = {"text": "why", **problem}
    found = pending_change([device["addr"] for device in MIXED], [row])
    assert found == ("why" if is_change else None)
    assert not found or found.code == problem["code"]


def test_only_drains_with_our_prefix_are_ours() -> None:
    reason = drain_reason(Reason('GPU "0" is lost', GPU_LOST))
    assert reason == "yunion-mps: gpu_lost: GPU '0' is lost"
    assert parse_state(f"drained*|gpu:mps:4|{reason}") == NodeState(True, reason, "gpu:mps:4")
    assert NodeState(is_drained=True, reason=reason).is_ours
    assert not NodeState(is_drained=False, reason=reason).is_ours
    assert not NodeState(is_drained=True, reason="see yunion-mps: gpu_lost: x").is_ours
    assert parse_state("warning: x\nidle|(null)|none") == NodeState(False, "none", "(null)")
    assert parse_state("") is None
    awaits_reboot = parse_state(f"draining@|gpu:mps:4|{reason}")
    assert awaits_reboot
    assert awaits_reboot.is_drained
    assert not awaits_reboot.is_ours
    assert len(drain_reason(Reason("x" * 900, GPU_LOST))) == 200


def test_only_a_job_that_slurm_is_ending_has_a_time_since_when() -> None:
    text = "17 RUNNING 1795529540\n18 COMPLETING 1795529550\n19 COMPLETING Unknown\nwarning: x\n"
    assert parse_jobs(text) == {"17": None, "18": 1795529550.0, "19": None}
    assert parse_jobs("") == {}
    assert parse_jobs("17 COMPLETING \N{SUPERSCRIPT TWO}") == {"17": None}


@pytest.mark.processes
def test_the_defaults_that_a_user_has_set_for_squeue_hide_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They apply if root runs a hook by hand; the lease of a job that is not listed would be released."""
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\necho "${SQUEUE_USERS:-17}${SLURM_CLUSTERS:-} RUNNING N/A"\n')
    squeue.chmod(0o755)
    for name, value in (
        ("PATH", f"{tmp_path}:/usr/bin:/bin"),
        ("SQUEUE_USERS", "9"),
        ("SLURM_CLUSTERS", "9"),
    ):
        monkeypatch.setenv(name, value)
    assert SlurmNode("n1").jobs() == {"17": None}


@pytest.mark.parametrize(
    ("kill_wait_s", "interval_s", "first_s"), [(30, 10, 10), (60, 30, 20), (30, 30, None), (30, 0, None)]
)
def test_the_last_check_before_the_kill_is_10_s_after_sigterm_or_later(
    kill_wait_s: int, interval_s: int, first_s: int | None
) -> None:
    when = [age_s for age_s in range(100) if is_about_to_be_killed(age_s, kill_wait_s, interval_s)]
    assert when == ([] if first_s is None else list(range(first_s, kill_wait_s)))
