"""Telling a person how it goes, such as that the daemon is away for a moment."""

from __future__ import annotations

import sys

from yunion_mps.client import patience
from yunion_mps.escaping import printable


def say(text: str) -> None:
    """Tell a person how it goes, beside the output."""
    if sys.stderr is not None:  # print would take standard output instead
        print(f"yunion-mps: {printable(text)}", file=sys.stderr, flush=True)


class Patience(patience.Patience):
    """Tries again for `most_s` seconds, and says so once, beside the output."""

    def __init__(self, most_s: float) -> None:
        super().__init__(most_s, say)
