"""What a reload changes, as `plan` and `reload` show it."""

from __future__ import annotations

from typing import Any

from yunion_mps.cli.table import draw, notes

COLUMNS = ("Kind", "Subject", "Before", "After", "Effect")
#: The effect of a change that nothing keeps waiting.
AT_ONCE = "at once"

Json = dict[str, Any]


def rows(answer: Json) -> list[list[object]]:
    """The changes under `COLUMNS`."""
    return [[change[name.lower()] for name in COLUMNS] for change in answer["changes"]]


def text(answer: Json) -> str:
    """A table of the changes, and below it what has to wait for something, where it can be read whole."""
    shown = [
        [change["kind"], change["subject"], change["before"] or "nothing", change["after"] or "nothing"]
        for change in answer["changes"]
    ]
    table = draw(COLUMNS, [[*row, change["effect"]] for row, change in zip(shown, answer["changes"])], _DROP)
    late = [change for change in answer["changes"] if change["effect"] != AT_ONCE]
    return table + notes((f"{change['kind']} {change['subject']}", change["effect"]) for change in late)


def pending_text(answer: Json) -> str:
    """What is still to become of each domain, and what that waits for."""
    return "".join(f"Pending:  {one['domain']}: {one['pending']}\n" for one in answer["pending"])


_DROP = ("Effect",)
