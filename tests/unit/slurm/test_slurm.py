"""The pure parts of Slurm's hooks: the job in the environment, indices, lines, leases and drain reasons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.errors import HostError, InfeasibleError, NotFoundError, YunionError
from yunion_mps.paths import Paths
from yunion_mps.reasons import GPU_LOST, MIG_INSTANCE_GONE, SLURM_DEVICES_CHANGED, Reason
from yunion_mps.slurm.devices import (
    Record,
    RecordedDevice,
    devices_for_slurm,
    gres_lines,
    node_lines,
    read_record,
    record_of,
)
from yunion_mps.slurm.hooks import Hooks, JobFile, environment_of_task, number_of_shards
from yunion_mps.slurm.instances import present_environment, write_instances
from yunion_mps.slurm.job import Job, indices_of, is_about_to_be_killed, job_of, stale_leases
from yunion_mps.slurm.leases import Assignment, held_outside
from yunion_mps.slurm.node import NodeState, SlurmNode, counts_of, drain_reason, parse_jobs, parse_state

TYPES = ["mps", "time-sliced"]
RECORD = Record(False, [RecordedDevice("00:06.0-0", 4096), RecordedDevice("00:06.0-1", 4096)])


def device(addr: str, memory_mib: int = 4096, **fields: str) -> Any:
    default = {"reserved_for": None, "sharing": "mps", "mig_profile": None}
    return {"addr": addr, "memory_mib": memory_mib, **default, **fields}


def instance(addr: str, profile: str = "1g.10gb") -> Any:
    return device(addr, 9984, sharing="none", mig_profile=profile)


def sliced(addr: str) -> Any:
    return device(addr, sharing="time-slicing")


#: A GPU of each kind.
MIXED = [
    device("00:06.0-0"),
    device("00:06.0-1"),
    sliced("00:07.0-0"),
    *[instance(f"00:08.0-g{number}") for number in (9, 10)],
    instance("00:08.0-g11", "1g.10gb+me"),
    device("00:09.0-g1-0", mig_profile="3g.40gb"),
]


def lease(name: str | None, devices: tuple[str, ...] = ("00:06.0-0",), **fields: Any) -> Any:
    default = {"binding": "name", "expires": None, "user": "root", "pid": None, "id": "7c1f0e7a"}
    return {"name": name, "devices": list(devices), **default, **fields}


def record(paths: Paths, content: Record) -> None:
    place = Path(paths.slurm_devices)
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(content._asdict()))


def test_a_job_is_read_from_the_environment_of_its_hook() -> None:
    environment = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "1000", "SLURM_JOB_GPUS": "0,2"}
    job = Job.of(environment)
    assert job == Job("17", 1000, (0, 2))
    assert job.lease_name == "slurm:17"
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_GPUS": "1"}
    assert Job.of(step) == Job.of({**step, "CUDA_VISIBLE_DEVICES": "0"}) == Job("17", 0, (), (1,))
    assert Job.of({**step, "CUDA_VISIBLE_DEVICES": "1,2"}) == Job("17")  # those of the submitting step


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
    changed = [[device("00:06.0-0", 2048)], [sliced("00:06.0-0")], [instance("00:06.0-0")]]
    for index, now in ((2, devices), (1, devices[:1]), *((0, other) for other in changed)):
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


def test_a_record_keeps_the_types_and_without_types_all_were_mps(tmp_path: Path) -> None:
    """As gres.conf of the version that recorded none says."""
    paths = Paths(str(tmp_path))
    record(paths, record_of(MIXED, shards=False))
    assert read_record(paths) == record_of(MIXED, shards=False)
    Path(paths.slurm_devices).write_text(
        '{"shards": false, "devices": [["00:06.0-0", 4096], ["00:07.0-0", 4096]]}'
    )
    former = read_record(paths)
    assert former
    assert former.addresses((0,), MIXED) == {0: ["00:06.0-0"]}
    with pytest.raises(NotFoundError, match="was mps with 4096 MiB, but is now time-sliced") as caught:
        former.addresses((1,), MIXED)
    assert caught.value.code == SLURM_DEVICES_CHANGED


def test_each_way_of_sharing_and_each_mig_profile_is_a_type() -> None:
    record = record_of(MIXED, shards=False)
    assert gres_lines(record, "n1", Paths()) == [
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/mps[0-1]",
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/mps2",
        "NodeName=n1 Name=gpu Type=time-sliced File=/dev/yunion-mps/time-sliced3",
        "NodeName=n1 Name=gpu Type=1g.10gb File=/dev/yunion-mps/1g.10gb[4-5]",
        "NodeName=n1 Name=gpu Type=1g.10gb.me File=/dev/yunion-mps/1g.10gb.me6",
    ]
    gres = "gpu:mps:3,gpu:time-sliced:1,gpu:1g.10gb:2,gpu:1g.10gb.me:1"
    assert node_lines(record, "n1") == ["GresTypes=gpu", f"NodeName=n1 Gres={gres}"]
    record.require_numbers(counts_of(gres, "gpu"))


@pytest.mark.parametrize("gres", ["gpu:time-sliced:1,gpu:mps:3", "gpu:mps:3", "gpu:4", "(null)"])
def test_slurm_conf_must_list_the_types_in_the_recorded_order(gres: str) -> None:
    """Slurm counts the devices type by type, in the order of the node's line."""
    record = record_of([*MIXED[:3], MIXED[-1]], shards=False)
    with pytest.raises(NotFoundError, match="but needs gpu:mps:3,gpu:time-sliced:1 in this order") as caught:
        record.require_numbers(counts_of(gres, "gpu"))
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
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/gpu0",
        "NodeName=n1 Name=shard Count=2 File=/dev/yunion-mps/gpu0",
        "NodeName=n1 Name=gpu Type=mps File=/dev/yunion-mps/gpu1",
        "NodeName=n1 Name=shard Count=1 File=/dev/yunion-mps/gpu1",
    ]
    assert node_lines(record, "n1") == ["GresTypes=gpu,shard", "NodeName=n1 Gres=gpu:mps:2,shard:3"]
    assert record.addresses((0, 1), devices) == {0: ["00:06.0-0", "00:06.0-1"], 1: ["00:07.0-0"]}
    with pytest.raises(NotFoundError, match="index 2 is not among the 2"):
        record.addresses((2,), devices)


