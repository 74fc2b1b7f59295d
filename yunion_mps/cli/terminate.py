"""`yunion-mps terminate`: terminates one process, or all of a lease or device, safely."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import click

from yunion_mps.cli.calls import call_daemon
from yunion_mps.cli.options import complete_target, confirm, refuse_unattended
from yunion_mps.cli.output import cell, output_option, print_notice, show, wrapped
from yunion_mps.core.enums import SIGNAL_KILL, SIGNAL_TERM
from yunion_mps.core.errors import HostError, NotAllowedError, NotFoundError, YunionError
from yunion_mps.core.reasons import NOT_ALLOWED, PROCESSES_UNKNOWN
from yunion_mps.core.text import count
from yunion_mps.http.operations import (
    GET_CLIENTS,
    GET_DEVICE,
    GET_LEASE,
    GET_LEASES,
    TERMINATE_CLIENT,
    TERMINATE_DEVICE,
    TERMINATE_LEASE,
)
from yunion_mps.observe.holdings import (
    ID_LENGTH,
    client_with_pid,
    clients_of_device,
    clients_of_lease,
)

if TYPE_CHECKING:
    from yunion_mps.answers import ClientListJson, TerminationJson, TerminationListJson
    from yunion_mps.observe.holdings import AnyClient

#: Fields of a termination in CSV.
_FIELDS = ("pid", "user", "command", "ended", "how", "reason_code")


@click.command("terminate", short_help="Terminate jobs without harming others.")
@click.argument("target", metavar="LEASE|DEVICE|PID", shell_complete=complete_target)
@click.option(
    "--force",
    is_flag=True,
    help="Send SIGKILL if SIGTERM does not end a process, also to a possible MPS client that is not listed.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@output_option
def terminate_jobs(target: str, force: bool, yes: bool, output: str) -> None:
    """Terminate the processes of a lease or a device, or one process, safely.

    Their MPS server disconnects them first, then they are sent SIGTERM and have 5 seconds to exit. A process
    outside MPS is only sent SIGTERM. Killing an MPS client without disconnecting it first can take down the
    other clients of its server.

    LEASE is a lease's name, its id, or a unique prefix of the id. A lease that was taken by name is kept; to
    release it as well, use yunion-mps lease release --terminate. DEVICE is a device's address or id. A number
    of up to 7 digits is a PID. Users can terminate their own processes; root can terminate all.

    The exit status is 0 if no process of the lease or device is left, 1 if one is still running, and 4 if
    only other users' processes are.

    \b
    Examples:
      yunion-mps terminate 4711
      yunion-mps terminate 4711 --force --yes
      yunion-mps terminate job-17
      yunion-mps terminate 00:06.0-1 --yes --output json
    """
    refuse_unattended(yes)
    if re.fullmatch("[0-9]{1,7}", target):  # a prefix of a lease's id is longer
        answer = _terminate_process(int(target), force=force, yes=yes)
    else:
        answer = _terminate_all(target, force=force, yes=yes)
    ended: list[TerminationJson] = []
    running: list[TerminationJson] = []
    for termination in answer["terminations"]:
        if termination["ended"]:
            ended.append(termination)
        else:
            running.append(termination)
    show(answer, output, _FIELDS, answer["terminations"], lambda: "".join(map(_line, ended)))
    if running:
        raise _error(target, running, force=force)


def _terminate_process(pid: int, *, force: bool, yes: bool) -> TerminationListJson:
    answer = call_daemon(GET_CLIENTS)
    client = client_with_pid(pid, answer)
    if client is None and answer["errors"]:
        if force:
            unknown = "; ".join(answer["errors"])
            print_notice(f"it is not known whether PID {pid} is an MPS client: {unknown}")
            confirm(f"If it is one, other jobs of its MPS server may fail. Terminate PID {pid}?", yes)
        # Without --force, the daemon asks again for a moment, and refuses if that is still not known.
        return _terminations(call_daemon(TERMINATE_CLIENT, pid=pid, signals=_signals(force)))
    if client is None:
        for lease in call_daemon(GET_LEASES)["leases"]:
            if lease["pid"] == pid:
                message = f"PID {pid} uses no GPU, but holds lease {lease['id'][:ID_LENGTH]}"
                raise NotFoundError(message, f"terminate it, and the lease ends as well: kill {pid}")
        raise NotFoundError(f"PID {pid} is not an MPS client", "list the clients: yunion-mps who --clients")
    process = _describe(client)
    outside_mps = f"{process} runs outside MPS, so no MPS server disconnects it first. Terminate it?"
    confirm(outside_mps if client.get("mps") is False else f"Terminate {process}?", yes)
    return _terminations(call_daemon(TERMINATE_CLIENT, pid=pid, signals=_signals(force)))


def _terminations(termination: TerminationJson) -> TerminationListJson:
    return {"terminations": [termination], "total": 1}


def _terminate_all(target: str, *, force: bool, yes: bool) -> TerminationListJson:
    kind, name, choose = _find(target)
    described = f"{kind} {name}"
    answer = call_daemon(GET_CLIENTS)
    for error in answer["errors"]:
        print_notice(f"not all processes are known: {error}")
    clients = choose(answer)
    if not clients and not answer["errors"]:
        print_notice(f"{described} has no processes")
        return {"terminations": [], "total": 0}
    for client in clients:
        print_notice(_describe(client))
    processes = count(len(clients), "process", "processes") if clients else "the processes"
    confirm(f"Terminate {processes} of {described}?", yes)
    if kind == "lease":
        terminated = call_daemon(TERMINATE_LEASE, lease=name, signals=_signals(force))
    else:
        terminated = call_daemon(TERMINATE_DEVICE, id=name, signals=_signals(force))
    if answer["errors"] and not terminated["terminations"]:
        message = f"no process of {described} is known, so none was terminated"
        raise HostError(message, "try again once the MPS server answers", PROCESSES_UNKNOWN)
    return terminated


def _signals(force: bool) -> str:
    return SIGNAL_KILL if force else SIGNAL_TERM


class _Target(NamedTuple):
    #: `lease` or `device`.
    kind: str
    #: The lease's id, or the device's address.
    name: str
    #: Chooses its processes.
    choose: Callable[[ClientListJson], list[AnyClient]]


def _find(target: str) -> _Target:
    try:
        lease = call_daemon(GET_LEASE, lease=target)
        return _Target("lease", lease["id"], partial(clients_of_lease, lease))
    except NotFoundError as error:
        no_lease = error
    try:
        address = call_daemon(GET_DEVICE, id=target)["addr"]
    except NotFoundError as error:
        message = f"{no_lease.message}, and {error.message}"
        raise NotFoundError(
            message, "list leases and devices: yunion-mps who; list processes: yunion-mps who --clients"
        ) from None
    return _Target("device", address, partial(clients_of_device, address))


def _describe(process: AnyClient | TerminationJson) -> str:
    user = cell(process["user"] or "an unknown user")
    return f"PID {process['pid']} ({cell(process['command'] or 'unknown')}) of {user}"


def _line(termination: TerminationJson) -> str:
    return wrapped(f"{_describe(termination)}: {termination['how']}")


def _error(target: str, running: Sequence[TerminationJson], *, force: bool) -> YunionError:
    """Return the error for the processes that are still running."""
    message = "\n".join(f"{_describe(process)}: {process['how']}" for process in running)
    if all(process["reason_code"] == NOT_ALLOWED for process in running):
        return NotAllowedError(message, "retry as root")
    hint = "check whether it has ended: yunion-mps who --clients"
    return YunionError(message, hint if force else f"kill it: yunion-mps terminate {target} --force")
