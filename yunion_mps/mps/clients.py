"""The clients of a control daemon, served or waiting for a server.

They are queried only on request: `ps` waits in the control daemon's only thread for its servers, so a hung
server blocks it for every other process (measured). A stopped server is not queried.

Source: nvidia-cuda-mps-control(1), ps and terminate_client.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from yunion_mps.core.errors import ControlError
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.reasons import SERVER_BUSY, hint_of
from yunion_mps.host.process_info import is_stopped, uid_of
from yunion_mps.host.processes import readable
from yunion_mps.mps.conversation import (
    ANSWER_TIMEOUT_S,
    PING,
    Conversation,
    UnresponsiveError,
    occupied_error,
)
from yunion_mps.mps.directories import open_file
from yunion_mps.mps.log_file import LOG_NAME, OLDER
from yunion_mps.mps.log_lines import (
    CLIENT_WAITS,
    CONTROL_STARTED,
    SERVER_BEGINS,
    SERVER_READY,
    parse_lines,
    timestamp_parser,
)
from yunion_mps.mps.processes import running_servers, server_pids


class ClientRow(NamedTuple):
    """One line of `ps`: the client, its server, and the first part of its GPU's UUID."""

    pid: int
    server: int
    gpu: str


class BusyServerError(ControlError):
    """A server does not say which clients it has, or disconnect one.

    So it is once a client of another user waits for it to end, and once it was told to shut down, until its
    own clients have ended (measured with 535). Its clients are unknown then: it may still have some.
    """

    code = SERVER_BUSY

    def __init__(self, server: int) -> None:
        text = (
            f"the MPS server (PID {server}) accepts no commands, because it ends once its clients have ended"
        )
        super().__init__(text, hint_of(SERVER_BUSY))
        self.server = server


def clients_of(program: str, plan: DomainPlan, control_pid: int) -> list[ClientRow]:
    """List the clients; blocks.

    Raises ControlError if the control daemon does not answer, and BusyServerError if a server does not list
    its clients.
    """
    servers = server_pids(control_pid)
    if not servers:
        return []
    _refuse_stopped(servers)
    answer = _run_command(program, plan, "ps")
    if any(_is_unknown(line) for line in answer):
        running = running_servers(servers)
        if running:
            raise BusyServerError(running[0])
    return parse_clients(answer)


def _is_unknown(line: str) -> bool:
    """Return whether the control daemon says that it has no such server: it says so of a busy one, too."""
    return line.startswith("Server") and line.rstrip("!").endswith("not found")


def server_state(program: str, plan: DomainPlan, server: int) -> str | None:
    """Return `INITIALIZING`, `ACTIVE` or `FAULT`; None if the driver (before 550) does not report it.

    Source: NVIDIA: Multi-Process Service, section "Provisioning Sequence", Server.
    """
    answer = _run_command(program, plan, f"get_server_status {server}")
    state = answer[0].strip() if answer else ""
    return state if state.isalpha() and state.isupper() else None


def terminate(program: str, plan: DomainPlan, server: int, client: int) -> bool:
    """Have the server disconnect the client, which is then safe to kill; False if it has no such client.

    program: the path of NVIDIA's control program
    server, client: their PIDs

    Raises ControlError if the server refuses, and BusyServerError if it cannot now.

    Source: NVIDIA: Multi-Process Service, section "Client Early Termination": the answer is 0 for success.
    """
    _refuse_stopped([server])
    answer = _run_command(program, plan, f"terminate_client {server} {client}")
    if any(_is_unknown(line) for line in answer) and running_servers([server]):
        raise BusyServerError(server)
    if any("not found" in line for line in answer):
        return False  # it waits for a server, or its server has ended
    if not answer or answer[-1].strip() != "0":
        reply = "; ".join(answer) or "nothing"
        text = (
            f"the MPS server (PID {server}) refused to disconnect it (the control daemon answered: {reply})"
        )
        raise ControlError(text, "end it anyway: yunion-mps terminate --force")
    return True


def _refuse_stopped(servers: Sequence[int]) -> None:
    """Raise UnresponsiveError if a server is stopped: a query would block the control daemon as well."""
    stopped = [pid for pid in servers if is_stopped(pid)]
    if stopped:
        message = f"the MPS server (PID {stopped[0]}) is stopped, so its clients cannot be listed"
        raise UnresponsiveError(message, f"resume it: kill -CONT {stopped[0]}")