def test_a_mig_instance_that_is_one_device_has_no_shards() -> None:
    record = record_of([sliced("00:07.0-0"), sliced("00:07.0-1"), instance("00:08.0-g9")], shards=True)
    assert gres_lines(record, "n1", Paths())[2:] == [
        "NodeName=n1 Name=gpu Type=1g.10gb File=/dev/yunion-mps/gpu1"
    ]
    assert node_lines(record, "n1")[1] == "NodeName=n1 Gres=gpu:time-sliced:1,gpu:1g.10gb:1,shard:2"


def test_all_shards_have_to_be_shared_in_the_same_way() -> None:
    for devices, found in ((MIXED, "mps and time-sliced"), ([instance("00:08.0-g9")], "none")):
        with pytest.raises(HostError, match=f"there are {found}") as caught:
            record_of(devices, shards=True)
        assert "omit --shards" in caught.value.hint


def test_numbers_and_types_are_read_from_the_jobs_gres() -> None:
    shards = {"shard:2(IDX:0)": {"": 2}, "shard:12(2/4,0/4)": {"": 12}, "license:2,shard:1(IDX:0,3)": {"": 1}}
    assert {gres: counts_of(gres, "shard") for gres in shards} == shards
    mixed = "gpu:time-sliced:3(IDX:0-2),gpu:1g.10gb:1(IDX:5),gpu:mps:0(IDX:)"
    assert counts_of(mixed, "gpu") == {"time-sliced": 3, "1g.10gb": 1}
    assert counts_of(mixed, "shard") == counts_of("", "gpu") == {}


def test_a_job_has_shards_or_devices_of_one_type() -> None:
    assert number_of_shards(Job("17", 0, (0,)), {"shard:2(2/4,0/4)", "shard:2(0/4,2/4)"}, TYPES) == 2
    assert number_of_shards(Job("17", 0, (0, 1)), {"gpu:mps:2(IDX:0-1),gpu:time-sliced:0(IDX:)"}, TYPES) == 0
    array = {"gpu:mps:1(IDX:0)", "gpu:time-sliced:1(IDX:4)"}  # Slurm shows all jobs of an array
    assert number_of_shards(Job("17", 0, (4,)), array, TYPES) == 0


