"""`yunion-mps daemon-reexec`: the daemon's program run anew, with nothing let go."""

from __future__ import annotations

import time
from typing import Any

import click

from yunion_mps.cli.ask import SLOW_S, ask, tell
from yunion_mps.cli.patience import Patience
from yunion_mps.errors import UnreachableError, YunionError

_PATIENCE_S = 120.0
_HINT = "see: journalctl -u yunion-mps-daemon"


@click.command("daemon-reexec", short_help="Run the daemon's program anew, as after an upgrade.")
def command() -> None:
    """Run the daemon's program anew in its process, as after an upgrade.

    Control daemons, jobs, limits and the socket stay; requests wait for the moment that it takes. The new
    program is tried first: where it would not start, this one goes on.

    \b
    Examples:
      yunion-mps daemon-reexec
    """
    before = ask("/v1/status")
    last = ask("/v1/events?limit=1")["last"]
    tell("/v1/reexec", until_closed=True)
    gone_s = time.monotonic()
    after = _status()
    away_s = time.monotonic() - gone_s
    for event in ask(f"/v1/events?after={last}&kind=daemon")["events"]:
        if event["severity"] == "error":
            raise YunionError(event["what"], f"{event['consequence']}; {_HINT}")
    if after["pid"] != before["pid"]:
        what = f"the daemon was restarted: its PID was {before['pid']}, and is {after['pid']}"
        raise YunionError(what, _HINT)
    version = before["version"]
    if after["version"] != version:
        version += f" -> {after['version']}"
    click.echo(f"The daemon ({version}) runs anew, with PID {after['pid']} as before; it took {away_s:.2f} s")


def _status() -> Any:
    patience = Patience(_PATIENCE_S)
    while True:
        try:
            return ask("/v1/status", SLOW_S)
        except UnreachableError as error:
            patience.lost(error)
