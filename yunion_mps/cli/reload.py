"""`yunion-mps reload`: bring changed files into force, and perhaps wait for it, or make it happen now."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import click

from yunion_mps.cli.ask import SLOW_S, ask, tell
from yunion_mps.cli.changes import AT_ONCE, COLUMNS, pending_text, rows, text
from yunion_mps.cli.clients import table as table_of_clients
from yunion_mps.cli.confirm import confirm, need_somebody
from yunion_mps.cli.output import output_option, show
from yunion_mps.cli.patience import Patience, say
from yunion_mps.cli.times import Duration
from yunion_mps.errors import UnreachableError, YunionError
from yunion_mps.overview.findings import REEXEC, other_version

_LOOK_S = 0.5
_PATIENCE_S = 60.0
#: What `--now` may take, where no time is given: servers end within moments.
_NOW_S = 60
#: A control daemon in one of these does not serve, for a reason.
_TROUBLED = ("failed", "backoff", "wedged")

Json = dict[str, Any]


@click.command("reload", short_help="Bring changed files into force.")
@click.option("--drain", is_flag=True, help="Wait until the jobs in its way have ended.")
@click.option("--now", is_flag=True, help="End the jobs in its way; says whom first.")
@click.option(
    "--timeout", type=Duration(), metavar="DURATION", help="Wait at most this long: 90, 90s, 10m, 2h, 1d."
)
@click.option("--yes", is_flag=True, help="With --now: do not ask.")
@output_option
def command(drain: bool, now: bool, timeout: int | None, yes: bool, output: str) -> None:
    """Read both files again, and bring into force what differs.

    Limits come into force with the next MPS server. Where one with jobs runs, they are pending until it has
    ended: MPS gives it no new clients with --drain, and --now ends it with its jobs.

    Exits with 6 and every problem of both files where there is one; nothing was changed then.

    \b
    Examples:
      yunion-mps plan; yunion-mps reload
      yunion-mps reload --drain --timeout 1h
      yunion-mps reload --now
    """
    if timeout and not (drain or now):
        raise click.UsageError("--timeout goes with --drain or --now.")
    if yes and not now:
        raise click.UsageError("--yes goes with --now.")
    if now:
        need_somebody(yes)
        _ask_for_the_jobs(yes)
    words = [f"{name}=true" for name, given in (("drain", drain), ("now", now)) if given]
    answer = tell("/v1/reload" + ("?" + "&".join(words) if words else ""))
    show(answer, output, COLUMNS, rows(answer), lambda: _text(answer, waits=bool(words)))
    sys.stdout.flush()
    status = _wait(timeout or (None if drain else _NOW_S)) if words else ask("/v1/status")
    if other_version(status):
        say(f"{other_version(status)}: {REEXEC}")
    _refuse_trouble(status)


def _text(answer: Json, *, waits: bool) -> str:
    shown = "Reloaded; this changes:\n" + text(answer)
    if not answer["changes"]:
        shown = "Reloaded; nothing changes.\n"
    hint = "See who uses it: yunion-mps clients; wait for them: --drain; end them: --now\n"
    for_leases = {bool(one.get("leases")) for one in answer["pending"]}
    shown += pending_text(answer) + (hint if False in for_leases and not waits else "")
    return shown + ("See whose the leases are: yunion-mps who\n" if True in for_leases else "")


def _ask_for_the_jobs(yes: bool) -> None:
    """Say whom `--now` would end, and go on where that is right; raises YunionError otherwise."""
    is_in_the_way = _in_the_way(ask("/v1/plan", SLOW_S), ask("/v1/status"))
    if is_in_the_way is None:
        return
    answer = ask("/v1/clients", SLOW_S)
    clients = [client for client in answer["clients"] if is_in_the_way(client)]
    if clients:
        click.echo(f"This would be ended:\n{table_of_clients(clients)}", nl=False, err=True)
    for trouble in answer["troubles"]:
        say(f"not all clients are known: {trouble}")
    if clients or answer["troubles"]:
        confirm("End them?", yes)


def _in_the_way(plan: Json, status: Json) -> Callable[[Json], bool] | None:
    """Tells clients whose servers keep something from coming into force; None where nothing does.

    A change that is still to be made waits for every server of its domain or its GPUs, and one that is
    pending for those that it names.
    """
    late = {change["subject"] for change in plan["changes"] if change["effect"] != AT_ONCE}
    uuids = {gpu["uuid"] for gpu in ask("/v1/gpus")["gpus"] if gpu["addr"] in late}
    domains, servers = set(), {None}  # a client whose server nobody knows may be any server's
    for domain in status["domains"]:
        if domain["name"] in late or uuids.intersection(domain["gpus"]):
            domains.add(domain["name"])
        servers.update(domain["waits_for"])
    waiting = {domain["name"] for domain in status["domains"] if domain["pending"]}
    if not domains and not waiting:
        return None
    return lambda client: (
        client["domain"] in domains or (client["domain"] in waiting and client["server"] in servers)
    )


def _wait(timeout_s: int | None) -> Json:
    """The status once nothing is pending; raises YunionError where that takes too long."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    patience = Patience(_PATIENCE_S)
    said = ""
    while True:
        try:
            status: Json = ask("/v1/status")
        except UnreachableError as error:
            patience.lost(error)
            continue
        patience.found()
        pending = "; ".join(f"{d['name']}: {d['pending']}" for d in status["domains"] if d["pending"])
        if not pending:
            if said:
                say("nothing is pending any more")
            return status
        if pending != said:
            say(f"waiting: {pending}")
            said = pending
        if end_s is not None and time.monotonic() > end_s:
            hint = "it comes into force by itself; see: yunion-mps status"
            raise YunionError(f"still pending after {timeout_s} s: {pending}", hint)
        time.sleep(_LOOK_S)


def _refuse_trouble(status: Json) -> None:
    """Raise YunionError where the configuration is in force, and a control daemon does not serve."""
    troubles = [
        f"domain {domain['name']} is {domain['state']}: {domain['reason']}"
        for domain in status["domains"]
        if domain["state"] in _TROUBLED
    ]
    if troubles:
        raise YunionError("\n".join(troubles), "the configuration was reloaded; see: yunion-mps status")
