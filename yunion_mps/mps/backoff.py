"""When a control daemon that ended is started again: at once, then later and later, then slowly for good."""

from __future__ import annotations

from yunion_mps.errors import ShortageError, YunionError
from yunion_mps.mps.states import BACKOFF, FAILED

#: The wait before each new start; the first death may be an accident, and costs no time.
WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
#: Once those are used up, somebody has to look at it; it is still tried this often.
RETRY_S = 60.0
#: After this long in service, earlier deaths count no more.
STABLE_S = 60.0


class Backoff:
    """Counts deaths."""

    def __init__(self) -> None:
        self._deaths = 0

    def next_wait_s(self, served_s: float = 0.0) -> float | None:
        """Count a death after so long in service; the wait before the next start, None for a slow retry."""
        if served_s >= STABLE_S:
            self._deaths = 0
        self._deaths += 1
        return WAITS_S[self._deaths - 1] if self._deaths <= len(WAITS_S) else None

    def after(self, error: YunionError, served_s: float, *, lasting: bool) -> tuple[str, float]:
        """The state that follows a failure after so long in service, and the wait before the next start.

        What is `lasting` no new start mends by itself; it is tried slowly, but for a shortage, which passes.
        """
        quick_s = self.next_wait_s(served_s)
        state = FAILED if lasting or quick_s is None else BACKOFF
        passes = isinstance(error, ShortageError) or not lasting
        return state, quick_s if passes and quick_s is not None else RETRY_S
