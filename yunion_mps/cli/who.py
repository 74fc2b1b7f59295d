"""`yunion-mps who`: who uses which device, or which processes MPS serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import click

from yunion_mps.cli.calls import call_daemon, listed_devices
from yunion_mps.cli.output import (
    Column,
    age_of,
    hint_text,
    incomplete_note,
    mib_text,
    notes,
    show,
    table,
    wide_output_option,
    wrapped,
)
from yunion_mps.core.enums import SERVER_FAULT, UNAVAILABLE
from yunion_mps.core.reasons import (
    CLIENT_WAITING,
    LEASES_PENDING,
    OTHER_USER,
    OVER_BUDGET,
    PROCESS_OUTSIDE_MPS,
    PROCESS_WITHOUT_LEASE,
    SERVER_FAILED,
    hint_of,
)
from yunion_mps.http.operations import GET_CLIENTS, GET_LEASES, GET_STATUS
from yunion_mps.observe.holdings import (
    ID_LENGTH,
    Holding,
    ProcessUse,
    abbreviate_addresses,
    holdings,
    in_container,
    reasons_by_gpu,
)
from yunion_mps.views.overview import fold_problems, with_hints

if TYPE_CHECKING:
    from yunion_mps.answers import (
        ClientListJson,
        DeviceJson,
        MpsClientJson,
        MpsServerJson,
        ProcessFieldsJson,
        QueuedRequestJson,
        StatusProblemJson,
        WaitingClientJson,
    )

#: The codes of problems of jobs and their devices.
_ABOUT_USE = frozenset(
    {
        SERVER_FAILED,
        CLIENT_WAITING,
        PROCESS_OUTSIDE_MPS,
        PROCESS_WITHOUT_LEASE,
        OVER_BUDGET,
        LEASES_PENDING,
    }
)


class Use(TypedDict):
    """A process that uses devices, or a lease without processes."""

    devices: list[str]
    gpu: str | None
    lease: str | None
    name: str | None
    user: str | None
    pid: int | None
    command: str | None
    container: str | None
    since: str | None
    memory_used_mib: int | None
    memory_budget_mib: int | None
    thread_percentage: float | None
    state: str
    memory_peak_mib: int | None
    sm_utilization: int | None


class UseList(TypedDict):
    """What `who` prints as JSON."""

    uses: list[Use]
    waiting: list[QueuedRequestJson]
    problems: list[StatusProblemJson]
    errors: list[str]
    total: int


_FIELDS = tuple(Use.__annotations__)
_COLUMNS = (
    Column("DEVICE", lambda use: use["devices"] or use["gpu"], short=lambda use: _abbreviate(use)),
    Column("USER", "user"),
    Column("PID", "pid", numeric=True),
    Column(
        "MEMORY", lambda use: _memory(use["memory_used_mib"], use["memory_budget_mib"]), numeric=True, drop=1
    ),
    Column("SM %", "thread_percentage", numeric=True, wide=True, drop=4),
    Column("AGE", lambda use: age_of(use["since"]), drop=2),
    Column("STATE", "state"),
    Column("LEASE", lambda use: (use["lease"] or "")[:ID_LENGTH], wide=True, drop=6),
    Column("PEAK", lambda use: mib_text(use["memory_peak_mib"]), numeric=True, wide=True, drop=5),
    Column("UTIL %", "sm_utilization", numeric=True, wide=True, drop=3),
    Column("COMMAND", lambda use: in_container(use["container"], use["command"] or ""), least=8),
)

_CLIENT_FIELDS = (
    "pid", "user", "command", "device", "gpus", "memory_used_mib", "mps", "server", "domain", "started",
    "container", "sm_utilization_by_gpu",
)  # fmt: skip
_CLIENT_COLUMNS = (
    Column("PID", "pid", numeric=True),
    Column("USER", "user"),
    Column("DEVICE", "device"),
    Column("GPUS", "gpus", wide=True, drop=4),
    Column("MEMORY", lambda client: _memory(client["memory_used_mib"], None), numeric=True, drop=1),
    Column("MPS", "mps", wide=True, drop=6),
    Column("SERVER", "server", numeric=True, drop=3),
    Column("DOMAIN", "domain", wide=True, drop=5),
    Column("AGE", lambda client: age_of(client["started"]), drop=2),
    Column("COMMAND", lambda client: in_container(client["container"], client["command"] or ""), least=8),
)


@click.command("who", short_help="Show who uses which device.")
@click.option("--clients", "clients_only", is_flag=True, help="Show MPS clients and servers instead.")
@wide_output_option
def who(clients_only: bool, output: str) -> None:
    """Show who uses which device, with or without a lease.

    Each line is one process, with the memory that it uses and the budget of its device. A lease that no
    process uses yet is idle. A process whose device is unknown is listed under the address of its GPU.
    Problems, such as a job over its budget or outside MPS, follow the table.

    With --clients, the table lists every process that uses a GPU, through MPS or outside it, as the control
    daemons and the driver report them. The MPS servers, and the clients that wait for another user's server,
    follow the table.

    \b
    Examples:
      yunion-mps who
      yunion-mps who --output wide
      yunion-mps who --clients
    """
    if clients_only:
        _show_clients(output)
        return
    problems = call_daemon(GET_STATUS)["problems"]
    devices = listed_devices()
    leases = call_daemon(GET_LEASES)
    clients = call_daemon(GET_CLIENTS, seen=True)
    uses: list[Use] = []
    used: set[str] = set()
    for holding in holdings(devices, leases["leases"], clients["clients"]):
        if holding.in_use:
            uses += _uses(holding)
            used.update(holding.devices)
    answer: UseList = {
        "uses": uses,
        "waiting": leases["waiting"],
        "problems": [problem for problem in problems if problem["code"] in _ABOUT_USE],
        "errors": clients["errors"],
        "total": len(uses),
    }
    unavailable: list[DeviceJson] = []
    for device in devices:
        if device["addr"] in used and device["state"] == UNAVAILABLE:
            unavailable.append(device)
    reasons = reasons_by_gpu(unavailable)
    show(answer, output, _FIELDS, uses, lambda: _who_text(answer, wide=output == "wide") + notes(reasons))


def _uses(holding: Holding) -> list[Use]:
    return [_use(holding, process) for process in holding.holders]


def _use(holding: Holding, process: ProcessUse) -> Use:
    lease = holding.lease
    return {
        "devices": list(holding.devices),
        "gpu": holding.gpu or None,
        "lease": lease["id"] if lease else None,
        "name": lease["name"] if lease else None,
        "user": process.user,
        "pid": process.pid,
        "command": process.command,
        "container": process.container,
        "since": lease["since"] if lease else process.started,
        "memory_used_mib": process.memory_mib,
        "memory_budget_mib": holding.budget_mib,
        "thread_percentage": lease["thread_percentage"] if lease else holding.threads,
        "state": holding.state if holding.available else UNAVAILABLE,
        "memory_peak_mib": holding.peak_mib,
        "sm_utilization": process.sm,
    }


def _who_text(answer: UseList, *, wide: bool) -> str:
    """Format a table, then queued requests, problems with hints, and errors."""
    text = table(_COLUMNS, answer["uses"], none="No devices are in use.", wide=wide)
    text += waiting_text(answer["waiting"])
    for problem, hint in with_hints(fold_problems(answer["problems"])):
        text += wrapped(f"{problem.title}: {problem.text}") + hint_text(hint)
    return text + incomplete_note(answer["errors"])


def waiting_text(waiting: Sequence[QueuedRequestJson]) -> str:
    """Format a line for each queued request, and a hint if another user's jobs delay one."""
    text = ""
    for request in waiting:
        user = f"{request['user']} (PID {request['pid']})" if request["pid"] else request["user"]
        why = request["reason"] or f"requested {request['requested']}"
        text += wrapped(f"Waiting: {user} for {age_of(request['since'])}: {why}")
    if any(request["reason_code"] == OTHER_USER for request in waiting):
        text += hint_text(hint_of(OTHER_USER))
    return text


