"""End MPS servers by force, and with them only clients whose end was confirmed.

`shutdown_server PID -f` ends a server with all clients that it has then. So in one conversation right
before it, the clients are listed, and each server is told to shut down after them:

- Before 550, a server admits no more clients once it was told so: they wait for the next server (measured).
  Only a client that attaches between these two commands is not in the list, but the log has it.
- The log is written by another thread of the control daemon, so it may be late (measured). The last command
  has a number that no user can guess: once the log has it, the log has all that came before.
- Every user can write lines into the log, but not remove any. So a forged line keeps a server from being
  ended by force, and never ends a job.

So before 550, no job ends that may not end. From 550 on, a server is only asked, and admits clients until it
ends. There, a job that attaches after the log was read and before `-f` arrives ends with its server: that is
the time in which a front-end starts, some milliseconds. If `-f` is not received, because another front-end
is connected, the clients are listed again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from yunion_mps.core.errors import ShortageError
from yunion_mps.host.proc import is_stopped
from yunion_mps.mps.control_daemon import ControlDaemon, ControlTask
from yunion_mps.mps.conversation import COMMAND_RETRY_S, PING
from yunion_mps.mps.limits import parse_client_lists
from yunion_mps.mps.log_file import log_since, log_size
from yunion_mps.mps.log_lines import served_clients
from yunion_mps.mps.processes import running_servers

log = logging.getLogger(__name__)

#: How long the log may be late, and how often it is read until then.
LOG_WITHIN_S = 1.0
_READ_S = 0.002
#: Numbers that no process has as its PID (PID_MAX_LIMIT of linux/threads.h is 4194304), and that fit into
#: the control daemon's 32 bits.
_UNUSED_PIDS = range(1_000_000_000, 1 << 31)

#: What a `ForcedEnd` does: it lists the clients, reads the log, or ends the servers.
LIST = "list"
READ_LOG = "read log"
END = "end"


class EndOrder(NamedTuple):
    """The order to end servers by force unless they have a client that may not be ended."""

    #: Whether a client (PID) may be ended.
    may_end: Callable[[int], bool]
    #: When the order is given up.
    until_s: float


class EndRefusal(NamedTuple):
    """Servers that were not ended by force, and those of their clients (PIDs) that may not be ended.

    The clients are empty if it is not known which attached last.
    """

    servers: tuple[int, ...]
    clients: tuple[int, ...]


class ForcedEnd(ControlTask):
    """Ends those servers by force that only have clients that may be ended.

    The others end after their clients; so does a server that lists none.
    """

    def __init__(self, control: ControlDaemon, servers: Sequence[int], order: EndOrder) -> None:
        super().__init__(control)
        self._servers = tuple(servers)
        self._order = order
        self._phase = LIST
        self._retry_at_s = self._log_deadline_s = 0.0
        #: The last command of the list, and the log's size before the first.
        self._mark = ""
        self._log_start = 0
        self._clients: dict[int, list[int]] = {}
        #: The servers that had clients. Before 550, they list none once they were told to shut down.
        self._with_clients: set[int] = set()
        self.refusals: list[EndRefusal] = []

    def tick(self, now_s: float) -> float | None:
        """Return when to be called again, None if all is done; raises UnresponsiveError without an answer."""
        if self._conversation is None:
            if self._phase == READ_LOG:
                return self._read_log(now_s)
            return self._retry_at_s if now_s < self._retry_at_s else self._list_clients(now_s)
        conversation = self._conversation
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            return self._list_again(now_s)
        if self._phase == END:
            return None
        self._clients = parse_client_lists(self._servers, answer)
        self._phase = READ_LOG
        self._log_deadline_s = now_s + LOG_WITHIN_S
        return self._read_log(now_s)

    def _list_clients(self, now_s: float) -> float | None:
        """List the clients, and have the servers shut down after them."""
        self._servers = running_servers(self._servers)
        if not self._servers or now_s > self._order.until_s:
            return None
        if any(is_stopped(pid) for pid in self._servers):
            return self._list_again(now_s)  # it would block the control daemon, which waits for its answer
        self._log_start = log_size(self._plan)
        self._mark = f"get_client_list {_unused_pid()}"
        commands = []
        for pid in self._servers:
            commands += [PING, f"get_client_list {pid}", f"shutdown_server {pid}"]
        return self._send([*commands, PING, self._mark], now_s)

    def _list_again(self, now_s: float) -> float:
        self._phase = LIST
        self._retry_at_s = now_s + COMMAND_RETRY_S
        return self._retry_at_s

    def _send(self, commands: Sequence[str], now_s: float) -> float:
        try:
            return self._converse(commands, now_s).deadline_s
        except ShortageError as error:
            log.debug("domain %s: %s", self._plan.name, error)
            return self._list_again(now_s)

    def _read_log(self, now_s: float) -> float | None:
        attached = served_clients(log_since(self._plan, self._log_start), self._mark)
        if attached is None and now_s < self._log_deadline_s:
            return now_s + _READ_S
        self._servers = self._choose(attached)
        if not self._servers:
            return None
        self._phase = END
        return self._send([PING, *(f"shutdown_server {pid} -f" for pid in self._servers)], now_s)

    def _choose(self, attached: Collection[int] | None) -> tuple[int, ...]:
        """Return the servers to end by force, and note the refusals.

        `attached` are the clients (PIDs) that have attached meanwhile, None if they are unknown.
        """
        new = self._unconfirmed(attached or ())
        chosen = []
        refused = []
        for server in self._servers:
            clients = self._clients.get(server, [])
            unconfirmed = self._unconfirmed(clients)
            if clients:
                self._with_clients.add(server)
            if unconfirmed:
                self.refusals.append(EndRefusal((server,), unconfirmed))
            elif server not in self._with_clients:
                continue
            elif attached is None or new:
                refused.append(server)
            else:
                chosen.append(server)
        if refused:
            self.refusals.append(EndRefusal(tuple(refused), new))
        return tuple(chosen)

    def _unconfirmed(self, clients: Collection[int]) -> tuple[int, ...]:
        return tuple(pid for pid in clients if not self._order.may_end(pid))


def _unused_pid() -> int:
    """Return an unpredictable PID that no process can have."""
    return _UNUSED_PIDS[int.from_bytes(os.urandom(8), "big") % len(_UNUSED_PIDS)]
