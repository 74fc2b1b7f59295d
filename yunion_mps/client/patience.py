"""Going on where the daemon is away for a moment, or cannot do it just now: it is run anew, or restarted."""

from __future__ import annotations

import time
from collections.abc import Callable

from yunion_mps.errors import YunionError

#: Tells a person, in a line, how it goes.
Say = Callable[[str], None]

#: How long a daemon that has gone away is waited for, where one waits anyway.
MOST_S = 60.0
_BETWEEN_S = 0.2
_A_DAY_S = 86_400


class Patience:
    """Tries again for `most_s` seconds, and says so once."""

    def __init__(self, most_s: float, say: Say) -> None:
        self._most_s = most_s
        self._say = say
        self._end_s = 0.0

    def lost(self, error: YunionError) -> None:
        """The daemon could not be reached, or do it: wait a moment; raises `error` after too long a time."""
        now_s = time.monotonic()
        if not self._end_s:
            self._end_s = now_s + self._most_s
            how_long = f" up to {self._most_s:.0f} s" if self._most_s <= _A_DAY_S else ""
            self._say(f"{error.message}; waiting{how_long} for it")
        elif now_s > self._end_s:
            raise error
        time.sleep(_BETWEEN_S)

    def found(self) -> None:
        """The daemon has answered."""
        if self._end_s:
            self._say("the daemon answers again")
        self._end_s = 0.0
