"""Terminate MPS clients without harming their neighbours.

A client that is killed while it uses the GPU can take its MPS server and all of that server's clients with
it. So its server disconnects it first (`terminate_client`), and only then is it signalled.

Source: NVIDIA: Multi-Process Service, sections "Limitations" and "Client Early Termination".
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.enums import NO_SIGNAL, SIGNAL_KILL, SIGNAL_TERM
from yunion_mps.core.errors import BusyError, HostError, NotAllowedError, NotFoundError, YunionError
from yunion_mps.core.models import Event
from yunion_mps.core.units import rfc3339
from yunion_mps.host.control_groups import ControlGroup, control_groups_of
from yunion_mps.host.proc import is_kernel_thread, started_s, user_name, users_of
from yunion_mps.host.processes import Process
from yunion_mps.host.threads import on_thread
from yunion_mps.mps.clients import BusyServerError, terminate
from yunion_mps.mps.conversation import OccupiedError
from yunion_mps.mps.processes import find_control_program, is_server
from yunion_mps.observe.clients import ClientService
from yunion_mps.observe.holdings import client_with_pid, clients_of_lease, refuse_if_unknown
from yunion_mps.observe.process_list import domain_of_failure, possible_client
from yunion_mps.service.permissions import is_privileged
from yunion_mps.supervisor import Supervisor

if TYPE_CHECKING:
    from yunion_mps import answers
    from yunion_mps.mps.domain import Domain
    from yunion_mps.observe.holdings import AnyClient

log = logging.getLogger(__name__)

#: The signals that a client is sent, in this order, until it has ended.
SignalSequence = tuple[signal.Signals, ...]

TERM: SignalSequence = (signal.SIGTERM,)
KILL: SignalSequence = (signal.SIGTERM, signal.SIGKILL)
SIGNALS: Mapping[str, SignalSequence] = {NO_SIGNAL: (), SIGNAL_TERM: TERM, SIGNAL_KILL: KILL}
#: How long a client has to end after each signal.
_GRACE_S = 5.0
#: How long to wait while another front-end occupies the control daemon.
OCCUPIED_S = 5.0
#: How long to wait until the control daemons list all clients.
LIST_S = 1.0
#: How often that is tried again.
RETRY_S = 0.1
_LIST_JOBS = "list the clients: yunion-mps who --clients"


class _Order(NamedTuple):
    """How clients are terminated, and for whom."""

    #: The user who asks for it.
    uid: int
    #: Why, for the log and events; the user's request if it is empty.
    cause: str
    signals: SignalSequence
    #: The reason code of the events.
    code: str = reasons.CLIENT_TERMINATED
    #: A control group all of whose processes the user may terminate.
    container: ControlGroup | None = None


class Terminator:
    """Terminates MPS clients: for users, for leases that are released, and for budgets that are exceeded."""

    def __init__(self, supervisor: Supervisor, clients: ClientService) -> None:
        self._supervisor = supervisor
        self._clients = clients

    async def terminate_client(
        self, pid: int, uid: int, cause: str = "", *, started: str = "", signals: SignalSequence = TERM
    ) -> answers.TerminationJson:
        """Terminate a client for the user `uid` because of `cause`, by default the user's request.

        Its server disconnects it, then it gets `signals`, with 5 s to end after each. A process outside MPS
        only gets the signals. `started` is when it started, as it was listed; empty for any.

        Raises BusyError during a stop, NotFoundError if it is not a client or has started at another time,
        NotAllowedError if it is another user's or not a job, and, if it is not to be killed, ControlError if
        its server does not disconnect it, and HostError if it is not known whether it is a client.
        """
        self._refuse_while_stopping()
        listed = await self._list()
        if signal.SIGKILL in signals:
            listed = self._with_possible(listed, [pid])
        client = find_client(listed, pid)
        if started and client["started"] != started:  # it has ended; another process has its PID
            raise _ended_error(pid)
        return await self._end(client, _Order(uid, cause, signals))

    async def terminate_lease(
        self,
        lease: answers.LeaseRecordJson,
        uid: int,
        cause: str = "",
        *,
        signals: SignalSequence = TERM,
        even_if_unknown: bool = False,
        container: ControlGroup | None = None,
    ) -> list[answers.TerminationJson]:
        """Terminate all clients of a lease, as `terminate_all` does.

        Raises HostError with the code PROCESSES_UNKNOWN if clients may be unknown, unless `even_if_unknown`.
        """

        def choose(listed: answers.ClientListJson) -> list[AnyClient]:
            # The holder may be a client that is not listed, because not all clients are known.
            if even_if_unknown and lease["pid"] is not None:
                listed = self._with_possible(listed, [lease["pid"]])
            return clients_of_lease(lease, listed)

        return await self.terminate_all(
            choose,
            uid,
            cause,
            signals=signals,
            container=container,
            all_known_on=() if even_if_unknown else lease["gpus"],
        )

    async def terminate_all(
        self,
        choose: Callable[[answers.ClientListJson], Iterable[AnyClient]],
        uid: int,
        cause: str = "",
        *,
        signals: SignalSequence = TERM,
        container: ControlGroup | None = None,
        all_known_on: Collection[str] = (),
        code: str = reasons.CLIENT_TERMINATED,
    ) -> list[answers.TerminationJson]:
        """Terminate the chosen clients at the same time, each as `terminate_client` does.

        A client's error is in its termination.

        choose: called with the list of clients; returns those to terminate
        uid: the user who terminates them
        container: the user may terminate all clients in it, whichever user they have (`attested_container`)
        all_known_on: the GPUs (addresses) whose clients all have to be known
        code: the reason code of the events

        Raises BusyError while the daemon stops, and HostError with the code PROCESSES_UNKNOWN if clients on
        the GPUs of `all_known_on` may be unknown.
        """
        self._refuse_while_stopping()
        listed = await self._list()
        self._refuse_unknown(listed, all_known_on)
        order = _Order(uid, cause, signals, code=code, container=container)
        ends = [self._try(client, order) for client in choose(listed)]
        return list(await asyncio.gather(*ends))

    async def _list(self) -> answers.ClientListJson:
        """List the clients; retry for a moment if some are unknown: another front-end may be connected."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + LIST_S
        while True:
            listed = await self._clients.clients()
            if not listed["errors"] or loop.time() > end_s:
                return listed
            await asyncio.sleep(RETRY_S)

    def _with_possible(self, listed: answers.ClientListJson, pids: Iterable[int]) -> answers.ClientListJson:
        """Add those processes that may be clients, because not all clients are known."""
        if not listed["errors"]:
            return listed
        known = {client["pid"] for client in (*listed["clients"], *listed["waiting"])}
        servers = [server for server in listed["servers"] if server["domain"]]
        only = servers[0] if len(servers) == 1 else None
        clients = list(listed["clients"])
        for pid in pids:
            if pid not in known:
                clients.append(possible_client(pid, only))
        return {**listed, "clients": clients}

    def _refuse_unknown(self, listed: answers.ClientListJson, gpus: Collection[str]) -> None:
        """Raise HostError if clients on one of the GPUs (addresses) may be unknown."""
        if not gpus or not listed["errors"]:
            return
        snapshot = self._supervisor.snapshot()
        uuids = {gpu.uuid for gpu in snapshot.inventory.gpus if gpu.address in gpus}
        other_domains: set[str] = set()
        for status in snapshot.domains:
            if uuids.isdisjoint(status.plan.gpu_uuids):
                other_domains.add(status.plan.name)
        errors = [error for error in listed["errors"] if domain_of_failure(error) not in other_domains]
        if errors:
            code = reasons.PROCESSES_UNKNOWN
            message = f"not all processes are known, so none is terminated: {'; '.join(errors)}"
            raise HostError(message, reasons.hint_of(code), code)

    def _refuse_while_stopping(self) -> None:
        if self._supervisor.stopping:
            message = "the daemon is stopping and waiting for running jobs to end"
            raise BusyError(message, "wait: it ends their MPS servers after cuda_mps_stop_timeout_s")

    async def _try(self, client: AnyClient, order: _Order) -> answers.TerminationJson:
        try:
            return await self._end(client, order)
        except NotFoundError:
            return termination_json(client, "it has ended by itself", ended=True)
        except YunionError as error:
            log.warning("PID %d was not terminated: %s", client["pid"], error.message)
            return termination_json(client, error.message, ended=False, code=error.code)

    async def _end(self, client: AnyClient, order: _Order) -> answers.TerminationJson:
        pid = client["pid"]
        process = Process.adopt(pid)
        if process is None:
            raise _ended_error(pid)
        try:
            began_s = started_s(pid)
            if began_s is None or rfc3339(began_s) != client["started"]:  # it has ended; its PID was reused
                raise _ended_error(pid)
            _refuse_unless_own(client, order.uid, order.container)
            _refuse_unless_job(pid, self._supervisor.domains)
            outcome, ended = await self._disconnect_and_signal(process, client, order.signals)
        finally:
            process.close()
        if not outcome:
            return termination_json(client, "it is not an MPS client", ended=False)
        text = f"{client['command'] or 'a job'} (PID {pid}) of {client['user']}: {outcome}"
        cause = order.cause or f"requested by {user_name(order.uid)}"
        log.warning("%s (%s)", text, cause)
        event = Event(
            severity="warning",
            kind="client",
            subject=client["domain"] or f"PID {pid}",
            what=text,
            cause=cause,
            code=order.code,
            common=f"jobs of {client['user']}: {cause}",  # `what` has the command line
        )
        self._supervisor.event_log.record(event)
        return termination_json(client, outcome, ended=ended)

    async def _disconnect_and_signal(
        self, process: Process, client: AnyClient, signals: SignalSequence
    ) -> tuple[str, bool]:
        """Return the steps that were taken, as text, and whether it has ended.

        No step is taken if the process is outside MPS and gets no signal.
        """
        steps = []
        server = None if "since" in client else client["server"]  # a process that waits has none yet
        if server:
            try:
                disconnected = await self._disconnect(process.pid, server, client["domain"])
                steps.append("its MPS server disconnected it" if disconnected else "it had no MPS server")
            except YunionError as error:
                if process.status() is not None:  # its server knows it no longer
                    return "it has ended by itself", True
                if signal.SIGKILL not in signals:
                    raise
                steps.append(f"its MPS server did not disconnect it ({error.message})")
        for number in signals:
            process.signal(number)
            if await _has_ended(process):
                return "; ".join([*steps, f"ended by {number.name}"]), True
        if process.status() is not None:
            return "; ".join([*steps, "it has ended"]), True
        if signals:
            steps.append(f"it is still running after {_GRACE_S:g} s")
        return "; ".join(steps), False

    async def _disconnect(self, pid: int, server: int, domain: str) -> bool:
        """Have the server disconnect the client; return False if it is none of the server's.

        Raises YunionError if the server does not disconnect it.
        """
        loop = asyncio.get_running_loop()
        domains = self._supervisor.snapshot().domains
        plan = next(status.plan for status in domains if status.plan.name == domain)
        program = find_control_program()
        end_s = math.inf  # no deadline until its turn: many other clients may come first
        while True:
            try:
                async with self._clients.conversation:
                    end_s = min(end_s, loop.time() + OCCUPIED_S)
                    return await on_thread(lambda: terminate(program, plan, server, pid))
            except (OccupiedError, BusyServerError):
                if loop.time() > end_s:
                    raise
                await asyncio.sleep(RETRY_S)


