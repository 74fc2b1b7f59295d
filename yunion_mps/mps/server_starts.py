"""For whom the MPS servers of a domain start; for whom they do not, when to try again.

The control daemon itself stays healthy while its servers fail: it tries six times for each client, refuses
it, and tries again for the next one. So after three failures within a minute, the daemon orders a server
itself, `start_server -uid UID`. If that one fails as well, no more jobs of that user should be sent there,
and more servers are ordered until one is ready. A client's own server that is ready shows as well that they
start.

The log alone proves no failure, because every local user can write lines into it: the control daemon repeats
the newlines of a command (measured with 535). So if the log says that an ordered server has failed while a
server is running, a user wrote that line.

A server runs as the user of its first client. So it can fail for one user only, perhaps because of what this
user does, and that says nothing about the others. Whether servers start for others, the daemon finds out at
once by a server of its own user, who is that of the control daemon. The domain as a whole fails only if that
one fails as well, or has not started in time while servers of two different users fail. In multiuser mode,
the log says this user (0) for all.

What was measured with the control daemons of 535 and 550 and stand-ins for servers, and what follows:

- `start_server` has no answer, whether the server fails or not, and is tried once. Only the log shows the
  outcome. It is the last command of its conversation, because that may break off when the server exits.
- If no other server runs, an ordered one keeps no user waiting: a client of its user is served by it, and for
  a client of another user it ends at once, like any server without clients (attached after 18 ms; after 20 ms
  if no server runs).
- If a server of another user has clients, `start_server` counts as a waiting client of its user: 535 admits
  no more clients until they have ended, 550 repeatedly asks the server to end. So nothing is ordered while
  any server runs. A server remains after its last client, so when an order is due, the running ones that have
  no clients are shut down first.
- `shutdown_server` ends a server without clients at once. If it has clients, 535 admits no more until they
  have ended. So an ordered server is shut down only if neither the log nor the control daemon, asked
  immediately before, shows a client; and as soon as it is ready, because it occupies its GPUs.
- `get_client_list` alone proves nothing: while another user waits, 535 answers nothing for a server with
  clients.

Source: nvidia-cuda-mps-control(1), section "DESCRIPTION", for the user of a server; start_server.
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
#: How often running servers are asked for their clients, while an order waits for them.
ASK_S = 5.0

#: How a command that orders a server begins.
START = "start_server "


class _Servers:
    """The servers of one user: how often they failed lately, and when one is ordered next."""

    def __init__(self) -> None:
        #: When they failed since the last one was ordered.
        self.failed_s: list[float] = []
        #: The last failure, once an ordered one has failed, too.
        self.failure: Outcome | None = None
        self.attempts = 0
        #: When one is ordered; None if none is.
        self.attempt_at_s: float | None = None
        #: Whether one was ordered, and its outcome is overdue.
        self.is_overdue = False


class ServerStarts:
    """Decides from what became of the servers; it neither reads the log nor sends the commands."""

    def __init__(self, own_uid: int = 0) -> None:
        """Know of no failure yet.

        own_uid: the user of the control daemon, which is ours.
        """
        self._own_uid = own_uid
        #: By user (uid); those that start are not here.
        self._servers: dict[int, _Servers] = {}
        #: Whether a server has started since servers began to fail for another user.
        self._has_started = False
        #: The user whose server is being ordered, and until when its outcome is awaited after the delivery.
        self._ordered_uid: int | None = None
        self._awaited_until_s: float | None = None
        #: An ordered server that is ready and has no client.
        self._surplus: int | None = None
        #: When the running servers may be asked again for their clients.
        self._ask_at_s = 0.0

    @property
    def failing_users(self) -> dict[int, Outcome]:
        """The users (uids) for whom servers do not start, with the last failure of each."""
        return {uid: servers.failure for uid, servers in self._servers.items() if servers.failure}

    @property
    def failure(self) -> Outcome | None:
        """The last failure if servers start for no user, None if they do as far as it is known."""
        if self._has_started:
            return None
        failing = self.failing_users
        own = self._servers.get(self._own_uid)
        if own and own.failure:
            return own.failure
        if own and own.is_overdue and len(failing) > 1:
            return list(failing.values())[-1]
        return None

    @property
    def tried_users(self) -> set[int]:
        """The users (uids) for whom servers are ordered: that one fails is no news."""
        return {uid for uid, servers in self._servers.items() if servers.attempt_at_s is not None}

    def note(self, outcomes: Iterable[Outcome], now_s: float, *, is_idle: bool = True) -> None:
        """Take into account what became of servers, in this order; `is_idle`: no server runs now."""
        for outcome in outcomes:
            if outcome.kind == NOT_STARTED and self._is_ours(outcome):
                if is_idle:
                    self._note_failed_attempt(outcome, now_s)
            elif outcome.kind == NOT_STARTED:
                self._note_failure(outcome, now_s)
            elif outcome.kind == STARTED:
                self._note_start(outcome, now_s)
            elif outcome.kind in (SERVED, ENDED, CRASHED) and outcome.pid == self._surplus:
                self._surplus = None

    def _note_failed_attempt(self, outcome: Outcome, now_s: float) -> None:
        self._end_attempt()
        uid = self._uid_of(outcome)
        servers = self._servers.setdefault(uid, _Servers())
        # The first attempt was to find out whether they start.
        pause = min(max(servers.attempts - 1, 0), len(PAUSES_S) - 1)
        servers.attempt_at_s = now_s + PAUSES_S[pause]
        if servers.failure is None:
            self._doubt_others(now_s, uid)
        servers.failure = outcome

    def _note_failure(self, outcome: Outcome, now_s: float) -> None:
        servers = self._servers.setdefault(self._uid_of(outcome), _Servers())
        if servers.failure:
            servers.failure = outcome
            return
        recent_s = [at_s for at_s in servers.failed_s if at_s > now_s - WITHIN_S]
        servers.failed_s = [*recent_s, now_s]
        if len(servers.failed_s) >= MAX_FAILURES and servers.attempt_at_s is None:
            servers.attempts = 0
            servers.attempt_at_s = now_s

    def _doubt_others(self, now_s: float, uid: int) -> None:
        """Find out whether servers start for others than this user."""
        self._has_started = False
        if uid != self._own_uid:
            own = self._servers.setdefault(self._own_uid, _Servers())
            own.attempt_at_s = now_s

    def _note_start(self, outcome: Outcome, now_s: float) -> None:
        is_surplus = self._is_ours(outcome) and not outcome.has_client
        self._surplus = outcome.pid if is_surplus else None
        is_recovery = self.failure is not None
        self._has_started = True
        self._servers.pop(self._uid_of(outcome), None)
        own = self._servers.get(self._own_uid)
        if own and not own.failure:
            own.attempt_at_s = None  # a server of any user answers what it was to find out
        if outcome.uid == self._ordered_uid or not self.tried_users:
            self._end_attempt()
        if is_recovery:
            for uid in self.tried_users:
                self._servers[uid].attempt_at_s = now_s

    def _uid_of(self, outcome: Outcome) -> int:
        return self._own_uid if outcome.uid is None else outcome.uid

    def _is_ours(self, outcome: Outcome) -> bool:
        """Return whether it is the ordered server's; the log may show it before the order is answered."""
        return outcome.is_ordered and outcome.uid is not None and outcome.uid == self._ordered_uid

    def _end_attempt(self) -> None:
        self._ordered_uid = None
        self._awaited_until_s = None

    def commands(self, now_s: float, *, is_idle: bool) -> list[str]:
        """Return what to send to the control daemon until it is delivered; `is_idle`: no server runs."""
        if self._awaited_until_s is not None and now_s >= self._awaited_until_s:
            self._abandon_attempt()
        if not is_idle or self._awaited_until_s is not None:
            return []
        if self._ordered_uid is None:
            self._ordered_uid = self._next_uid(now_s)
            if self._ordered_uid is None:
                return []
            self._servers[self._ordered_uid].attempts += 1
        return [_start_command(self._ordered_uid)]

    def _abandon_attempt(self) -> None:
        """Give the attempt up: its server hangs, or waits for one of another user, which is to end then."""
        if self._ordered_uid in self._servers:
            self._servers[self._ordered_uid].is_overdue = True
        self._end_attempt()

    def _next_uid(self, now_s: float) -> int | None:
        """Return the user for whom a server has been due for the longest; None if none is."""
        due = []
        for uid, servers in self._servers.items():
            if servers.attempt_at_s is not None and servers.attempt_at_s <= now_s:
                due.append((servers.attempt_at_s, uid))
        return min(due)[1] if due else None

    def commands_delivered(self, commands: Collection[str], now_s: float) -> None:
        """Note that the control daemon has received these commands, which may be others' too."""
        is_ordering = self._ordered_uid is not None and self._awaited_until_s is None
        if is_ordering and any(command.startswith(START) for command in commands):
            self._awaited_until_s = now_s + ATTEMPT_S

    @property
    def surplus(self) -> tuple[int, ...]:
        """The PID of an ordered server that is to be shut down, unless it has clients after all."""
        return () if self._surplus is None else (self._surplus,)

    def surplus_asked(self) -> None:
        """Note that it was asked for its clients, and shut down if it has none."""
        self._surplus = None

    def blocking_servers(self, running: Collection[int], now_s: float) -> tuple[int, ...]:
        """Return the `running` servers if an order waits for them; those without clients are to end."""
        if self._surplus is not None or now_s < self._ask_at_s:
            return ()
        # An order that is not delivered waits for a server that has started meanwhile.
        is_undelivered = self._ordered_uid is not None and self._awaited_until_s is None
        is_due = self._ordered_uid is None and self._next_uid(now_s) is not None
        return tuple(running) if is_undelivered or is_due else ()

    def blocking_servers_asked(self, now_s: float) -> None:
        """Note that they were asked, and shut down if they have none; the others are asked again later."""
        self._ask_at_s = now_s + ASK_S

    @property
    def is_awaiting(self) -> bool:
        """Whether the log is to be read soon, because an ordered server starts or is to be shut down."""
        return self._surplus is not None or self._ordered_uid is not None

    def due_s(self, now_s: float) -> float | None:
        """Return when the log is to be read again at the latest; None if that is not urgent."""
        if self.is_awaiting:
            return now_s + _READ_SOON_S
        if not self.tried_users:
            return None
        due_s = now_s + READ_S
        for servers in self._servers.values():
            if servers.attempt_at_s is not None and servers.attempt_at_s > now_s:
                due_s = min(due_s, servers.attempt_at_s)
        return due_s


def _start_command(uid: int) -> str:
    return f"{START}-uid {uid}"
