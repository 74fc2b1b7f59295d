"""`yunion-mps clients`: who uses the GPUs through MPS; `clients terminate` ends one safely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.common import call, complete_pid, confirm, refuse_unattended
from yunion_mps.cli.output import cell, date_and_time, draw, fields, notes, output_option, show
from yunion_mps.cli.root import SuggestingGroup
from yunion_mps.errors import NotFoundError, YunionError
from yunion_mps.http.operations import GET_CLIENTS, TERMINATE_CLIENT
from yunion_mps.overview.holdings import in_container
from yunion_mps.reasons import CLIENT_WAITING, hint_of

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, MpsClient, MpsServer, ProcessFields, WaitingClient


COLUMNS = {
    "PID": "pid",
    "User": "user",
    "Command": "command",
    "Device": "device",
    "GPUs": "gpus",
    "Memory_MiB": "memory_used",
    "Server": "server",
    "Domain": "domain",
    "Started": "started",
    "Container": "container",
}
_DROP = ("Domain", "Server", "Started", "GPUs", "Memory_MiB", "Device")
_FAULT = "FAULT"
#: PID_MAX_LIMIT of the kernel (include/linux/threads.h).
_MAX_PID = 4_194_304


@click.group(
    "clients",
    cls=SuggestingGroup,
    invoke_without_command=True,
    short_help="List the processes that use GPUs.",
)
@output_option
@click.pass_context
def clients_group(ctx: click.Context, output: str) -> None:
    """List the processes that use GPUs through MPS or outside it, their MPS servers, and waiting clients.

    \b
    Examples:
      yunion-mps clients
      yunion-mps clients --output json
      yunion-mps clients terminate 4711
    """
    if ctx.invoked_subcommand is None:
        answer = call(GET_CLIENTS)
        rows = [[_value(field, client) for field in COLUMNS.values()] for client in answer["clients"]]
        show(answer, output, list(COLUMNS), rows, lambda: _text(answer))


@clients_group.command("terminate", short_help="End a job without harming others.")
@click.argument("pid", type=click.IntRange(1, _MAX_PID), shell_complete=complete_pid)
@click.option("--force", is_flag=True, help="If SIGTERM does not end it, send SIGKILL.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def terminate_client(pid: int, force: bool, yes: bool) -> None:
    """End the process PID safely: its MPS server disconnects it first, then it gets SIGTERM.

    Killing an MPS client without that can take down the other clients of its server.

    \b
    Examples:
      yunion-mps clients terminate 4711
      yunion-mps clients terminate 4711 --force --yes
    """
    refuse_unattended(yes)
    answer = call(GET_CLIENTS)
    client = next((one for one in (*answer["clients"], *answer["waiting"]) if one["pid"] == pid), None)
    if client is None:
        raise NotFoundError(f"PID {pid} is no client of MPS", "list the clients with: yunion-mps clients")
    who = f"PID {pid} ({cell(client['command'] or 'unknown')}) of {cell(_user(client))}"
    confirm(f"End {who}?", yes)
    ended = call(TERMINATE_CLIENT, pid=pid, force=force)
    if not ended["ended"]:
        raise YunionError(f"{who}: {ended['how']}", "see how it is: yunion-mps clients")
    click.echo(cell(f"{who}: {ended['how']}"))


def clients_table(clients: Sequence[MpsClient]) -> str:
    """The clients for people; a command that runs in a container has its name before it."""
    header = [name for name in COLUMNS if name != "Container"]
    rows = []
    for client in clients:
        started = client["started"] and date_and_time(client["started"])
        shown = {"Command": in_container(client["container"], client["command"] or ""), "Started": started}
        rows.append([shown[name] if name in shown else _value(COLUMNS[name], client) for name in header])
    return draw(header, rows, _DROP)


def _value(field: str, client: MpsClient) -> object:
    (value,) = fields(client, [field])
    return ",".join(value) if isinstance(value, list) else value


def _text(answer: ClientList) -> str:
    """What must be known first, the clients, their servers, the clients that wait, and what is not known."""
    servers = answer["servers"]
    failed = notes(
        (f"FAULT: {_named(server)}", "its jobs have failed, and it serves again once they have ended")
        for server in servers
        if server["state"] == _FAULT
    )
    others = notes(
        (_named(server), server["state"] or "running") for server in servers if server["state"] != _FAULT
    )
    outside_mps = notes(
        (f"PID {client['pid']}", "it uses a GPU outside MPS, where no budget holds")
        for client in answer["clients"]
        if client["mps"] is False
    )
    unknown = notes(("Not known", error) for error in answer["errors"])
    waiting = notes(("Waiting", _waiting(one)) for one in answer["waiting"])
    hint = f"Hint: {hint_of(CLIENT_WAITING)}\n" if waiting else ""
    return failed + clients_table(answer["clients"]) + outside_mps + others + waiting + hint + unknown


def _waiting(one: WaitingClient) -> str:
    who = f"PID {one['pid']} of {_user(one)} ({one['command']}), since {date_and_time(one['since'])}"
    return f"{who}, for the MPS server (PID {one['server']}) of {one['server_user']}, domain {one['domain']}"


def _named(server: MpsServer) -> str:
    return f"MPS server (PID {server['pid']}) of {_user(server)}, domain {server['domain']}"


def _user(process: ProcessFields) -> str:
    return str(process["user"] or "a user who is gone")
