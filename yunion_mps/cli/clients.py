"""`yunion-mps clients`: who uses the GPUs through MPS; `clients terminate` ends one safely."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from yunion_mps.cli.ask import SLOW_S, ask, tell
from yunion_mps.cli.confirm import confirm, need_somebody
from yunion_mps.cli.output import cell, output_option, show
from yunion_mps.cli.suggest import SuggestingGroup
from yunion_mps.cli.table import draw, notes
from yunion_mps.errors import NotFoundError, YunionError

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
}
_DROP = ("Domain", "Server", "Started", "GPUs", "Memory_MiB", "Device")
_FAULT = "FAULT"
#: PID_MAX_LIMIT of the kernel (include/linux/threads.h).
_LARGEST_PID = 4_194_304

Json = dict[str, Any]


@click.group(
    "clients", cls=SuggestingGroup, invoke_without_command=True, short_help="Show who uses MPS, or end one."
)
@output_option
@click.pass_context
def command(ctx: click.Context, output: str) -> None:
    """List the processes that use GPUs through MPS, and the MPS servers that serve them.

    \b
    Examples:
      yunion-mps clients
      yunion-mps clients --output json
      yunion-mps clients terminate 4711
    """
    if ctx.invoked_subcommand is None:
        answer = ask("/v1/clients", SLOW_S)
        show(answer, output, list(COLUMNS), _rows(answer["clients"]), lambda: _text(answer))


@command.command("terminate", short_help="End a client safely.")
@click.argument("pid", type=click.IntRange(1, _LARGEST_PID))
@click.option("--force", is_flag=True, help="End it by SIGKILL where nothing else helps.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def terminate(pid: int, force: bool, yes: bool) -> None:
    """End the client with this PID: its MPS server lets go of it first, then it gets SIGTERM.

    That spares the other clients of its server, which a mere kill can take down.

    \b
    Examples:
      yunion-mps clients terminate 4711
      yunion-mps clients terminate 4711 --force --yes
    """
    need_somebody(yes)
    clients = ask("/v1/clients", SLOW_S)["clients"]
    client = next((one for one in clients if one["pid"] == pid), None)
    if client is None:
        raise NotFoundError(f"PID {pid} is no client of MPS", "list the clients with: yunion-mps clients")
    who = f"PID {pid} ({cell(client['command'] or 'unknown')}) of {_user(client)}"
    confirm(f"End {who}?", yes)
    answer = tell(f"/v1/clients/{pid}/terminate" + ("?force=true" if force else ""))
    if not answer["ended"]:
        raise YunionError(f"{who}: {answer['how']}", "see how it is: yunion-mps clients")
    click.echo(f"{who}: {answer['how']}")


def table(clients: Sequence[Json]) -> str:
    """The clients for people."""
    return draw(list(COLUMNS), _rows(clients), _DROP)


def _rows(clients: Sequence[Json]) -> list[list[object]]:
    return [[_shown(field, client) for field in COLUMNS.values()] for client in clients]


def _shown(field: str, client: Json) -> object:
    value = client[field]
    if field == "started" and value is not None:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return ",".join(value) if isinstance(value, list) else value


def _text(answer: Json) -> str:
    """What must be known first, the clients, then their servers and of what nothing is known."""
    servers = answer["servers"]
    failed = notes(
        (f"FAULT: {_named(server)}", "its jobs have failed, and it serves again once they have ended")
        for server in servers
        if server["state"] == _FAULT
    )
    others = notes(
        (_named(server), server["state"] or "running") for server in servers if server["state"] != _FAULT
    )
    unknown = notes(("Not known", trouble) for trouble in answer["troubles"])
    return failed + table(answer["clients"]) + others + unknown


def _named(server: Json) -> str:
    return f"MPS server (PID {server['pid']}) of {_user(server)}, domain {server['domain']}"


def _user(process: Json) -> str:
    return str(process["user"] or "a user who is gone")
