"""The file that Prolog writes for TaskProlog, which runs as the job's user and need not reach the daemon.

Source: slurm.conf(5), Prolog and TaskProlog; Slurm: Prolog and Epilog Guide.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from yunion_mps.core.errors import HostError, NotFoundError
from yunion_mps.core.paths import Paths
from yunion_mps.core.text import parse_number
from yunion_mps.host.files import open_regular, write_atomically
from yunion_mps.slurm.job import Job


class JobFile(TypedDict):
    """The environment of a job's tasks, or why the job cannot have its devices."""

    environment: Mapping[str, str]
    #: The environments of single devices, by index, for the steps of a job that has several.
    devices: Mapping[str, Mapping[str, str]]
    #: The message and its hints, one a line; empty if the job has its devices.
    error: Sequence[str]


def write_job_file(paths: Paths, job: Job, content: JobFile) -> None:
    """Write the job's file; raises HostError.

    It is ours, because its owner could fill the file system, which is memory. The job's group can read it.
    """
    path = _path(paths, job.id)
    gid = _group_of(job)
    try:
        write_atomically(path, json.dumps(content), readable_by=gid)
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror}"
        raise HostError(message, "check the free space: df -h /run") from None


def read_job_file(paths: Paths, job: Job, *, is_required: bool) -> tuple[str, JobFile | None]:
    """Return the job whose file it is, and its content; None if there is no file and it is not required.

    Raises NotFoundError if it cannot be read.
    """
    job_id = job.id
    for component in job.components:
        if os.path.exists(_path(paths, component)):
            job_id = component
            break
    path = _path(paths, job_id)
    try:
        with open_regular(path) as file:
            content = _content_of(json.load(file))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FileNotFoundError) and not is_required:
            return job_id, None
        message = f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = f"requeue the job: scontrol requeue {job.id}; check that slurm.conf sets Prolog"
        raise NotFoundError(message, hint) from None
    return job_id, content


def _content_of(value: Any) -> JobFile:
    """Return the value that Prolog wrote; raises ValueError if it is another one."""
    try:
        devices = {index: _texts(environment) for index, environment in value["devices"].items()}
        content = JobFile(
            environment=_texts(value["environment"]),
            devices=devices,
            error=[str(line) for line in value["error"]],
        )
    except (KeyError, TypeError, AttributeError):
        raise ValueError("it is not a file of Prolog's") from None
    if any(parse_number(index) is None for index in devices):
        raise ValueError("it is not a file of Prolog's")
    return content


def _texts(environment: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in environment.items()}


def _group_of(job: Job) -> int:
    """Return the job's group or, if Slurm does not say it, its user's primary group; raises HostError."""
    if job.gid is not None:
        return job.gid
    try:
        return pwd.getpwuid(job.uid).pw_gid
    except KeyError:
        message = f"job {job.id}: the group of user {job.uid} is not known"
        hint = f"make this host know the user: getent passwd {job.uid} must print a line"
        raise HostError(message, hint) from None


def _path(paths: Paths, job_id: str) -> str:
    return os.path.join(paths.slurm_jobs, f"{job_id}.json")
