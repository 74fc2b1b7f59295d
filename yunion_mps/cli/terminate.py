"""`yunion-mps terminate`: ends a process that uses a GPU without harming others."""

from __future__ import annotations

import click

from yunion_mps.cli.common import PID, call, complete_pid, confirm, refuse_unattended
from yunion_mps.cli.output import cell, wrapped
from yunion_mps.cli.who import user_of
from yunion_mps.errors import NotFoundError, YunionError
from yunion_mps.http.operations import GET_CLIENTS, TERMINATE_CLIENT


@click.command("terminate", short_help="End a job without harming other jobs.")
@click.argument("pid", type=PID, shell_complete=complete_pid)
@click.option("--force", is_flag=True, help="If SIGTERM does not end it, send SIGKILL.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def terminate(pid: int, force: bool, yes: bool) -> None:
    """End process PID safely: its MPS server disconnects it first, then it gets SIGTERM.

    A process outside MPS only gets SIGTERM.

    Killing an MPS client without disconnecting it first can take down the other clients of its server.

    \b
    Examples:
      yunion-mps terminate 4711
      yunion-mps terminate 4711 --force --yes
    """
    refuse_unattended(yes)
    answer = call(GET_CLIENTS)
    client = next(
        (process for process in (*answer["clients"], *answer["waiting"]) if process["pid"] == pid), None
    )
    if client is None:
        raise NotFoundError(f"PID {pid} is not an MPS client", "list the clients: yunion-mps who --clients")
    who = f"PID {pid} ({cell(client['command'] or 'unknown')}) of {cell(user_of(client))}"
    outside_mps = f"{who} runs outside MPS, so no MPS server disconnects it first. End it?"
    confirm(outside_mps if client.get("mps") is False else f"End {who}?", yes)
    ended = call(TERMINATE_CLIENT, pid=pid, force=force)
    if not ended["ended"]:
        hint = "check whether it has ended: yunion-mps who --clients"
        raise YunionError(
            f"{who}: {ended['how']}", hint if force else f"kill it: yunion-mps terminate {pid} --force"
        )
    click.echo(wrapped(f"{who}: {ended['how']}"), nl=False)
