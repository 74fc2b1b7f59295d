"""Going on where the daemon is away for a moment: it is run anew, or restarted."""

from __future__ import annotations

import time
from collections.abc import Callable

from yunion_mps.errors import UnreachableError

#: Tells a person, in a line, how it goes.
Say = Callable[[str], None]

#: How long a daemon that has gone away is waited for, where one waits anyway.
MOST_S = 60.0
_BETWEEN_S = 0.2


class Patience:
    """Tries again for `most_s` seconds, and says so once."""

    def __init__(self, most_s: float, say: Say) -> None:
        self._most_s = most_s
        self._say = say
        self._end_s = 0.0

    def lost(self, error: UnreachableError) -> None:
        """The daemon could not be reached: wait a moment; raises `error` where it was for too long."""
        now_s = time.monotonic()
        if not self._end_s:
            self._end_s = now_s + self._most_s
            self._say(f"{error.message}; waiting up to {self._most_s:g} s for it")
        elif now_s > self._end_s:
            raise error
        time.sleep(_BETWEEN_S)

    def found(self) -> None:
        """The daemon has answered."""
        if self._end_s:
            self._say("the daemon answers again")
        self._end_s = 0.0
