"""Whose jobs the MPS servers have, which is asked before another user gets a device.

A server stays when its last client has ended, and NVML lists a job only some time after it has attached. So a
server counts as one with jobs of its owner until its control daemon has said that it has none. The control
daemon is asked only if that matters, because a server that hangs would block it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from yunion_mps.core.errors import DriverError, HostError, ShortageError, YunionError
from yunion_mps.core.models import Lease, ServedUser
from yunion_mps.core.tasks import within
from yunion_mps.host.proc import started_s
from yunion_mps.host.process_info import uid_of
from yunion_mps.host.threads import on_thread
from yunion_mps.mps.clients import BusyServerError, clients_of
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.processes import find_control_program
from yunion_mps.service.queries import Queries
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: How long to wait for the driver's list of processes.
_DRIVER_TIMEOUT_S = 2.0


class ServerUsers:
    """Finds out whose jobs the MPS servers have; leases and the monitor ask it."""

    def __init__(
        self,
        supervisor: Supervisor,
        queries: Queries,
        conversation: asyncio.Lock,
        tick: Callable[[], None],
    ) -> None:
        """`conversation` is held while a control daemon is queried; `tick` requests a tick soon."""
        self._tick = tick
        self._supervisor = supervisor
        self._queries = queries
        self._conversation = conversation
        #: The servers (PIDs) that had no clients when they were asked, and that have had no job since.
        self._idle: set[int] = set()
        #: The servers (PIDs) that accept no new clients, because one of another user waits, or has waited.
        self._ending: set[int] = set()

    def note(self) -> None:
        """Tell `Queries` which users' jobs the servers have, or may have."""
        users: dict[str, tuple[ServedUser, ...]] = {}
        running: set[int] = set()
        self._idle -= self._supervisor.jobs.servers_with_jobs
        for domain in self._supervisor.domains:
            if domain.in_effect.multiuser:
                continue
            servers = domain.server_pids()
            running.update(servers)
            served: list[ServedUser] = []
            for pid in servers:
                user = None if pid in self._idle else _owner(pid)
                if user is not None:
                    served.append(user)
            for pid in self._ending.intersection(servers):
                next_uid = domain.control.log.displaced_by(pid)
                if next_uid is not None:
                    served.append(ServedUser(next_uid, 0.0, server=pid, is_next=True))
            if served:
                users[domain.in_effect.name] = tuple(served)
        self._idle &= running
        self._ending &= running
        self._queries.set_users(users)

    def lease_ended(self, lease: Lease) -> None:
        """Note that the lease's processes may still be clients, although they were idle before it began."""
        name = lease.devices[0].domain
        for domain in self._supervisor.domains:
            if domain.in_effect.name == name:
                self._idle.difference_update(domain.server_pids())
        self.note()

    async def poll(self) -> None:
        """Poll which processes use the GPUs."""
        nvml = self._supervisor.nvml
        began_s = asyncio.get_running_loop().time()
        if nvml:
            with contextlib.suppress(DriverError, ShortageError):
                self._supervisor.jobs.update(await on_thread(nvml.processes), began_s)

    async def ask(self, uid: int | None = None) -> None:
        """Find out which servers have clients: for a request of the user `uid`, those of all other users.

        Otherwise only those are asked of which that is not known. Servers whose owner has a lease in the
        domain are not asked, because that keeps others out anyway. But each one for whose end a client of
        another user waits is asked, because it may keep its owner out as well. What the driver and the
        control daemons do not answer in time stays unknown.
        """
        # Servers that fail for the last job are known before the next one is sent there.
        is_tick_due = False
        for domain in self._supervisor.domains:
            is_tick_due |= domain.note_new_log_lines()
        if is_tick_due:
            self._tick()
        to_ask = self._to_ask(uid)
        if to_ask:
            slow = HostError("the driver is slow to answer")
            with contextlib.suppress(HostError):
                await within(_DRIVER_TIMEOUT_S, self.poll(), slow)
        with_jobs = self._supervisor.jobs.servers_with_jobs
        for domain, servers in to_ask:
            displaced = self._displaced(domain).intersection(servers)
            if displaced or not with_jobs.issuperset(servers):
                await self._ask_control_daemon(domain, servers)
        self.note()

    def _to_ask(self, uid: int | None) -> list[tuple[Domain, list[int]]]:
        """Return the domains to ask, each with the servers whose clients matter."""
        owners: set[tuple[str, int | None]] = set()
        for lease in self._queries.ledger.leases.values():
            owners.add((lease.devices[0].domain, lease.holder.user_uid))
        known_idle = self._idle if uid is None else set()
        to_ask = []
        for domain in self._supervisor.domains:
            name = domain.in_effect.name
            if domain.in_effect.multiuser:
                continue
            displaced = self._displaced(domain)
            servers = []
            for pid in domain.server_pids():
                owner = uid_of(pid)
                matters = owner not in (None, uid) and (name, owner) not in owners
                if pid in displaced or (matters and pid not in known_idle):
                    servers.append(pid)
            if servers:
                to_ask.append((domain, servers))
        return to_ask

    def _displaced(self, domain: Domain) -> set[int]:
        """Return the servers for whose end another user waits, unless they are known to serve nobody new."""
        displaced: set[int] = set()
        for pid in domain.server_pids():
            if pid not in self._ending and domain.control.log.displaced_by(pid) is not None:
                displaced.add(pid)
        return displaced

    async def _ask_control_daemon(self, domain: Domain, servers: list[int]) -> None:
        plan = domain.in_effect
        pid = domain.control.pid
        if not pid:
            return
        try:
            async with self._conversation:
                rows = await on_thread(lambda: clients_of(find_control_program(), plan, pid))
        except YunionError as error:
            if isinstance(error, BusyServerError):
                self._ending.add(error.server)
            log.debug("domain %s: its clients are unknown: %s", plan.name, error.message)
            self._idle.difference_update(servers)
            return
        with_clients = {row.server for row in rows}
        self._idle.difference_update(with_clients)
        self._idle.update(set(servers) - with_clients)


def _owner(server: int) -> ServedUser | None:
    """Return the user whose server this is; None if it has just ended."""
    uid = uid_of(server)
    since_s = started_s(server)
    if uid is None or since_s is None:
        return None
    return ServedUser(uid, since_s, server=server)
