"""The clients of a control daemon, in its own words.

Asked only on purpose: `ps` waits in the control daemon's only thread for its servers, so a server that
hangs keeps it from everybody (measured). A server that was stopped is not asked.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.errors import ControlError
from yunion_mps.host.proc import is_stopped
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import HEARD, Conversation, OccupiedError, SilentError
from yunion_mps.mps.diagnosis import front_end_at
from yunion_mps.mps.servers import server_pids

ANSWER_TIMEOUT_S = 5.0


class ClientRow(NamedTuple):
    """One line of `ps`: the client, its server, and the beginning of its GPU's UUID."""

    pid: int
    server: int
    gpu: str


def converse(program: str, plan: DomainPlan, command: str) -> list[str]:
    """The answer to the command; waits for it, so it is for threads.

    Raises ControlError, ShortageError, and OccupiedError where another front-end is connected.
    """
    now_s = time.monotonic()
    conversation = Conversation(program, plan.pipe_directory, [HEARD, command], now_s, ANSWER_TIMEOUT_S)
    try:
        poll = select.poll()
        poll.register(conversation.fileno(), select.POLLIN)
        while (answer := conversation.poll(time.monotonic())) is None:
            poll.poll(100)
    finally:
        conversation.close()
    if not answer:
        raise OccupiedError(plan.pipe_directory, front_end_at(plan.pipe_directory))
    return answer[1:]


def clients_of(program: str, plan: DomainPlan, control_pid: int) -> list[ClientRow]:
    """Its clients; waits for the answer. Raises ControlError where it cannot be asked, or does not answer."""
    servers = server_pids(control_pid)
    _refuse_stopped(servers)
    return rows_in(converse(program, plan, "ps")) if servers else []


def _refuse_stopped(servers: Sequence[int]) -> None:
    """Raise SilentError where one of the servers was stopped: to ask it would stop the control daemon too."""
    stopped = [pid for pid in servers if is_stopped(pid)]
    if stopped:
        what = f"its MPS server (PID {stopped[0]}) was stopped, and asking for its clients would hang"
        raise SilentError(what, f"let it go on: kill -CONT {stopped[0]}")


def server_state(program: str, plan: DomainPlan, server: int) -> str | None:
    """`INITIALIZING`, `ACTIVE` or `FAULT`; None where the control daemon does not know (before 550)."""
    answer = converse(program, plan, f"get_server_status {server}")
    word = answer[0].strip() if answer else ""
    return word if word.isalpha() and word.isupper() else None


def rows_in(answer: Sequence[str]) -> list[ClientRow]:
    """The clients in an answer to `ps`; its columns differ from release to release, so its header counts."""
    header = next((line.split() for line in answer if line.startswith("PID")), None)
    if header is None:
        return []
    columns = {name: place for place, name in enumerate(header)}
    try:
        server, device = columns["SERVER"], columns["DEVICE"]
    except KeyError:
        raise ControlError(f"its list of clients cannot be read: {' '.join(header)!r}") from None
    rows = []
    for line in answer:
        words = line.split()
        if len(words) > max(server, device) and words[0].isdigit() and words[server].isdigit():
            rows.append(ClientRow(int(words[0]), int(words[server]), words[device]))
    return rows


def terminate(program: str, plan: DomainPlan, server: int, client: int) -> bool:
    """Have the server let go of the client, which is then safe to end; False where it has none to let go of.

    Raises ControlError where it does not.
    """
    _refuse_stopped([server])
    answer = converse(program, plan, f"terminate_client {server} {client}")
    if any("not found" in line for line in answer):
        return False  # it waits for a server, or that is about to end
    if not answer or answer[-1].strip() != "0":
        words = "; ".join(answer) or "nothing"
        what = f"its MPS server (PID {server}) refused to let go of it (the control daemon's answer: {words})"
        raise ControlError(what, "to end it all the same: yunion-mps clients terminate --force")
    return True
