"""The hook's program: it binds the device, or the lease, to the container, and reports what it cannot do.

Its output is shown in runc's error, but not in crun's, which gives hooks /dev/null and reports only their
exit status (github.com/containers/crun, issue 353). So it is also written to the system's log.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from yunion_mps.container_hook.container import read_environment, read_state, refuse_missing, refuse_several
from yunion_mps.containers import MISSING_NODES_ARGUMENT, UNSERVED_ARGUMENT
from yunion_mps.core.enums import JAX_VARIABLE, MEMORY_VARIABLE, WHY_UNENFORCED
from yunion_mps.core.errors import HostError, NothingFreeError, UnreachableError, YunionError
from yunion_mps.core.models import ALL, LEASE_VARIABLE
from yunion_mps.core.paths import Paths
from yunion_mps.core.text import gpus_that_are, printable
from yunion_mps.http.client import DaemonClient
from yunion_mps.http.operations import BIND_LEASE, GET_LEASES, TAKE_LEASE

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseRecordJson


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
#: How much of a container's id engines show, and how much of a message is logged.
_SHORT_ID = 12
_MAX_LENGTH = 1000


def main(arguments: list[str], state: TextIO, retry_s: float = _RESTART_TIMEOUT_S) -> int:
    """Run the hook; return the exit status. A HostError is printed as one line, which some engines repeat.

    `arguments` are a device or the id of a lease and, for a device that cannot be used, UNSERVED_ARGUMENT, or
    MISSING_NODES_ARGUMENT with a message and a hint. `state` is the container's, and `retry_s` is how long to
    retry while the daemon restarts.
    """
    paths = Paths.from_environment()
    container: Mapping[str, Any] = {}
    try:
        missing = arguments[2:] if arguments[1:2] == [MISSING_NODES_ARGUMENT] else []
        is_valid = len(arguments) == 1 or arguments[1:] == [UNSERVED_ARGUMENT] or len(missing) == 2
        if not is_valid:
            raise HostError("cdi-hook can only be called by a container engine", "see: yunion-mps run --help")
        container = read_state(state)
        name = arguments[0]
        if missing:  # before the device is taken
            message, hint = missing
            raise HostError(message, hint)
        environment = read_environment(container)
        refuse_missing(name, environment)
        refuse_several(name, environment)
        lease = _bind(name, container["pid"], DaemonClient(paths, _ANSWER_S), retry_s)
        if len(arguments) > 1:  # its GPU has just returned, and the container's CDI file is outdated
            raise HostError(f"device {name} became available only now", "start the container again")
        _require_environment(environment, lease["environment"], name)
        if lease["unenforced_gpus"]:
            gpus = gpus_that_are(WHY_UNENFORCED[lease["sharing"]], lease["unenforced_gpus"])
            _log(paths, container, f"{name}: budgets are not enforced on {gpus}")
    except YunionError as error:
        line = _one_line(error.message_with_hint)
        print(f"yunion-mps: {line}", file=sys.stderr)  # noqa: T201 - engines show what we print
        _log(paths, container, line)
        return error.exit_code
    return 0


def _bind(name: str, pid: int, daemon: DaemonClient, retry_s: float) -> LeaseRecordJson:
    """Bind the device, or the lease, to the container; return the lease.

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


def _require_environment(environment: Mapping[str, str], leased: Mapping[str, str], name: str) -> None:
    """Raise HostError if the container lacks variables of its lease, because the engine read an old file.

    With another pipe directory, CUDA would find no control daemon, and run without limits.
    """
    for variable, value in leased.items():
        if variable not in _CHANGEABLE and environment.get(variable) != value:
            message = f"device {name} changed while the container was starting"
            raise HostError(message, "start the container again")


def _one_line(text: str) -> str:
    """Return the text, shortened and escaped, because it may quote a command line of any user."""
    return printable(text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…")


def _log(paths: Paths, state: Mapping[str, Any], line: str) -> None:
    """Write the line to the system's log, if there is one."""
    text = _HEAD.format(pid=os.getpid())
    container = _one_line(str(state.get("id", ""))[:_SHORT_ID])
    if container:
        text += f"container {container}: "
    text += line
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.settimeout(0)  # a full log must not delay a container
        log.connect(paths.under(_LOG))
        log.send(text.encode())


def _taken_error(name: str, daemon: DaemonClient) -> YunionError | None:
    """Return the error that names the lease of the device, None if there is none or it cannot be found."""
    with contextlib.suppress(YunionError):
        for lease in daemon.call(GET_LEASES)["leases"]:
            if name == ALL or name in lease["devices"]:
                holder = lease["container"] or lease["name"] or lease["command"] or lease["user"]
                process = f", PID {lease['pid']}" if lease["pid"] else ""
                devices = ", ".join(lease["devices"])
                message = f"device {devices} is in use: {holder} of {lease['user']}{process}"
                return NothingFreeError(message, "see: yunion-mps who")
    return None