@pytest.mark.parametrize(
    ("indices", "gres", "why"),
    [
        ((0,), (), "the job ended"),
        ((0,), ("shard:1(IDX:0)", "shard:4(IDX:0)"), "contradictory answers"),
        ((0,), ("gpu:1(IDX:0)", "shard:1(IDX:0)"), "contradictory answers"),
        ((0, 1), ("shard:2(1/4,1/4)",), "shards of 2 GPUs"),
        ((0, 3), ("gpu:mps:1(IDX:0),gpu:time-sliced:1(IDX:3)",), "1 of mps, 1 of time-sliced"),
        ((3,), ("gpu:mps:1(IDX:0),gpu:time-sliced:1(IDX:3)",), "several types"),  # as 24.11 tells Prolog
    ],
)
def test_a_job_whose_devices_are_unclear_is_refused(
    indices: tuple[int, ...], gres: tuple[str, ...], why: str
) -> None:
    with pytest.raises(InfeasibleError, match=why):
        number_of_shards(Job("17", 0, indices), gres, TYPES)


def test_some_devices_of_a_gpu_are_requested_by_count() -> None:
    addresses = ["00:06.0-0", "00:06.0-1"]
    assert Assignment(addresses).request == Assignment(addresses, 2).request == {"devices": addresses}
    assert Assignment(addresses, 1).request == {"count": 1, "gpu": "00:06.0"}
    assert Assignment(addresses, 1).matches(lease("slurm:17", ("00:06.0-1",)))
    assert not Assignment(addresses, 1).matches(lease("slurm:17", ("00:07.0-1",)))
    assert not Assignment(addresses).matches(lease("slurm:17", ("00:06.0-1",)))


def test_only_reserved_devices_are_offered_if_there_are_any() -> None:
    free, pods, ours = (
        device("a-0"),
        device("b-0", reserved_for="kubernetes"),
        device("c-0", reserved_for="slurm"),
    )
    assert devices_for_slurm([free, pods, ours]) == [ours]
    assert devices_for_slurm([free, pods]) == [free]


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