def _memory(used_mib: int | None, budget_mib: int | None) -> str | None:
    """Format `512 / 5760 MiB`, or `512 MiB` without a budget; None if both are unknown."""
    if budget_mib is None:
        return mib_text(used_mib)
    used = "-" if used_mib is None else str(used_mib)
    return f"{used} / {budget_mib} MiB"


def _abbreviate(use: Use) -> str | None:
    return abbreviate_addresses(use["devices"]) or use["gpu"]


def _show_clients(output: str) -> None:
    answer = call_daemon(GET_CLIENTS)
    show(
        answer, output, _CLIENT_FIELDS, answer["clients"],
        lambda: _clients_text(answer, wide=output == "wide"),
    )  # fmt: skip


def clients_table(clients: Sequence[MpsClientJson], *, wide: bool = False, none: str = "") -> str:
    """Format the clients for people, or `none`; commands in containers follow the container's name."""
    return table(_CLIENT_COLUMNS, clients, none=none, wide=wide)


def _clients_text(answer: ClientListJson, *, wide: bool) -> str:
    """Format failed servers, clients, their servers, waiting clients, and errors."""
    servers = answer["servers"]
    none = "No jobs use the GPUs." if servers else "No processes use the GPUs."  # servers are processes, too
    if answer["errors"]:
        none = "No jobs are known."
    text = ""
    for server in servers:
        if server["state"] == SERVER_FAULT:
            message = "its jobs failed; it accepts new ones after they have exited"
            text += wrapped(f"Fault: {_describe_server(server)}: {message}")
    text += clients_table(answer["clients"], wide=wide, none=none)
    for client in answer["clients"]:
        if client["mps"] is False:
            text += wrapped(f"PID {client['pid']}: uses a GPU outside MPS, so no budget applies")
    for server in servers:
        if server["state"] != SERVER_FAULT:
            text += wrapped(f"{_describe_server(server)}: {server['state'] or 'running'}")
    for waiting in answer["waiting"]:
        text += wrapped(f"Waiting: {_describe_waiting(waiting)}")
    if answer["waiting"]:
        text += hint_text(hint_of(CLIENT_WAITING))
    return text + incomplete_note(answer["errors"])


def _describe_waiting(client: WaitingClientJson) -> str:
    process = f"PID {client['pid']} of {process_user(client)} ({client['command']})"
    server = f"the MPS server of {client['server_user']} (PID {client['server']}, domain {client['domain']})"
    return f"{process} has been waiting {age_of(client['since'])} for {server} to exit"


def _describe_server(server: MpsServerJson) -> str:
    return f"MPS server (PID {server['pid']}) of {process_user(server)}, domain {server['domain']}"


def process_user(process: ProcessFieldsJson) -> str:
    return str(process["user"] or "an unknown user")