def _run_command(program: str, plan: DomainPlan, command: str) -> list[str]:
    """Run the command and wait for its answer; call it on a thread.

    Raises ControlError, ShortageError, and OccupiedError if another front-end is connected.
    """
    now_s = time.monotonic()
    conversation = Conversation(program, plan.pipe_directory, [PING, command], now_s, ANSWER_TIMEOUT_S)
    try:
        while (answer := conversation.poll(time.monotonic())) is None:
            readable(conversation.fileno(), 0.1)
    finally:
        conversation.close()
    if not answer:
        raise occupied_error(plan.pipe_directory)
    return answer[1:]


def parse_clients(answer: Sequence[str]) -> list[ClientRow]:
    """Return the rows of the answer to `ps`, by its header, because its columns differ between releases.

    Raises ControlError if a row cannot be read.
    """
    header = next((line.split() for line in answer if line.startswith("PID")), None)
    if header is None:
        return []
    columns = {name: index for index, name in enumerate(header)}
    try:
        server = columns["SERVER"]
        device = columns["DEVICE"]
    except KeyError:
        raise ControlError(f"its list of clients cannot be read: {' '.join(header)!r}") from None
    rows = []
    for line in answer:
        fields = line.split()
        if len(fields) > max(server, device) and fields[0].isdigit() and fields[server].isdigit():
            rows.append(ClientRow(int(fields[0]), int(fields[server]), fields[device]))
    return rows


# -- clients that wait because another user has the MPS server


class WaitingClient(NamedTuple):
    """A client that waits for the end of a server of another user."""

    pid: int
    uid: int
    #: When its wait began, in s since 1970.
    since_s: float
    #: The PID of the server.
    server: int


def waiting_clients(plan: DomainPlan, servers: Sequence[int]) -> list[WaitingClient]:
    """Return the clients that wait while these servers run, in order; none if one server serves all users.

    Clients in containers are included, because the log has their PIDs on the host. A client that gave up
    without exiting is still listed.

    Source: nvidia-cuda-mps-control(1), section "DESCRIPTION": a server has the clients of one user.
    """
    owners: dict[int, int] = {}
    for pid in servers:
        owner = uid_of(pid)
        if owner is not None:
            owners[pid] = owner
    if plan.multiuser or not owners:
        return []
    waiting = []
    for pid, (uid, since_s) in parse_waiting(_read_log(plan), timestamp_parser(time.time())).items():
        if uid_of(pid) != uid:
            continue
        servers_of_others = [server for server, owner in owners.items() if owner != uid]
        server = servers_of_others[0] if servers_of_others else next(iter(owners))
        waiting.append(WaitingClient(pid, uid, since_s, server))
    return sorted(waiting, key=lambda client: client.since_s)


def parse_waiting(log: bytes, seconds: Callable[[str], float]) -> dict[int, tuple[int, float]]:
    """Parse the user and start time of each waiting client, by PID.

    The log does not say when a waiting client is served: when a server starts for a user, all of that user's
    clients are served (measured).
    """
    pending: dict[int, tuple[int, float]] = {}
    users: dict[int, int | None] = {}
    for line in parse_lines(log):
        if line.kind == CONTROL_STARTED:
            pending = {}
            users = {}
        elif line.kind == CLIENT_WAITS and line.uid is not None:
            with contextlib.suppress(ValueError, OverflowError):  # the time, if another process wrote it
                pending[line.pid] = (line.uid, seconds(line.time))
        elif line.kind in (SERVER_BEGINS, SERVER_READY):
            if line.kind == SERVER_BEGINS:
                users[line.pid] = line.uid
            served = users.get(line.pid)
            pending = {pid: entry for pid, entry in pending.items() if entry[0] != served}
    return pending


def _read_log(plan: DomainPlan) -> bytes:
    """Return the whole log, the older part first; 2 MiB at most."""
    parts = []
    for name in (OLDER, LOG_NAME):
        with contextlib.suppress(OSError), open_file(os.path.join(plan.log_directory, name)) as file:
            parts.append(file.read())
    return b"\n".join(parts)
