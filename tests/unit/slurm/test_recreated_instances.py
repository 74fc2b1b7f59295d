"""Steps get the present MIG instances of their job, and the reason if one is missing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import GPU_LOST, MIG_INSTANCE_GONE
from yunion_mps.slurm.recreated_instances import current_environment, write_instances

from unit.slurm.slurm_answers import device, lease

FIRST, SECOND, AGAIN = "00:09.0-g1-0", "00:09.0-g2-0", "00:09.0-g3-0"


def environment(uuids: str, addresses: str, pipe: str = "/p", lease: str = "7c1f") -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": uuids,
        "YUNION_MPS_DEVICE": addresses,
        "CUDA_MPS_PIPE_DIRECTORY": pipe,
        "YUNION_MPS_LEASE": lease,
    }


#: The job's lease when Prolog leased its instances, and after the second was created again.
LEASED = environment("MIG-a,MIG-b", f"{FIRST},{SECOND}")
NOW = environment("MIG-a,MIG-c", f"{FIRST},{AGAIN}")


def missing_device(addr: str, code: str = MIG_INSTANCE_GONE) -> Any:
    return {**device(addr), "reason": "it is gone", "reason_code": code}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(str(tmp_path))


def files(paths: Paths) -> list[str]:
    return sorted(os.listdir(paths.slurm_jobs)) if os.path.exists(paths.slurm_jobs) else []


def test_a_step_has_the_instance_that_was_created_again(paths: Paths) -> None:
    one = environment("MIG-b", SECOND, "/p/MIG-b")
    assert current_environment(paths, "17", one, LEASED) == one, "nothing has happened"
    write_instances(paths, [lease("slurm:17", environment=NOW)], [])
    assert current_environment(paths, "17", LEASED, LEASED) == NOW
    assert current_environment(paths, "17", one, LEASED) == environment("MIG-c", AGAIN, "/p/MIG-c")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"environment": 7, "missing": {}}'])
def test_a_step_whose_instances_are_unknown_fails_with_the_reason(paths: Paths, text: str) -> None:
    os.makedirs(paths.slurm_jobs)
    Path(paths.slurm_jobs, "17.instances").write_text(text)
    with pytest.raises(HostError, match=r"17\.instances: cannot be read: ."):
        current_environment(paths, "17", LEASED, LEASED)


def test_a_step_of_a_job_with_one_device_has_the_current_environment(paths: Paths) -> None:
    leased, now = environment("MIG-b", SECOND), environment("MIG-c", AGAIN, "/q")
    write_instances(paths, [lease("slurm:17", environment=now)], [])
    assert current_environment(paths, "17", leased, leased) == now


def test_a_requeued_job_has_nothing_of_its_former_lease(paths: Paths) -> None:
    write_instances(paths, [lease("slurm:17", environment=NOW)], [])
    requeued = environment("MIG-b", SECOND, lease="9d02")
    assert current_environment(paths, "17", requeued, requeued) == requeued


def test_a_step_fails_only_while_an_instance_of_its_own_is_missing(paths: Paths) -> None:
    held = lease("slurm:17", (FIRST, AGAIN), environment=NOW)
    write_instances(paths, [held], [missing_device(AGAIN)])
    first = environment("MIG-a", FIRST)
    assert current_environment(paths, "17", first, LEASED) == first
    for own in (LEASED, environment("MIG-b", SECOND)):
        with pytest.raises(HostError, match=rf"device {AGAIN} is unavailable: it is gone") as caught:
            current_environment(paths, "17", own, LEASED)
        assert caught.value.code == MIG_INSTANCE_GONE
        assert caught.value.hint == "start the step later, or requeue the job"


def test_only_slurms_jobs_with_instances_have_files(paths: Paths) -> None:
    whole = environment("GPU-a", "00:06.0-0")
    leases = [lease("slurm:17", environment=NOW), lease("slurm:18", environment=whole)]
    leases += [lease("by-hand", environment=NOW), lease("slurm:19", environment={})]
    write_instances(paths, leases, [])
    assert files(paths) == ["17.instances"]


def test_a_file_names_only_the_missing_instances_of_its_own_job(paths: Paths) -> None:
    """A GPU that is lost has a reason, too, but its instances may still be there."""
    held = lease("slurm:17", (FIRST, AGAIN), environment=NOW)
    write_instances(
        paths,
        [held],
        [missing_device(FIRST, GPU_LOST), missing_device(AGAIN), missing_device("00:09.0-g4-0")],
    )
    content = json.loads(Path(paths.slurm_jobs, "17.instances").read_text())
    assert content == {"environment": NOW, "missing": {AGAIN: "it is gone"}}


def test_a_file_is_written_only_if_it_changes(paths: Paths) -> None:
    held = lease("slurm:17", (FIRST, AGAIN), environment=NOW)
    versions = []
    for devices in ([], [], [missing_device(AGAIN)]):
        write_instances(paths, [held], devices)
        versions.append(os.stat(os.path.join(paths.slurm_jobs, "17.instances")).st_ino)
    assert versions[0] == versions[1] != versions[2]


def test_a_file_that_cannot_be_written_is_reported_and_ends_nothing(
    paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    place = Path(paths.slurm_jobs)
    place.parent.mkdir(parents=True)
    place.write_text("not a directory")
    write_instances(paths, [lease("slurm:17", environment=NOW)], [])
    (line,) = caplog.messages
    assert line.startswith("the MIG instances of job 17 cannot be written: ")
