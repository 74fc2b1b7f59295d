"""Going on where the daemon is away for a moment: it is run anew, or restarted."""

from __future__ import annotations

import sys
import time

from yunion_mps.errors import UnreachableError

_BETWEEN_S = 0.2


def say(text: str) -> None:
    """Tell a person how it goes, beside the output."""
    print(f"yunion-mps: {text}", file=sys.stderr, flush=True)


class Patience:
    """Tries again for `most_s` seconds, and says so once."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._end_s = 0.0

    def lost(self, error: UnreachableError) -> None:
        """The daemon could not be reached: wait a moment; raises `error` where it was for too long."""
        now_s = time.monotonic()
        if not self._end_s:
            self._end_s = now_s + self._most_s
            say(f"{error.message}; waiting up to {self._most_s:g} s for it")
        elif now_s > self._end_s:
            raise error
        time.sleep(_BETWEEN_S)

    def found(self) -> None:
        """The daemon has answered."""
        if self._end_s:
            say("the daemon answers again")
        self._end_s = 0.0
