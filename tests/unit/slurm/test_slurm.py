"""The pure parts of Slurm's hooks: the job in the environment, indices, lines, leases and drain reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from yunion_mps.errors import HostError, InfeasibleError, NotFoundError, YunionError
from yunion_mps.paths import Paths
from yunion_mps.reasons import GPU_LOST, SLURM_DEVICES_CHANGED, Reason
from yunion_mps.slurm.devices import (
    Record,
    RecordedDevice,
    devices_for_slurm,
    gres_lines,
    node_lines,
    read_record,
    record_of,
)
from yunion_mps.slurm.hooks import JobFile, environment_of_task, number_of_shards
from yunion_mps.slurm.job import Job, indices_of, is_about_to_be_killed, job_of, stale_leases
from yunion_mps.slurm.leases import Assignment, held_outside
from yunion_mps.slurm.node import NodeState, SlurmNode, drain_reason, parse_jobs, parse_state, shards_of

RECORD = Record(False, [RecordedDevice("00:06.0-0", 4096), RecordedDevice("00:06.0-1", 4096)])


def device(addr: str, memory_mib: int = 4096, reserved_for: str | None = None) -> Any:
    gpu = addr.rpartition("-")[0]
    return {
        "addr": addr,
        "memory_mib": memory_mib,
        "reserved_for": reserved_for,
        "gpu_uuid": gpu,
        "sharing": "mps",
    }


def lease(name: str | None, devices: tuple[str, ...] = ("00:06.0-0",), **fields: Any) -> Any:
    default = {"binding": "name", "expires": None, "user": "root", "pid": None, "id": "7c1f0e7a"}
    return {"name": name, "devices": list(devices), **default, **fields}


def test_a_job_is_read_from_the_environment_of_its_hook() -> None:
    environment = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "1000", "SLURM_JOB_GPUS": "0,2"}
    job = Job.of(environment)
    assert job == Job("17", 1000, (0, 2))
    assert job.lease_name == "slurm:17"
    assert Job.of({"SLURM_JOB_ID": "17", "SLURM_STEP_GPUS": "1"}) == Job("17", 0, (), (1,))


@pytest.mark.parametrize("kind", ["HET", "PACK"])
def test_a_job_has_the_components_of_a_heterogeneous_job_that_it_is_of(kind: str) -> None:
    groups = {f"SLURM_JOB_ID_{kind}_GROUP_0": "17", f"SLURM_JOB_ID_{kind}_GROUP_1": "18"}
    assert Job.of({"SLURM_JOB_ID": "17", **groups}).components == ("17", "18")
    assert Job.of({"SLURM_JOB_ID": "19", **groups}).components == ()  # inherited by another job
    forged = {"SLURM_JOB_ID": "17", **groups, f"SLURM_JOB_ID_{kind}_GROUP_2": "../18"}
    assert Job.of(forged).components == ()


@pytest.mark.parametrize("job_id", ["", "0", "../17", "17_1", "99999999999"])
def test_an_environment_without_a_valid_job_id_is_refused(job_id: str) -> None:
    with pytest.raises(HostError, match="not set by Slurm"):
        Job.of({"SLURM_JOB_ID": job_id, "SLURM_JOB_UID": "0"})


def test_indices_are_read_from_lists_and_ranges() -> None:
    assert indices_of("") == ()
    assert indices_of("0,1,5") == (0, 1, 5)
    assert indices_of("0-2,4") == (0, 1, 2, 4)
    for text in ("GPU-76aef7ff", "0,", "-1", "0;1"):
        with pytest.raises(HostError, match="not a list of device indices"):
            indices_of(text)


def test_an_index_never_stands_for_another_device_than_the_recorded_one() -> None:
    devices = [device("00:06.0-0"), device("00:06.0-1")]
    assert RECORD.addresses((1,), devices) == {1: ["00:06.0-1"]}
    for index, now in ((2, devices), (1, devices[:1]), (0, [device("00:06.0-0", 2048), devices[1]])):
        with pytest.raises(NotFoundError) as caught:
            RECORD.addresses((index,), now)
        assert caught.value.code == SLURM_DEVICES_CHANGED


def test_a_node_without_a_record_has_no_devices_for_slurm(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    assert read_record(paths) is None
    place = Path(paths.slurm_devices)
    place.parent.mkdir(parents=True)
    for text in ("", "[[1]]", '{"a": 1}'):
        place.write_text(text)
        with pytest.raises(HostError) as caught:
            read_record(paths)
        assert caught.value.code == SLURM_DEVICES_CHANGED


def test_the_lines_name_a_range_for_each_gpu() -> None:
    devices = [device("00:06.0-0"), device("00:06.0-1"), device("00:07.0-0")]
    record = record_of(devices, shards=False)
    assert gres_lines(record, "n1", Paths()) == [
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/mps[0-1]",
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/mps2",
    ]
    assert node_lines(record, "n1") == ["GresTypes=gpu", "NodeName=n1 Gres=gpu:mps:3"]


def test_with_shards_an_index_is_a_gpu_with_all_of_its_devices() -> None:
    devices = [device("00:06.0-0"), device("00:06.0-1"), device("00:07.0-0")]
    record = record_of(devices, shards=True)
    assert gres_lines(record, "n1", Paths()) == [
        "NodeName=n1 Name=gpu File=/dev/yunion-mps/gpu0",
        "NodeName=n1 Name=shard Count=2 File=/dev/yunion-mps/gpu0",
        "NodeName=n1 Name=gpu File=/dev/yunion-mps/gpu1",
        "NodeName=n1 Name=shard Count=1 File=/dev/yunion-mps/gpu1",
    ]
    assert node_lines(record, "n1") == ["GresTypes=gpu,shard", "NodeName=n1 Gres=gpu:2,shard:3"]
    assert record.addresses((0, 1), devices) == {0: ["00:06.0-0", "00:06.0-1"], 1: ["00:07.0-0"]}
    with pytest.raises(NotFoundError, match="index 2 is not among the 2"):
        record.addresses((2,), devices)


def test_the_number_of_shards_is_read_from_the_jobs_gres() -> None:
    counts = {"shard:2(IDX:0)": 2, "shard:12(2/4,0/4)": 12, "shard:v100:3(3/4)": 3, "gpu:1(IDX:0)": 0, "": 0}
    assert {gres: shards_of(gres) for gres in counts} == counts
    assert shards_of("license:2,shard:1(IDX:0)") == 1
    assert number_of_shards(Job("17", 0, (0,)), {"shard:2(2/4,0/4)", "shard:2(0/4,2/4)"}) == 2
    assert number_of_shards(Job("17", 0, (0, 1)), {"gpu:2(IDX:0-1)"}) == 0


@pytest.mark.parametrize(
    ("indices", "gres", "why"),
    [
        ((0,), (), "the job ended"),
        ((0,), ("shard:1(IDX:0)", "shard:4(IDX:0)"), "contradictory answers"),
        ((0,), ("gpu:1(IDX:0)", "shard:1(IDX:0)"), "contradictory answers"),
        ((0, 1), ("shard:2(1/4,1/4)",), "shards of 2 GPUs"),
    ],
)
def test_a_job_whose_shards_are_unclear_is_refused(
    indices: tuple[int, ...], gres: tuple[str, ...], why: str
) -> None:
    with pytest.raises(InfeasibleError, match=why):
        number_of_shards(Job("17", 0, indices), gres)


def test_some_devices_of_a_gpu_are_requested_by_count() -> None:
    addresses = ["00:06.0-0", "00:06.0-1"]
    assert Assignment(addresses).request == Assignment(addresses, 2).request == {"devices": addresses}
    assert Assignment(addresses, 1).request == {"count": 1, "gpu": "00:06.0"}
    assert Assignment(addresses, 1).matches(lease("slurm:17", ("00:06.0-1",)))
    assert not Assignment(addresses, 1).matches(lease("slurm:17", ("00:07.0-1",)))
    assert not Assignment(addresses).matches(lease("slurm:17", ("00:06.0-1",)))


def test_only_reserved_devices_are_offered_if_there_are_any() -> None:
    free, pods, ours = device("a-0"), device("b-0", 1, "kubernetes"), device("c-0", 1, "slurm")
    assert devices_for_slurm([free, pods, ours]) == [ours]
    assert devices_for_slurm([free, pods]) == [free]


def test_slurm_gets_devices_of_one_kind_those_of_mps_if_there_are_any() -> None:
    limited: Any = device("00:06.0-0")
    sliced: Any = {**device("00:07.0-0"), "sharing": "time-slicing"}
    assert devices_for_slurm([sliced, limited]) == [limited]
    assert devices_for_slurm([sliced]) == [sliced]


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


def test_only_drains_with_our_prefix_are_ours() -> None:
    reason = drain_reason(Reason('GPU "0" is lost', GPU_LOST))
    assert reason == "yunion-mps: gpu_lost: GPU '0' is lost"
    assert parse_state(f"drained*|{reason}") == NodeState(is_drained=True, reason=reason)
    assert NodeState(is_drained=True, reason=reason).is_ours
    assert not NodeState(is_drained=False, reason=reason).is_ours
    assert not NodeState(is_drained=True, reason="see yunion-mps: gpu_lost: x").is_ours
    assert parse_state("warning: x\nidle|none") == NodeState(is_drained=False, reason="none")
    assert parse_state("") is None
    awaits_reboot = parse_state(f"draining@|{reason}")
    assert awaits_reboot
    assert awaits_reboot.is_drained
    assert not awaits_reboot.is_ours
    assert len(drain_reason(Reason("x" * 900, GPU_LOST))) == 200


def test_only_a_job_that_slurm_is_ending_has_a_time_since_when() -> None:
    text = "17 RUNNING 1795529540\n18 COMPLETING 1795529550\n19 COMPLETING Unknown\nwarning: x\n"
    assert parse_jobs(text) == {"17": None, "18": 1795529550.0, "19": None}
    assert parse_jobs("") == {}


def test_the_defaults_that_a_user_has_set_for_squeue_hide_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If root runs a hook by hand; the lease of a job that is not listed would be released."""
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


def test_a_step_has_the_budget_of_its_devices() -> None:
    content: JobFile = {
        "environment": {"A": "all"},
        "devices": {"0": {"A": "0"}, "1": {"A": "1"}, "2": {"A": "2"}},
        "error": [],
    }
    assert environment_of_task(Job("1"), content) == {"A": "all"}
    assert environment_of_task(Job("1", step_indices=(2, 1, 0)), content) == {"A": "all"}
    assert environment_of_task(Job("1", step_indices=(1,)), content) == {"A": "1"}
    with pytest.raises(InfeasibleError, match="2 of the job's 3 devices"):
        environment_of_task(Job("1", step_indices=(0, 1)), content)
    with pytest.raises(YunionError, match="cannot be combined") as caught:
        environment_of_task(Job("1"), {**content, "error": ["cannot be combined", "request one"]})
    assert caught.value.hint == "request one"