def test_a_task_inherits_no_budget_of_the_job_that_submitted_it(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    record(paths, RECORD)
    job = {"SLURM_JOB_ID": "17"}
    inherited = {"YUNION_MPS_MEMORY_MIB": "4096", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25"}
    lines = Hooks(paths, {**job, **inherited}, print).task_prolog()[1]
    assert lines == [f"unset {name}" for name in inherited]
    own = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}  # set by its user
    assert Hooks(paths, {**job, **own}, print).task_prolog() == (0, [])


def test_a_step_has_the_budget_of_its_devices() -> None:
    content: JobFile = {
        "environment": {"A": "all"},
        "devices": {"0": {"A": "0"}, "1": {"A": "1"}, "2": {"A": "2"}},
        "error": [],
    }
    assert environment_of_task(Job("1"), content) == {"A": "all"}
    assert environment_of_task(Job("1", step_indices=(2, 1, 0)), content) == {"A": "all"}
    assert environment_of_task(Job("1", step_indices=(1,)), content) == {"A": "1"}
    assert environment_of_task(Job("1", step_indices=(3,)), content) == {"A": "all"}
    with pytest.raises(InfeasibleError, match="2 of the job's 3 devices"):
        environment_of_task(Job("1", step_indices=(0, 1)), content)
    with pytest.raises(YunionError, match="cannot be combined") as caught:
        environment_of_task(Job("1"), {**content, "error": ["cannot be combined", "request one"]})
    assert caught.value.hint == "request one"


@pytest.mark.parametrize(
    ("binding", "local_id", "on_node", "own"),
    [
        ("gpu:per_task:mps:1", "0", "4", "0"),
        ("gpu:per_task:mps:1", "3", "4", "3"),
        ("gpu:per_task:mps", "1", "4", "1"),
        ("gpu:per_task:2g.20gb:1", "1", "4", "1"),
        ("gpu:per_task:2g.20gb:4", "0", "4", "all"),
        ("gpu:per_task:1g.10gb:1", "1", "4", "2"),
        ("gpu:per_task:1", "1", "4", "2"),
        ("gpu:single:1", "1", "4", "2"),
        ("gres/gpu:per_task:1", "1", "4", "2"),
    ],
)
def test_a_task_has_its_devices_if_slurm_reads_the_type_as_their_number(
    binding: str, local_id: str, on_node: str, own: str
) -> None:
    """Slurm says 2, which is right only if the number at the beginning of the type is the number."""
    devices = {index: {"A": index} for index in "0123"}
    content: JobFile = {"environment": {"A": "all"}, "devices": devices, "error": []}
    task = {"SLURM_GTIDS": "4,5,6,7", "SLURM_LOCALID": local_id, "SLURM_GPUS_ON_NODE": on_node}
    environment = {"SLURM_JOB_ID": "17", "SLURM_STEP_GPUS": "2", "SLURMD_TRES_BIND": binding, **task}
    assert environment_of_task(Job.of(environment), content) == {"A": own}
    batch = {**environment, "SLURM_GTIDS": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}  # inherited from a task
    assert environment_of_task(Job.of(batch), content) == {"A": "all"}


@pytest.mark.parametrize(
    ("number", "hint"), [(1, "--gpu-bind=single:1"), (2, "srun --exact -n1 --gres=gpu:mps:2")]
)
def test_a_task_whose_devices_slurm_does_not_tell_is_refused(number: int, hint: str) -> None:
    content: JobFile = {"environment": {}, "devices": {index: {} for index in "0123"}, "error": []}
    environment = {
        "SLURM_JOB_ID": "17",
        "SLURMD_TRES_BIND": f"gpu:per_task:mps:{number}",
        "SLURM_GTIDS": "0,1",
        "SLURM_LOCALID": "0",
        "SLURM_GPUS_ON_NODE": "2",
    }
    with pytest.raises(InfeasibleError, match="did not assign the task its devices") as caught:
        environment_of_task(Job.of(environment), content)
    assert hint in caught.value.hint


def test_a_step_has_the_instance_that_was_created_again(tmp_path: Path) -> None:
    def environment(uuids: str, addresses: str, pipe: str, lease: str = "7c1f") -> dict[str, str]:
        return {
            "CUDA_VISIBLE_DEVICES": uuids,
            "YUNION_MPS_DEVICE": addresses,
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "YUNION_MPS_LEASE": lease,
        }

    paths = Paths(str(tmp_path))
    leased = environment("MIG-a,MIG-b", "00:09.0-g1-0,00:09.0-g2-0", "/p")
    one = environment("MIG-b", "00:09.0-g2-0", "/p/MIG-b")
    assert present_environment(paths, "17", one, leased) == one, "nothing has happened"
    now = environment("MIG-a,MIG-c", "00:09.0-g1-0,00:09.0-g3-0", "/p")
    write_instances(paths, [lease("slurm:17", environment=now)], [])
    assert present_environment(paths, "17", leased, leased) == now
    assert present_environment(paths, "17", one, leased) == environment("MIG-c", "00:09.0-g3-0", "/p/MIG-c")
    requeued = {**one, "YUNION_MPS_LEASE": "9d02"}
    assert present_environment(paths, "17", requeued, requeued) == requeued, "it is of the former lease"
    gone = {"addr": "00:09.0-g3-0", "reason": "it is gone", "reason_code": MIG_INSTANCE_GONE}
    held = lease("slurm:17", ("00:09.0-g1-0", "00:09.0-g3-0"), environment=now)
    write_instances(paths, [held], [device("x", reason="", reason_code="") | gone])
    first = environment("MIG-a", "00:09.0-g1-0", "/p")
    assert present_environment(paths, "17", first, leased) == first, "the other instance is there"
    with pytest.raises(HostError, match=r"device 00:09\.0-g3-0 is unavailable: it is gone"):
        present_environment(paths, "17", one, leased)
