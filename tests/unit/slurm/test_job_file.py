"""The file of a job that Prolog writes for TaskProlog."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError, NotFoundError
from yunion_mps.core.paths import Paths
from yunion_mps.slurm.job import Job
from yunion_mps.slurm.job_file import JobFile, read_job_file, write_job_file

from unit.as_user import needs_root

CONTENT: JobFile = {"environment": {"CUDA_VISIBLE_DEVICES": "GPU-a"}, "devices": {}, "error": []}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(str(tmp_path))


def file_of(paths: Paths, job: Job) -> tuple[int, int, str]:
    """Write the job's file; return its owner, group and mode."""
    write_job_file(paths, job, CONTENT)
    found = os.stat(os.path.join(paths.slurm_jobs, f"{job.id}.json"))
    return found.st_uid, found.st_gid, oct(found.st_mode & 0o777)


@needs_root
def test_a_jobs_file_is_roots_and_its_group_can_only_read_it(paths: Paths) -> None:
    """Its owner could make it as large as the file system, which is memory."""
    job = Job.of({"SLURM_JOB_ID": "17", "SLURM_JOB_UID": "2001", "SLURM_JOB_GID": "2002"})
    assert file_of(paths, job) == (0, 2002, "0o640")
    assert read_job_file(paths, job, is_required=True) == ("17", CONTENT)


@needs_root
def test_a_job_without_a_group_has_its_users_primary_group(paths: Paths) -> None:
    nobody = pwd.getpwnam("nobody")
    assert file_of(paths, Job("17", nobody.pw_uid)) == (0, nobody.pw_gid, "0o640")


def test_a_job_whose_group_nothing_tells_gets_no_file(paths: Paths) -> None:
    unknown = Job("17", 4_000_000_001)
    with pytest.raises(HostError, match="the group of user 4000000001 is not known") as caught:
        write_job_file(paths, unknown, CONTENT)
    assert "getent passwd 4000000001" in caught.value.hint
    assert not os.path.exists(paths.slurm_jobs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"environment": [], "devices": {}, "error": []}',
        '{"environment": {}, "devices": {"x": {}}, "error": []}',
        '{"environment": {}, "devices": {}, "error": 7}',
        "[" * 100_000,
    ],
    ids=len,
)
def test_a_damaged_file_of_a_job_is_one_clear_error(paths: Paths, text: str) -> None:
    os.makedirs(paths.slurm_jobs)
    Path(paths.slurm_jobs, "17.json").write_text(text)
    with pytest.raises(NotFoundError, match=r"17\.json: cannot be read: .") as caught:
        read_job_file(paths, Job("17"), is_required=False)
    assert "scontrol requeue 17" in caught.value.hint


def test_a_job_without_a_file_has_no_devices_unless_it_needs_some(paths: Paths) -> None:
    assert read_job_file(paths, Job("17"), is_required=False) == ("17", None)
    with pytest.raises(NotFoundError, match="No such file"):
        read_job_file(paths, Job("17"), is_required=True)
