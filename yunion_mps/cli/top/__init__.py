"""`yunion-mps top`: who uses what, repainted until it is quit, or printed once."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.options import Duration
from yunion_mps.cli.output import is_utf8, notes, terminal_size, wrapped
from yunion_mps.errors import YunionError

if TYPE_CHECKING:
    from yunion_mps.cli.top.rows import Poll

_INSTEAD = "one frame, on anything: yunion-mps top --once; what happens, line by line: yunion-mps events -f"
_PIPE_COLUMNS = 120


@click.command("top", short_help="Watch who uses what.")
@click.option("--once", is_flag=True, help="Print it once, whole, as for a pipe.")
@click.option(
    "-d", "--interval", type=Duration(1, 3600), default="2s", show_default=True, metavar="DURATION",
    help="How often to look.",
)  # fmt: skip
def top(once: bool, interval: int) -> None:
    """Watch the GPUs and the devices: what is used of each budget, by whom, and what happens.

    Behind an address, ! is what is over budget or past MPS, and ? a client of MPS that names no device.
    With NO_COLOR in the environment there are no colours.

    \b
    Keys:
      q           quit
      s           sort: busiest, device, user, longest
      v           view: all, only GPUs, only devices
      arrows      scroll; so do j, k, PgUp, PgDn, Home and End

    \b
    Examples:
      yunion-mps top
      yunion-mps top --interval 10
      yunion-mps top --once | less -S
    """
    if not once:
        _refuse_without_screen()
    from yunion_mps.cli.top.live import live, poll

    first = poll()
    if once:
        sys.stdout.write(_once(first))
    else:
        live(first, interval)


def _refuse_without_screen() -> None:
    """Raise YunionError if nothing can be drawn, or no key be read."""
    if not (os.isatty(0) and os.isatty(1)):
        raise YunionError("top needs a terminal, for its screen and for its keys", _INSTEAD)
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        name = os.environ.get("TERM") or "not set"
        raise YunionError(f"top cannot draw on this terminal: TERM is {name}", _INSTEAD)


def _once(first: Poll) -> str:
    """All of it, in the width of the terminal if there is one."""
    from yunion_mps.cli.status import ask_clients_soon
    from yunion_mps.cli.top.frame import WHOLE, Look, frame, plain
    from yunion_mps.cli.top.rows import scene

    clients = ask_clients_soon()
    asked = os.environ.get("COLUMNS", "")
    columns = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 5 else 0
    look = Look(terminal_size()[0] or columns or _PIPE_COLUMNS, WHOLE, utf8=is_utf8())
    shown = frame(scene(first, clients), look, None, time.time(), 0)
    unknown = notes(("Not known", trouble) for trouble in clients.troubles)
    return "".join(wrapped(line) for line in plain(shown.lines).splitlines()) + unknown
