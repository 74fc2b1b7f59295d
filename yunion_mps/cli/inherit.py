"""The environment of `run --inherit`: taken from the current lease of the devices that ours names.

Ours may be incomplete, as after sudo or `env -i`, or out of date. The daemon has the current one, but cannot
always be reached: the user of a Slurm job may not be in its group, and a container may not have its socket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from yunion_mps.cli.calls import call_daemon
from yunion_mps.core.addresses import gpu_of, is_on_instance, physical_gpu
from yunion_mps.core.enums import DEVICE_VARIABLES, JAX_VARIABLE, MEMORY_VARIABLE
from yunion_mps.core.errors import HostError, NotFoundError, YunionError
from yunion_mps.core.reasons import MIG_FOREIGN_INSTANCE, MIG_INSTANCE_GONE, hint_of
from yunion_mps.http.operations import GET_DEVICE, GET_LEASE
from yunion_mps.http.transport import refuse_unreachable

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseDetailsJson

_DEVICE = "YUNION_MPS_DEVICE"
_LEASE = "YUNION_MPS_LEASE"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
#: Codes of devices whose MIG instance no longer exists.
_MISSING = (MIG_INSTANCE_GONE, MIG_FOREIGN_INSTANCE)
_WITHOUT = "request one, in Slurm: srun --gres=gpu:mps:1; or lease one: omit --inherit"


def inherited_devices() -> Mapping[str, str]:
    """Return all variables of the devices that our environment names.

    Raises HostError unless they are still leased and can be reached, and every limit is known.
    """
    if not os.environ.get(_DEVICE):
        raise HostError(f"--inherit: this environment has no device: {_DEVICE} is not set", _WITHOUT)
    if name := os.environ.get(_LEASE):
        try:
            lease = call_daemon(GET_LEASE, lease=name)
        except NotFoundError:
            text = (
                f"--inherit: lease {name} of this environment has ended, so another job may have its devices"
            )
            raise HostError(text, _WITHOUT) from None
        except YunionError as error:
            environment = _own_environment(f"; the lease cannot be read: {error.message}")
        else:
            environment = _current_environment(lease)
    else:
        environment = _own_environment("")
        _refuse_destroyed(environment)
    refuse_unreachable(environment)
    return environment


def _own_environment(why_own: str) -> Mapping[str, str]:
    """Return our variables of the devices; raises HostError if a limit is missing."""
    own = {name: os.environ[name] for name in (*DEVICE_VARIABLES, JAX_VARIABLE) if name in os.environ}
    if missing := [name for name in _required(own) if not own.get(name)]:
        text = f"--inherit: this environment lacks {', '.join(missing)}, so the command would have no limits"
        hint = "keep the job's environment (sudo --preserve-env, su without -, no env -i)"
        raise HostError(f"{text}{why_own}", hint)
    return own


def _required(own: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that hold the limits of the devices: without MPS, those of time-slicing or MIG."""
    yield _VISIBLE
    are_whole_instances = all(gpu_of(address) == address for address in own[_DEVICE].split(","))
    if MEMORY_VARIABLE not in own and not are_whole_instances:
        yield from (_PIPE_DIRECTORY, *_LIMITS)


def _current_environment(lease: LeaseDetailsJson) -> Mapping[str, str]:
    """Return the environment of all of the lease's devices, or of the one that ours names, as in a step.

    Raises HostError if a MIG instance is missing, or if ours names devices that have no common budget.
    """
    names = os.environ[_DEVICE].split(",")
    if len(names) == len(lease["devices"]):  # a device on an instance created again may have a new address
        _refuse_missing(lease, lease["reason_code"], lease["reason"])
        return _restrict(lease["environment"])
    hint = f"set {_DEVICE} to one of them or to all: {','.join(lease['devices'])}"
    if len(names) > 1:
        text = f"--inherit: {_DEVICE} names {len(names)} of the {len(lease['devices'])} devices of this lease"
        raise HostError(text, hint)
    if names[0] not in lease["devices"]:
        if is_on_instance(names[0]):
            text = "--inherit: the MIG instance of this environment was destroyed and replaced by another"
            raise HostError(text, "start the job's step again", MIG_INSTANCE_GONE)
        raise HostError(f"--inherit: {names[0]} is not among the devices of lease {lease['id']}", hint)
    device = call_daemon(GET_DEVICE, id=names[0])
    _refuse_missing(lease, device["reason_code"], device["reason"])
    if not device["client_environment"]:
        text = f"--inherit: device {names[0]} is unavailable: {device['reason']}"
        raise HostError(text, "see: yunion-mps status", device["reason_code"])
    return {**device["client_environment"], _LEASE: lease["id"]}


def _refuse_destroyed(environment: Mapping[str, str]) -> None:
    """Raise HostError if a MIG instance of an environment without a lease no longer exists.

    If the daemon cannot be reached, nothing is refused.
    """
    visible = environment[_VISIBLE].split(",")
    for name in filter(is_on_instance, environment[_DEVICE].split(",")):
        try:
            device = call_daemon(GET_DEVICE, id=name)
        except NotFoundError:
            device = None
        except YunionError:  # the daemon cannot be reached
            return
        if device is None or device["gpu_uuid"] not in visible or device["reason_code"] in _MISSING:
            message = f"--inherit: the MIG instance of {name} was destroyed"
            hint = f"if a new one exists, use its environment: yunion-mps env {name}"
            raise HostError(message, hint, MIG_INSTANCE_GONE)


def _refuse_missing(lease: LeaseDetailsJson, code: str, reason: str) -> None:
    if code in _MISSING:
        hint = hint_of(code, gpu=physical_gpu(lease["devices"][0]), lease=lease["id"])
        raise HostError(f"--inherit: {reason}", hint, code)


def _restrict(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with only the GPUs that ours names; with MPS, with all, as the limits require.

    Raises HostError if ours names fewer GPUs than the lease has, and one that it does not have: an instance
    that no longer exists.
    """
    chosen = os.environ.get(_VISIBLE, "")
    leased = environment[_VISIBLE]
    if _PIPE_DIRECTORY in environment or not chosen:
        return environment
    names = chosen.split(",")
    known = leased.split(",")
    unknown = sorted(set(names) - set(known))
    if unknown and len(names) >= len(known):
        return environment  # ours is out of date, and restricts nothing
    if unknown:
        message = f"--inherit: {_VISIBLE} names {', '.join(unknown)}, but the GPUs of this lease are {leased}"
        raise HostError(message, f"set {_VISIBLE} to one of them, or unset it to use all", MIG_INSTANCE_GONE)
    return {**environment, _VISIBLE: chosen}
