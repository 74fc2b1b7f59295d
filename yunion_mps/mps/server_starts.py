"""Whether the MPS servers of a domain start; if they do not, when to try again.

The control daemon itself stays healthy while its servers fail: it tries six times for each client, refuses
it, and tries again for the next one. So after three failures within a minute, no more jobs should be sent
there, and the daemon orders a server itself until one is ready: `start_server -uid UID`, for the user whose
servers failed, because servers can fail for one user only. A client's own server that is ready shows as well
that they start.

What was measured with the control daemons of 535 and 550 and stand-ins for servers, and what follows:

- `start_server` has no answer, whether the server fails or not, and is tried once. Only the log shows the
  outcome. It is the last command of its conversation, because that may break off when the server exits.
- If no other server runs, an ordered one keeps no user waiting: a client of its user is served by it, and for
  a client of another user it ends at once, like any server without clients (attached after 18 ms; after 20 ms
  if no server runs).
- If a server of another user has clients, `start_server` counts as a waiting client of its user: 535 admits
  no more clients until they have ended, 550 repeatedly asks the server to end. So nothing is ordered while
  any server runs.
- `shutdown_server` ends a server without clients at once. If it has clients, 535 admits no more until they
  have ended. So an ordered server is shut down only if neither the log nor the control daemon, asked
  immediately before, shows a client; and as soon as it is ready, because it occupies its GPUs.
- `get_client_list` alone proves nothing: while another user waits, 535 answers nothing for a server with
  clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from yunion_mps.mps.server_history import CRASHED, ENDED, NOT_STARTED, SERVED, STARTED, Outcome

#: So many failures within this time mean that servers do not start.
MAX_FAILURES = 3
WITHIN_S = 60.0
#: The pauses before the attempts; the last one is repeated.
PAUSES_S = (5.0, 10.0, 20.0, 40.0, 60.0)
#: How long an ordered server has to become ready or fail before another one may be ordered.
ATTEMPT_S = 30.0
#: How often the log is read while servers fail, and while an ordered server is awaited.
READ_S = 1.0
_READ_SOON_S = 0.05

_START = "start_server "


class ServerStarts:
    """Decides from what became of the servers; it neither reads the log nor sends the commands."""

    def __init__(self) -> None:
        #: The last failure if servers do not start, None if they do as far as it is known.
        self.failure: Outcome | None = None
        self._failed_s: list[float] = []
        self._attempts = 0
        self._attempt_at_s = 0.0
        #: Whether a server is being ordered, and until when its outcome is awaited once that is delivered.
        self._is_ordering = False
        self._awaited_until_s: float | None = None
        #: An ordered server that is ready and has no client.
        self._surplus: int | None = None

    def note(self, outcomes: Iterable[Outcome], now_s: float) -> None:
        """Take into account what became of servers, in this order, at about this time."""
        for outcome in outcomes:
            if outcome.kind == NOT_STARTED:
                self._note_failure(outcome, now_s)
            elif outcome.kind == STARTED:
                self._note_start(outcome)
            elif outcome.kind in (SERVED, ENDED, CRASHED) and outcome.pid == self._surplus:
                self._surplus = None

    def _note_failure(self, outcome: Outcome, now_s: float) -> None:
        if self.failure is None:
            self._failed_s = [at_s for at_s in self._failed_s if at_s > now_s - WITHIN_S] + [now_s]
            if len(self._failed_s) < MAX_FAILURES:
                return
            self._attempts = 0
            self._attempt_at_s = now_s + PAUSES_S[0]
        elif self._is_ours(outcome):
            self._end_attempt()
            self._attempt_at_s = now_s + PAUSES_S[min(self._attempts, len(PAUSES_S) - 1)]
        self.failure = outcome

    def _note_start(self, outcome: Outcome) -> None:
        is_surplus = self._is_ours(outcome) and not outcome.has_client
        self._surplus = outcome.pid if is_surplus else None
        self.failure = None
        self._failed_s = []
        self._end_attempt()

    def _is_ours(self, outcome: Outcome) -> bool:
        """Whether it is that of the ordered server; the log may show it before the delivery is known."""
        return outcome.is_ordered and (self._is_ordering or self._awaited_until_s is not None)

    def _end_attempt(self) -> None:
        self._is_ordering, self._awaited_until_s = False, None

    def commands(self, now_s: float, *, is_idle: bool) -> list[str]:
        """Return what to send to the control daemon until it is delivered; `is_idle`: no server runs."""
        if self.failure is None or self.failure.uid is None or not is_idle:
            return []
        if self._awaited_until_s is not None and now_s >= self._awaited_until_s:
            self._end_attempt()
        if self._awaited_until_s is not None or now_s < self._attempt_at_s:
            return []
        if not self._is_ordering:
            self._is_ordering = True
            self._attempts += 1
        return [_start_command(self.failure.uid)]

    def commands_delivered(self, commands: Collection[str], now_s: float) -> None:
        """Note that the control daemon has received these commands, which may be others' too."""
        if self._is_ordering and any(command.startswith(_START) for command in commands):
            self._is_ordering, self._awaited_until_s = False, now_s + ATTEMPT_S

    @property
    def surplus(self) -> tuple[int, ...]:
        """The PID of an ordered server that is to be shut down, unless it has clients after all."""
        return () if self._surplus is None else (self._surplus,)

    def surplus_asked(self) -> None:
        """Note that it was asked for its clients, and shut down if it has none."""
        self._surplus = None

    @property
    def is_awaiting(self) -> bool:
        """Whether the log is to be read soon, because an ordered server starts or is to be shut down."""
        return self._surplus is not None or self._is_ordering or self._awaited_until_s is not None

    def due_s(self, now_s: float) -> float | None:
        """When the log is to be read again at the latest; None if that is not urgent."""
        if self.is_awaiting:
            return now_s + _READ_SOON_S
        if self.failure is None:
            return None
        later_s = self._attempt_at_s if self._attempt_at_s > now_s else now_s + READ_S
        return min(now_s + READ_S, later_s)


def _start_command(uid: int) -> str:
    return f"{_START}-uid {uid}"
