"""A job, its steps and its tasks, as the environment of Slurm's hooks describes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError, InfeasibleError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.slurm.hooks import Hooks, environment_of_task, number_of_shards
from yunion_mps.slurm.job import Job, indices_of
from yunion_mps.slurm.job_file import JobFile
from yunion_mps.slurm.node_state import counts_of

from unit.slurm.slurm_answers import RECORD, write_record

TYPES = ["mps", "time-sliced"]


def test_a_job_is_read_from_the_environment_of_its_hook() -> None:
    environment = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "1000", "SLURM_JOB_GPUS": "0,2"}
    job = Job.of(environment)
    assert job == Job("17", 1000, (0, 2))
    assert job.lease_name == "slurm:17"
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_GPUS": "1"}
    assert Job.of(step) == Job.of({**step, "CUDA_VISIBLE_DEVICES": "0"}) == Job("17", 0, (), (1,))
    assert Job.of({**step, "CUDA_VISIBLE_DEVICES": "1,2"}) == Job("17")  # those of the submitting step


@pytest.mark.parametrize("kind", ["HET", "PACK"])
def test_a_job_has_the_components_of_its_own_heterogeneous_job(kind: str) -> None:
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


@pytest.mark.parametrize("text", ["4" * 5000, "0-99999", ",".join(["0-9999", "10000-19999"]), "²"])
def test_a_list_of_more_indices_than_any_node_has_is_refused(text: str) -> None:
    with pytest.raises(HostError, match=r"(has more than 10000|is not a list of) device indices$") as caught:
        indices_of(text)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("value", ["", "²", "٣", "-1", " 1", "1_0", "4294967295", "9" * 5000, "\udcff\n"])
@pytest.mark.parametrize("name", ["SLURM_JOB_UID", "SLURM_JOB_GID", "SLURM_LOCALID", "SLURM_GPUS_ON_NODE"])
def test_a_malformed_number_of_slurms_is_one_clear_error(name: str, value: str) -> None:
    environment = {
        "SLURM_JOB_ID": "17",
        "SLURMD_TRES_BIND": "gpu:per_task:mps:1",
        "SLURM_GTIDS": "0,1",
        "SLURM_LOCALID": "0",
        "SLURM_GPUS_ON_NODE": "2",
    }
    assert Job.of(environment).task
    with pytest.raises(HostError, match=f"^{name} is .*, not a number from 0 to ") as caught:
        Job.of({**environment, name: value})
    assert len(caught.value.message) < 500
    assert caught.value.message.isprintable()
    if name in environment:
        del environment[name]
        with pytest.raises(HostError, match=f"^{name}: not set by Slurm$"):
            Job.of(environment)


def test_a_step_whose_variables_are_malformed_fails_and_its_user_sees_why(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    write_record(paths, RECORD)
    status, lines = Hooks(paths, {"SLURM_JOB_ID": "17", "SLURM_STEP_GPUS": "x\n"}, print).task_prolog()
    assert status == 1
    assert lines[0].startswith("print yunion-mps: 'x\\n' is not a list of device indices")


@pytest.mark.processes
def test_a_prolog_with_malformed_variables_drains_the_node_with_the_reason(tmp_path: Path) -> None:
    paths, messages = Paths(str(tmp_path)), list[str]()
    write_record(paths, RECORD)
    environment = {"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "0", "SLURM_JOB_GPUS": "GPU-76aef7ff"}
    assert Hooks(paths, environment, messages.append).prolog() == 1
    assert messages[0].startswith("'GPU-76aef7ff' is not a list of device indices")
    assert messages[1].startswith("the node was not drained: "), "there is no Slurm here"
    with pytest.raises(HostError, match="SLURM_JOB_ID: not set by Slurm"):  # called by hand
        Hooks(paths, {}, messages.append).prolog()


def test_numbers_and_types_are_read_from_the_jobs_gres() -> None:
    shards = {"shard:2(IDX:0)": {"": 2}, "shard:12(2/4,0/4)": {"": 12}, "license:2,shard:1(IDX:0,3)": {"": 1}}
    assert {gres: counts_of(gres, "shard") for gres in shards} == shards
    mixed = "gpu:time-sliced:3(IDX:0-2),gpu:1g.10gb:1(IDX:5),gpu:mps:0(IDX:)"
    assert counts_of(mixed, "gpu") == {"time-sliced": 3, "1g.10gb": 1}
    assert counts_of(mixed, "shard") == counts_of("", "gpu") == {}
    forged = f"shard:{'9' * 5000}(IDX:0)"  # a user can write this into the job's name
    assert counts_of(forged, "shard") == {}


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


def test_a_task_inherits_no_budget_of_the_job_that_submitted_it(tmp_path: Path) -> None:
    paths = Paths(str(tmp_path))
    write_record(paths, RECORD)
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
def test_a_task_whose_devices_slurm_does_not_name_is_refused(number: int, hint: str) -> None:
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
