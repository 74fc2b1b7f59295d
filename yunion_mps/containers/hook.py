"""The OCI hook that engines call before a container starts: it binds the device, or the start fails.

Called as `yunion-mps cdi-hook DEVICE` on the host, with the container's state on standard input (the OCI
runtime specification, "createRuntime"). Every such container waits for it, so it imports little of this
package: only the daemon's client.

Its output is shown in runc's error, but not in crun's, which gives hooks /dev/null and reports only their
exit status (github.com/containers/crun, issue 353). So it is also written to the system's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from yunion_mps.containers import MISSING_NODES_ARGUMENT, UNSERVED_ARGUMENT
from yunion_mps.enums import JAX_VARIABLE, MEMORY_VARIABLE, WHY_UNENFORCED
from yunion_mps.errors import HostError, NothingFreeError, UnreachableError, YunionError
from yunion_mps.host.files import open_regular
from yunion_mps.http.client import DaemonClient
from yunion_mps.http.operations import BIND_LEASE, GET_LEASES, TAKE_LEASE
from yunion_mps.models import ALL, LEASE_VARIABLE
from yunion_mps.paths import Paths
from yunion_mps.text import gpus_that_are, printable

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecord


#: The timeout of each request, and how long to retry while the daemon restarts, in s. Their sum is less than
#: the engine's timeout of the hook.
_ANSWER_S = 15.0
_RESTART_TIMEOUT_S = 5.0
_RETRY_INTERVAL_S = 0.1
#: The length of a lease's id, a UUID; addresses are shorter.
_ID_LENGTH = 36
#: Where syslog(3) writes to, and the head of a line there: a warning of the facility user (RFC 3164).
_LOG = "/dev/log"
_HEAD = "<12>yunion-mps[{pid}]: "
#: Variables of a lease that a container need not have.
_CHANGEABLE = (LEASE_VARIABLE, MEMORY_VARIABLE, JAX_VARIABLE)
_DEVICE_VARIABLE = "YUNION_MPS_DEVICE"
_INSTALL = "install it as a hook of an OCI runtime, which passes the state"
#: The largest configuration of a container that is read; engines write some KiB.
_MAX_CONFIG_BYTES = 16 << 20
#: How much of a container's id engines show, and how much of a message is logged.
_SHORT_ID = 12
_MAX_LENGTH = 1000


def main(arguments: list[str], state: TextIO, retry_s: float = _RESTART_TIMEOUT_S) -> int:
    """Run the hook; returns the exit status. An error is one line, which some engines include in theirs."""
    paths = Paths.from_environment()
    container: Mapping[str, Any] = {}
    try:
        missing = arguments[2:] if arguments[1:2] == [MISSING_NODES_ARGUMENT] else []
        if len(arguments) != 1 and arguments[1:] != [UNSERVED_ARGUMENT] and len(missing) != 2:
            raise HostError("cdi-hook can only be called by a container engine", "see: yunion-mps run --help")
        container, name = _read_state(state), arguments[0]
        if missing:  # before the device is taken
            raise HostError(*missing)
        environment = _read_environment(container)
        _refuse_missing(name, environment)
        _refuse_several(name, environment)
        lease = _bind(name, container["pid"], DaemonClient(paths, _ANSWER_S), retry_s)
        if len(arguments) > 1:  # its GPU has just returned, and the container's CDI file is outdated
            raise HostError(f"device {name} became available only now", "start the container again")
        needed = {key: value for key, value in lease["environment"].items() if key not in _CHANGEABLE}
        # The engine has read an outdated file: with another pipe directory, CUDA would find no control
        # daemon, and run without limits.
        if any(environment.get(key) != value for key, value in needed.items()):
            raise HostError(
                f"device {name} changed while the container was starting", "start the container again"
            )
        if lease["unenforced_gpus"]:
            which = gpus_that_are(WHY_UNENFORCED[lease["sharing"]], lease["unenforced_gpus"])
            _log(paths, container, f"{name}: budgets are not enforced on {which}")
    except YunionError as error:
        line = _one_line(error.message_with_hint)
        print(f"yunion-mps: {line}", file=sys.stderr)  # noqa: T201 - engines show what we print
        _log(paths, container, line)
        return error.exit_code
    return 0


def _bind(name: str, pid: int, daemon: DaemonClient, retry_s: float) -> LeaseRecord:
    """Bind the device, or the lease, to the container; returns the lease.

    The request is retried if the daemon restarts, because its answer may have been lost.
    """
    key = os.urandom(16).hex()
    end_s = time.monotonic() + retry_s
    while True:
        try:
            if len(name) == _ID_LENGTH:
                return daemon.call(BIND_LEASE, lease=name, pid=pid)
            # An engine's options name a device, and have no place for --allow-unlimited.
            return daemon.call(
                TAKE_LEASE,
                devices=[name],
                allow_unlimited=True,
                holder={"kind": "container", "pid": pid},
                idempotency_key=key,
            )
        except NothingFreeError as error:
            raise _taken_error(name, daemon) or error from None
        except UnreachableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_INTERVAL_S)


def _read_state(file: TextIO) -> Mapping[str, Any]:
    try:
        state = json.load(file)
    except (ValueError, RecursionError, OSError, AttributeError):  # of which the last: it is closed
        state = None
    if not (isinstance(state, dict) and isinstance(state.get("pid"), int)):
        raise HostError("the container engine passed no container state", _INSTALL)
    return state


def _refuse_several(name: str, environment: Mapping[str, str]) -> None:
    """Raise HostError for several devices: the container would have only the last one's environment."""
    device, lease = environment.get(_DEVICE_VARIABLE), environment.get(LEASE_VARIABLE)
    if name not in (ALL, lease or device):
        beside = f"lease {lease}" if name == device else device or "another"
        what = f"a container can have only one device, but this one was given {name} and {beside}"
        raise HostError(what, "to combine several into one budget: yunion-mps run --count")


def _read_environment(state: Mapping[str, Any]) -> dict[str, str]:
    """The container's variables; raises HostError if they cannot be read, because then nothing is certain."""
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


def _refuse_missing(name: str, environment: Mapping[str, str]) -> None:
    """Raise HostError if the container has none of a device's variables: CUDA would run without limits."""
    if not environment.get(_DEVICE_VARIABLE) and not environment.get(LEASE_VARIABLE):
        what = f"the container has no variables of device {name}, so nothing would limit it"
        raise HostError(what, f"name the device when you start it: --device yunion.io/mps={name}")


def _one_line(text: str) -> str:
    """The text, shortened and escaped, because it may quote a command line of any user."""
    return printable(text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…")


def _log(paths: Paths, state: Mapping[str, Any], line: str) -> None:
    container = _one_line(str(state.get("id", ""))[:_SHORT_ID])
    text = _HEAD.format(pid=os.getpid()) + (f"container {container}: " if container else "") + line
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.settimeout(0)  # a full log must not delay a container
        log.connect(paths.under(_LOG))
        log.send(text.encode())


def _taken_error(name: str, daemon: DaemonClient) -> YunionError | None:
    """The error that names the lease of the device, None if there is none or it cannot be found."""
    with contextlib.suppress(YunionError):
        for lease in daemon.call(GET_LEASES)["leases"]:
            if name == ALL or name in lease["devices"]:
                who = lease["container"] or lease["name"] or lease["command"] or lease["user"]
                where = f", PID {lease['pid']}" if lease["pid"] else ""
                taken = ", ".join(lease["devices"])
                what = f"device {taken} is in use: {who} of {lease['user']}{where}"
                return NothingFreeError(what, "see: yunion-mps who")
    return None