def find_client(listed: answers.ClientListJson, pid: int) -> AnyClient:
    """Return the client with this PID.

    Raises NotFoundError if there is none, and HostError if not all clients are known.
    """
    client = client_with_pid(pid, listed)
    if client is not None:
        return client
    refuse_if_unknown(pid, listed)
    raise NotFoundError(f"PID {pid} is not an MPS client", _LIST_JOBS)


def termination_json(
    client: AnyClient, outcome: str, *, ended: bool, code: str = ""
) -> answers.TerminationJson:
    """Return the answer for a client: how it has ended, or with `code` why it has not."""
    return {
        "pid": client["pid"],
        "user": client["user"],
        "command": client["command"],
        "ended": ended,
        "how": outcome,
        "reason_code": code,
    }


def _ended_error(pid: int) -> NotFoundError:
    return NotFoundError(f"PID {pid} has just ended", "")


def _refuse_unless_own(client: AnyClient, uid: int, container: ControlGroup | None) -> None:
    """Raise NotAllowedError if the user may not terminate the process.

    Only the kernel is asked, because the process's user can choose its environment, its command line, and
    the names of their own control groups.
    """
    pid = client["pid"]
    if not may_terminate(pid, uid, container):
        message = f"PID {pid} is a job of {client['user']}"
        raise NotAllowedError(message, "only root and its owner may terminate it")


def may_terminate(pid: int, uid: int, container: ControlGroup | None) -> bool:
    """Return whether a user may terminate the process, or all processes in the `container`."""
    if is_privileged(uid) or uid in users_of(pid):
        return True
    return container is not None and container.contains(control_groups_of(pid))


def _refuse_unless_job(pid: int, domains: Sequence[Domain]) -> None:
    """Raise NotAllowedError for a process that is no job, although the driver may list it on a GPU."""
    if pid == 1:
        message = "is the init process"
    elif is_kernel_thread(pid):
        message = "is a kernel thread"
    elif pid == os.getpid():
        message = "is this daemon"
    elif any(pid == domain.status().pid for domain in domains):
        message = "is a control daemon"
    elif any(pid in domain.server_pids() for domain in domains) or is_server(pid):
        message = "is an MPS server"
    else:
        return
    raise NotAllowedError(f"PID {pid} {message}, not a job", _LIST_JOBS)


async def _has_ended(process: Process) -> bool:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process.fileno(), ended.set)
    try:
        await asyncio.wait_for(ended.wait(), _GRACE_S)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(process.fileno())
    return True
