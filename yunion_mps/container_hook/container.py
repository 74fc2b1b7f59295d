"""What the engine says about the container that it is about to start, and why the hook must refuse it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, TextIO

from yunion_mps.core.errors import HostError
from yunion_mps.core.models import ALL, LEASE_VARIABLE
from yunion_mps.host.files import open_regular

_DEVICE_VARIABLE = "YUNION_MPS_DEVICE"
_INSTALL = "install it as a hook of an OCI runtime, which passes the state"
#: The largest configuration of a container that is read; engines write some KiB.
_MAX_CONFIG_BYTES = 16 << 20


def read_state(file: TextIO) -> Mapping[str, Any]:
    """Read the container's state, which has its `pid`; raises HostError if it is not one.

    Source: OCI Runtime Specification, section "State".
    """
    try:
        state = json.load(file)
    except (ValueError, RecursionError, OSError, AttributeError):  # of which the last: it is closed
        state = None
    if not (isinstance(state, dict) and isinstance(state.get("pid"), int)):
        raise HostError("the container engine passed no container state", _INSTALL)
    return state


def read_environment(state: Mapping[str, Any]) -> dict[str, str]:
    """Read the container's variables; raises HostError if they cannot be read: then nothing is certain.

    Source: OCI Runtime Specification, config.json, section "Process"; `bundle` of the state is its directory.
    """
    bundle = state.get("bundle")
    if not isinstance(bundle, str) or not bundle or "\0" in bundle:
        raise HostError("the container engine did not say where the container's configuration is", _INSTALL)
    path = os.path.join(bundle, "config.json")
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValueError  # as for other text that is no configuration
        process = json.loads(text)["process"]
        variables = process.get("env") or []
        return dict(variable.partition("=")[::2] for variable in variables)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a container's configuration"
        hint = "check which runtime the container engine uses, and start the container again"
        raise HostError(f"{path}: cannot be read: {why}", hint) from None


def refuse_missing(name: str, environment: Mapping[str, str]) -> None:
    """Raise HostError if the container has none of a device's variables: CUDA would run without limits."""
    if not environment.get(_DEVICE_VARIABLE) and not environment.get(LEASE_VARIABLE):
        message = f"the container has no variables of device {name}, so nothing would limit it"
        raise HostError(message, f"name the device when you start it: --device yunion.io/mps={name}")


def refuse_several(name: str, environment: Mapping[str, str]) -> None:
    """Raise HostError for several devices: the container would have only the last one's environment."""
    device = environment.get(_DEVICE_VARIABLE)
    lease = environment.get(LEASE_VARIABLE)
    if name not in (ALL, lease or device):
        beside = f"lease {lease}" if name == device else device or "another"
        message = f"a container can have only one device, but this one was given {name} and {beside}"
        raise HostError(message, "to combine several into one budget: yunion-mps run --count")
