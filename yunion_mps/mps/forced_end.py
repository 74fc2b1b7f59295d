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
the time in which a front-end starts, some milliseconds. So the log is read once more after `-f`, and what has
attached meanwhile is reported. If `-f` is not received, because another front-end is connected, the clients
are listed again.

Source: nvidia-cuda-mps-control(1), shutdown_server, which says something else from 550 on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from yunion_mps.core.errors import ShortageError
from yunion_mps.host.proc import is_gone
from yunion_mps.host.process_info import is_stopped, uid_of
from yunion_mps.mps.control_daemon import ControlDaemon, ControlTask
from yunion_mps.mps.conversation import COMMAND_RETRY_S, PING, Conversation
from yunion_mps.mps.limits import parse_client_lists
from yunion_mps.mps.log_file import log_since, log_size
from yunion_mps.mps.log_lines import LogLine, served_clients
from yunion_mps.mps.processes import running_servers

log = logging.getLogger(__name__)

#: How long the log may be late, and how often it is read until then.
LOG_WITHIN_S = 1.0
_READ_S = 0.002
#: Numbers that no process has as its PID (PID_MAX_LIMIT of linux/threads.h is 4194304), and that fit into
#: the control daemon's 32 bits.
_UNUSED_PIDS = range(1_000_000_000, 1 << 31)

#: What a `ForcedEnd` does: it lists the clients, reads the log and ends the servers; then it writes another
#: mark into the log, and reads that again.
LIST = "list"
READ_LOG = "read log"
END = "end"
MARK_END = "mark end"
READ_END = "read end"


class EndOrder(NamedTuple):
    """The order to end servers by force unless they have a client that may not be ended."""

    #: Whether a client (PID) may be ended.
    may_end: Callable[[int], bool]
    #: When the order is given up.
    until_s: float
    #: The servers (PIDs) that others end, with all of their clients.
    with_all_clients: frozenset[int] = frozenset()


class LateClient(NamedTuple):
    """A client that was not confirmed."""

    pid: int
    #: Its user, if the control daemon's log says so; with one server for all users, it does not.
    uid: int | None = None


class UnconfirmedClients(NamedTuple):
    """Clients that may not be ended, of servers that were to be ended by force."""

    servers: tuple[int, ...]
    #: They are empty if it is not known which attached last.
    clients: tuple[LateClient, ...]
    #: Whether the servers have ended, probably with these clients; otherwise they end after them.
    has_ended: bool = False


