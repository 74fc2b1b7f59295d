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
from yunion_mps.overview.findings import WAITING_REMEDY
from yunion_mps.overview.uses import in_container

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
_LARGEST_PID = 4_194_304

Json = dict[str, Any]


@click.group(
    "clients", cls=SuggestingGroup, invoke_without_command=True, short_help="Show who uses MPS, or end one."
)
@output_option
@click.pass_context
def command(ctx: click.Context, output: str) -> None:
    """List who uses GPUs through MPS or past it, the MPS servers that serve them, and who waits for one.

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
    answer = ask("/v1/clients", SLOW_S)
    client = next((one for one in (*answer["clients"], *answer["waiting"]) if one["pid"] == pid), None)
    if client is None:
        raise NotFoundError(f"PID {pid} is no client of MPS", "list the clients with: yunion-mps clients")
    who = f"PID {pid} ({cell(client['command'] or 'unknown')}) of {cell(_user(client))}"
    confirm(f"End {who}?", yes)
    answer = tell(f"/v1/clients/{pid}/terminate" + ("?force=true" if force else ""))
    if not answer["ended"]:
        raise YunionError(f"{who}: {answer['how']}", "see how it is: yunion-mps clients")
    click.echo(cell(f"{who}: {answer['how']}"))


def table(clients: Sequence[Json]) -> str:
    """The clients for people."""
    shown = [
        {**client, "command": in_container(client["container"], client["command"] or "")}
        for client in clients
    ]
    header = [name for name in COLUMNS if name != "Container"]  # it stands before the command
    rows = [[_shown(COLUMNS[name], client) for name in header] for client in shown]
    return draw(header, rows, _DROP)


def _rows(clients: Sequence[Json]) -> list[list[object]]:
    return [[_shown(field, client) for field in COLUMNS.values()] for client in clients]


def _shown(field: str, client: Json) -> object:
    value = client[field]
    if field == "started" and value is not None:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return ",".join(value) if isinstance(value, list) else value


def _text(answer: Json) -> str:
    """What must be known first, the clients, then their servers, who waits, and of what nothing is known."""
    servers = answer["servers"]
    failed = notes(
        (f"FAULT: {_named(server)}", "its jobs have failed, and it serves again once they have ended")
        for server in servers
        if server["state"] == _FAULT
    )
    others = notes(
        (_named(server), server["state"] or "running") for server in servers if server["state"] != _FAULT
    )
    past_mps = notes(
        (f"PID {client['pid']}", "it uses a GPU past MPS, where no budget holds")
        for client in answer["clients"]
        if client["mps"] is False
    )
    unknown = notes(("Not known", trouble) for trouble in answer["troubles"])
    waiting = notes(("Waiting", _waiting(one)) for one in answer["waiting"])
    remedy = f"Remedy: {WAITING_REMEDY}\n" if waiting else ""
    return failed + table(answer["clients"]) + past_mps + others + waiting + remedy + unknown


def _waiting(one: Json) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["since"]))
    who = f"PID {one['pid']} of {_user(one)} ({one['command']}), since {since}"
    return f"{who}, for the MPS server (PID {one['server']}) of {one['server_user']}, domain {one['domain']}"


def _named(server: Json) -> str:
    return f"MPS server (PID {server['pid']}) of {_user(server)}, domain {server['domain']}"


def _user(process: Json) -> str:
    return str(process["user"] or "a user who is gone")
