"""Tells later steps of Slurm jobs which of the job's MIG instances were created again or are missing.

An instance that is created again has another UUID. The daemon writes this, because a job's user need not be
able to ask it. It does not change the file that Prolog has written, so that each file has one writer.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from yunion_mps.core.errors import HostError
from yunion_mps.core.models import LEASE_VARIABLE
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import MIG_INSTANCE_GONE
from yunion_mps.host.files import open_regular, read_text, write_atomically
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.slurm.job import job_of

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, LeaseRecordJson

log = logging.getLogger(__name__)

_UUIDS = "CUDA_VISIBLE_DEVICES"


class JobInstances(TypedDict):
    """The current environment of a job's lease, and why it cannot use some of its devices, by address."""

    environment: Mapping[str, str]
    missing: Mapping[str, str]


def write_instances(paths: Paths, leases: Iterable[LeaseRecordJson], devices: Iterable[DeviceJson]) -> None:
    """Write a file for each of Slurm's jobs that has MIG instances, if it changes."""
    reasons: dict[str, str] = {}
    for device in devices:
        if device["reason_code"] == MIG_INSTANCE_GONE:
            reasons[device["addr"]] = device["reason"]
    for lease in leases:
        job = job_of(lease)
        if not job or "MIG-" not in lease["environment"].get(_UUIDS, ""):
            continue
        missing = {addr: reasons[addr] for addr in lease["devices"] if addr in reasons}
        text = json.dumps(JobInstances(environment=lease["environment"], missing=missing))
        path = _path(paths, job)
        if text != read_text(path):
            try:
                write_atomically(path, text)
            except OSError as error:
                log.error("the MIG instances of job %s cannot be written: %s", job, error)


def current_environment(
    paths: Paths, job_id: str, environment: Mapping[str, str], leased: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the environment of all of a job's devices, or of one, with their current UUIDs and addresses.

    `leased` is that of all when Prolog leased them. Raises HostError while an instance is missing, and if
    the daemon's file of the job cannot be read.
    """
    instances = _read_instances(_path(paths, job_id))
    if instances is None or instances["environment"].get(LEASE_VARIABLE) != leased.get(LEASE_VARIABLE):
        return environment  # it has no instances, or was requeued
    of_job = instances["environment"]
    addresses = dict(zip(_split(leased, DEVICE_VARIABLE), _split(of_job, DEVICE_VARIABLE)))
    own = [addresses[addr] for addr in _split(environment, DEVICE_VARIABLE)]
    for addr in own:
        if addr in instances["missing"]:
            message = f"device {addr} is unavailable: {instances['missing'][addr]}"
            raise HostError(message, "start the step later, or requeue the job", MIG_INSTANCE_GONE)
    if len(own) == len(addresses):
        return of_job
    uuids = dict(zip(_split(leased, _UUIDS), _split(of_job, _UUIDS)))
    (uuid,) = _split(environment, _UUIDS)
    current = {name: value.replace(uuid, uuids[uuid]) for name, value in environment.items()}
    return {**current, DEVICE_VARIABLE: ",".join(own)}


def _read_instances(path: str) -> JobInstances | None:
    """Return what the daemon has written about a job; None if there is no file. Raises HostError."""
    try:
        with open_regular(path) as file:
            value = json.load(file)
        return JobInstances(environment=dict(value["environment"]), missing=dict(value["missing"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        raise HostError(message, "start the step later, or requeue the job") from None


def _split(environment: Mapping[str, str], name: str) -> Sequence[str]:
    return environment[name].split(",")


def _path(paths: Paths, job_id: str) -> str:
    return os.path.join(paths.slurm_jobs, f"{job_id}.instances")