class ForcedEnd(ControlTask):
    """Ends those servers by force that only have clients that may be ended.

    The others end after their clients; so does a server that lists none.

    servers: the PIDs of those that a change waits for.
    """

    def __init__(self, control: ControlDaemon, servers: Sequence[int], order: EndOrder) -> None:
        super().__init__(control)
        self._servers = tuple(servers)
        self._order = order
        self._phase = LIST
        self._retry_at_s = 0.0
        self._log_deadline_s = 0.0
        #: The command that the log has to have, and the log's size before the clients were listed.
        self._mark = ""
        self._log_start = 0
        self._clients: dict[int, list[int]] = {}
        #: The servers that had clients. Before 550, they list none once they were told to shut down.
        self._with_clients: set[int] = set()
        #: How many clients the log had when the servers to end were chosen, and the users of these servers.
        self._known_lines = 0
        self._uids: set[int | None] = set()
        self.unconfirmed: list[UnconfirmedClients] = []

    def tick(self, now_s: float) -> float | None:
        """Return when to be called again, None if all is done; raises UnresponsiveError without an answer."""
        if self._conversation is not None:
            return self._read_answer(self._conversation, now_s)
        if self._phase == READ_LOG:
            return self._read_log(now_s)
        if self._phase == READ_END:
            return self._read_end(now_s)
        if now_s < self._retry_at_s:
            return self._retry_at_s
        return self._mark_end(now_s) if self._phase == MARK_END else self._list_clients(now_s)

    def _read_answer(self, conversation: Conversation, now_s: float) -> float | None:
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if self._phase == END and (answer or not running_servers(self._servers)):
            self._phase = MARK_END
            return self._mark_end(now_s)
        if not answer:
            return self._try_again(now_s)
        self._log_deadline_s = now_s + LOG_WITHIN_S
        if self._phase == MARK_END:
            self._phase = READ_END
            return self._read_end(now_s)
        self._clients = parse_client_lists(self._servers, answer)
        self._phase = READ_LOG
        return self._read_log(now_s)

    def _list_clients(self, now_s: float) -> float | None:
        """List the clients, and have the servers shut down after them."""
        self._servers = running_servers(self._servers)
        if not self._servers or now_s > self._order.until_s:
            return None
        if any(is_stopped(pid) for pid in self._servers):
            return self._try_again(now_s)  # it would block the control daemon, which waits for its answer
        self._log_start = log_size(self._plan)
        self._mark = f"get_client_list {_unused_pid()}"
        commands = []
        for pid in self._servers:
            commands += [PING, f"get_client_list {pid}", f"shutdown_server {pid}"]
        return self._send([*commands, PING, self._mark], now_s)

    def _try_again(self, now_s: float) -> float:
        if self._phase != MARK_END:
            self._phase = LIST
        self._retry_at_s = now_s + COMMAND_RETRY_S
        return self._retry_at_s

    def _send(self, commands: Sequence[str], now_s: float) -> float:
        try:
            return self._converse(commands, now_s).deadline_s
        except ShortageError as error:
            log.debug("domain %s: %s", self._plan.name, error)
            return self._try_again(now_s)

    def _read_log(self, now_s: float) -> float | None:
        attached = served_clients(log_since(self._plan, self._log_start), self._mark)
        if attached is None and now_s < self._log_deadline_s:
            return now_s + _READ_S
        self._servers = self._choose(attached)
        if not self._servers:
            return None
        self._phase = END
        self._known_lines = len(attached or ())
        self._uids = {uid_of(pid) for pid in self._servers}
        return self._send([PING, *(f"shutdown_server {pid} -f" for pid in self._servers)], now_s)

    def _mark_end(self, now_s: float) -> float | None:
        """Write another mark into the log, now that the servers have ended."""
        if now_s > self._order.until_s:
            self.unconfirmed.append(UnconfirmedClients(self._servers, (), has_ended=True))
            return None
        self._mark = f"get_client_list {_unused_pid()}"
        return self._send([PING, self._mark], now_s)

    def _read_end(self, now_s: float) -> float | None:
        """Note the clients that have attached after the servers to end were chosen."""
        attached = served_clients(log_since(self._plan, self._log_start), self._mark)
        if attached is None:
            if now_s < self._log_deadline_s:
                return now_s + _READ_S
            self.unconfirmed.append(UnconfirmedClients(self._servers, (), has_ended=True))
            return None
        clients = self._ended_unconfirmed(attached[self._known_lines :])
        if clients:
            self.unconfirmed.append(UnconfirmedClients(self._servers, clients, has_ended=True))
        return None

    def _ended_unconfirmed(self, lines: Iterable[LogLine]) -> tuple[LateClient, ...]:
        listed: set[int] = set()  # which may be ended, or their servers would not have ended
        for server in self._servers:
            listed.update(self._clients.get(server, ()))
        clients: dict[int, LateClient] = {}
        for line in lines:
            is_served = self._plan.multiuser or line.uid in self._uids
            if not is_served or line.pid in listed:
                continue
            has_exited = line.pid > 0 and is_gone(line.pid)  # its server's end may have been the cause
            if has_exited or not self._order.may_end(line.pid):
                clients[line.pid] = LateClient(line.pid, None if self._plan.multiuser else line.uid)
        return tuple(clients.values())

    def _choose(self, attached: Sequence[LogLine] | None) -> tuple[int, ...]:
        """Return the servers to end by force, and note those that are not.

        `attached` are the lines about clients that have attached meanwhile, None if they are unknown.
        """
        attached_pids = [] if attached is None else [line.pid for line in attached]
        unconfirmed_new = self._unconfirmed(attached_pids)
        chosen = []
        refused = []
        for server in self._servers:
            clients = self._clients.get(server, [])
            unconfirmed = self._unconfirmed(clients)
            if clients:
                self._with_clients.add(server)
            if unconfirmed:
                self.unconfirmed.append(UnconfirmedClients((server,), unconfirmed))
            elif server not in self._with_clients:
                continue
            elif attached is None or unconfirmed_new:
                refused.append(server)
            else:
                chosen.append(server)
        if refused:
            self.unconfirmed.append(UnconfirmedClients(tuple(refused), unconfirmed_new))
        return tuple(chosen)

    def _unconfirmed(self, clients: Iterable[int]) -> tuple[LateClient, ...]:
        return tuple(LateClient(pid) for pid in clients if not self._order.may_end(pid))


def _unused_pid() -> int:
    """Return an unpredictable PID that no process can have."""
    return _UNUSED_PIDS[int.from_bytes(os.urandom(8), "big") % len(_UNUSED_PIDS)]
