"""The places of those who wait, past a restart: an entry each in the run directory, by user and request.

So whoever comes back to the next daemon has waited as long as the one before has written down, and nobody can
claim to have waited longer. An entry is a symbolic link to the time, for that is made whole or not at all.
"""

from __future__ import annotations

import contextlib
import os

#: For how long after the daemon before has let go those who had waited may come back to their place, in s.
COME_BACK_S = 60.0


class Places:
    """Since when those wait who ask with a request's id, in s since 1970."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._left: dict[str, float] = {}
        self._until_s = 0.0

    def recall(self, now_s: float) -> None:
        """Know the places that the daemon before has kept; `now_s` is monotonic."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                with contextlib.suppress(OSError, ValueError):
                    self._left[name] = float(os.readlink(self._path(name)))
        self._until_s = now_s + COME_BACK_S

    def let_go(self, places: dict[str, float], now_s: float) -> None:
        """Those who have these places are sent away, and may come back."""
        self._left.update(places)
        self._until_s = now_s + COME_BACK_S

    def come(self, key: str, at_s: float, now_s: float) -> float:
        """Since when whoever comes now waits: since `at_s`, or as was kept.

        Nobody new is before anybody who may come back, though the clock was set back.
        """
        if now_s > self._until_s:
            late, self._left = self._left, {}
            for name in late:
                self.leave(name)
        at_s = max(at_s, *self._left.values()) if self._left else at_s
        return self._left.pop(key, at_s)

    def keep(self, key: str, since_s: float) -> None:
        """Write a place down; that it cannot be is no reason not to wait."""
        if not key:
            return
        with contextlib.suppress(OSError):  # one that has come back has its entry
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            os.symlink(repr(since_s), self._path(key))

    def leave(self, key: str) -> None:
        """Whoever had it has been served, or waits no more; does nothing where it may come back."""
        if key and key not in self._left:
            with contextlib.suppress(OSError):
                os.unlink(self._path(key))

    def _path(self, key: str) -> str:
        return os.path.join(self._directory, key)
