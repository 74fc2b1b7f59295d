"""What an engine calls before a container starts: the device becomes the container's, or it does not start.

Called as `yunion-mps cdi-hook DEVICE` on the host, with the container's state on standard input (the OCI
runtime specification, "createRuntime"). Every such container waits for it, so
it imports little: of us only the daemon's client.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO
from urllib.parse import quote

from yunion_mps.api.client import Client
from yunion_mps.errors import HostError, NothingFreeError, UnreachableError, YunionError
from yunion_mps.models import ALL
from yunion_mps.paths import Paths

#: How long the daemon may take to answer, and how long one that is being restarted is waited for, in s. Both
#: together are less than the engine waits for us.
_ANSWER_S = 15.0
_AWAY_S = 5.0
_BETWEEN_S = 0.1
#: That of a UUID, a lease's id; no address is so long.
_ID_LENGTH = 36

Json = dict[str, Any]


def main(arguments: list[str], state: TextIO, away_s: float = _AWAY_S) -> int:
    """The exit status; what is wrong is one line, which engines show in theirs."""
    try:
        if len(arguments) != 1:
            raise HostError("cdi-hook is called by container engines alone", "see: yunion-mps run --help")
        _bind(arguments[0], _state(state), Client(Paths.from_environment(), _ANSWER_S), away_s)
    except YunionError as error:
        hint = f" ({error.hint})" if error.hint else ""
        print(f"yunion-mps: {error.message}{hint}", file=sys.stderr)  # noqa: T201 - engines show what we print
        return error.exit_code
    return 0


def _bind(name: str, state: Mapping[str, Any], daemon: Client, away_s: float) -> None:
    _refuse_several(name, state)
    pid = state["pid"]
    path = f"/v1/leases/{quote(name, safe='')}/bind?pid={pid}"
    if len(name) != _ID_LENGTH:
        path = f"/v1/leases?device={quote(name, safe='')}&binding=container&pid={pid}"
    end_s = time.monotonic() + away_s
    while True:
        try:
            daemon.post(path)
        except NothingFreeError as error:
            raise _whose(name, daemon) or error from None
        except UnreachableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_BETWEEN_S)
        else:
            return


def _state(file: TextIO) -> Mapping[str, Any]:
    """The container's state; raises HostError where it is none."""
    try:
        state = json.load(file)
    except (ValueError, RecursionError):
        state = None
    if not (isinstance(state, dict) and isinstance(state.get("pid"), int)):
        raise HostError("the container engine gave no container's state", "is it an OCI runtime's hook?")
    return state


def _refuse_several(name: str, state: Mapping[str, Any]) -> None:
    """Of several devices only the last one's environment would be the container's; raises HostError."""
    environment: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(os.path.join(state["bundle"], "config.json"), encoding="utf-8") as file:
            words = json.load(file)["process"]["env"]
        environment = dict(word.partition("=")[::2] for word in words)
    device, lease = environment.get("YUNION_MPS_DEVICE"), environment.get("YUNION_MPS_LEASE")
    if environment and name != ALL and name != (lease or device):
        beside = f"lease {lease}" if name == device else device or "another"
        what = f"a container has one device, and this one was given {name} beside {beside}"
        raise HostError(what, "several as one budget: yunion-mps run --count")


def _whose(name: str, daemon: Client) -> YunionError | None:
    """Who has the device, None where nobody has it or it cannot be told."""
    with contextlib.suppress(YunionError):
        for lease in daemon.get("/v1/leases")["leases"]:
            if name == ALL or name in lease["devices"]:
                who = lease["container"] or lease["name"] or lease["command"] or lease["user"]
                where = f", PID {lease['pid']}" if lease["pid"] else ""
                taken = ", ".join(lease["devices"])
                what = f"device {taken} is taken: {who} of {lease['user']}{where}"
                return NothingFreeError(what, "see: yunion-mps who")
    return None
