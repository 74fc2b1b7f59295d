"""`yunion-mps top`: who uses what, drawn anew while one looks at it."""

from __future__ import annotations

import os
import sys
import time

import click

from yunion_mps.cli.screen import asking
from yunion_mps.cli.screen.asking import Answers
from yunion_mps.cli.screen.frame import WHOLE, Look, frame, plain
from yunion_mps.cli.screen.scene import scene
from yunion_mps.cli.screen.text import is_utf8
from yunion_mps.cli.table import notes, terminal_width, wrapped
from yunion_mps.cli.times import Duration
from yunion_mps.errors import YunionError
from yunion_mps.overview.uses import Clients

_INSTEAD = "one frame, on anything: yunion-mps top --once; what happens, line by line: yunion-mps events -f"
_PIPE_COLUMNS = 120


@click.command("top", short_help="Watch who uses what.")
@click.option("--once", is_flag=True, help="Print it once, whole, as for a pipe.")
@click.option(
    "-d", "--interval", type=Duration(1, 3600), default="2s", show_default=True, metavar="DURATION",
    help="How often to look.",
)  # fmt: skip
def command(once: bool, interval: int) -> None:
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
    answers = asking.answers()
    if once:
        sys.stdout.write(_once(answers, asking.clients_or_why()))
        return
    from yunion_mps.cli.screen.live import live

    live(answers, interval)


def _refuse_without_screen() -> None:
    """Raise YunionError where nothing can be drawn, or no key be read."""
    if not (os.isatty(0) and os.isatty(1)):
        raise YunionError("top needs a terminal, for its screen and for its keys", _INSTEAD)
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        name = os.environ.get("TERM") or "not set"
        raise YunionError(f"top cannot draw on this terminal: TERM is {name}", _INSTEAD)


def _once(answers: Answers, clients: Clients) -> str:
    """All of it, in the width of the terminal where there is one."""
    columns = terminal_width() or _columns_asked_for() or _PIPE_COLUMNS
    look = Look(columns, WHOLE, utf8=is_utf8())
    shown = frame(scene(answers, clients), look, None, time.time(), 0)
    unknown = notes(("Not known", trouble) for trouble in clients.troubles)
    return "".join(wrapped(line) for line in plain(shown.lines).splitlines()) + unknown


def _columns_asked_for() -> int:
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0
