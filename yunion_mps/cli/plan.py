"""`yunion-mps plan`: what a reload would change."""

from __future__ import annotations

from typing import Any

import click

from yunion_mps.cli.ask import SLOW_S, ask
from yunion_mps.cli.changes import COLUMNS, pending_text, rows, text
from yunion_mps.cli.output import output_option, show


@click.command("plan", short_help="Show what a reload would change.")
@output_option
def command(output: str) -> None:
    """Show what a reload would change, and when that would come into force; nothing is changed.

    Exits with 6 and every problem of both files, each with its file and line, where there is one.

    \b
    Examples:
      yunion-mps plan
      yunion-mps plan --output json
    """
    answer = ask("/v1/plan", SLOW_S)
    show(answer, output, COLUMNS, rows(answer), lambda: _text(answer))


def _text(answer: dict[str, Any]) -> str:
    if not answer["changes"]:
        return "A reload would change nothing.\n" + pending_text(answer)
    return "Nothing was changed; a reload would change this:\n" + text(answer) + pending_text(answer)
