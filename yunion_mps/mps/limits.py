"""The limits of a domain: set them, and read them back.

New limits apply only to the next MPS server. So an adopted control daemon is queried before anything is set:
the limits of its servers are known only from its answers and from what was recorded.

A limit of None belongs to a GPU that the control daemon serves and the plan does not; it is left unchanged.

Source: nvidia-cuda-mps-control(1), set_default_active_thread_percentage and
set_default_device_pinned_mem_limit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from yunion_mps.core import reasons
from yunion_mps.core.errors import ControlError, ShortageError, YunionError
from yunion_mps.core.models import DomainPlan, PlannedGpu
from yunion_mps.core.reasons import NO_REASON, Reason
from yunion_mps.core.waits import describe_servers
from yunion_mps.mps.control_daemon import ControlDaemon, ControlTask, in_running_order
from yunion_mps.mps.conversation import COMMAND_RETRY_S, PING, Conversation, occupied_error
from yunion_mps.mps.processes import PROGRAM, domain_plan_json, plan_from_json
from yunion_mps.planning.environment import decimal

log = logging.getLogger(__name__)

_HINT = (
    "check the end of the control daemon's log; its devices stay unavailable until the limits are in effect"
)


#: What a `LimitsSetter` does: it reads the limits, lists the clients of servers whose limits are unknown, or
#: sets the limits and reads them back.
READ = "read"
LIST_CLIENTS = "list clients"
SET = "set"


class LimitsInEffect(NamedTuple):
    """The plan that a control daemon's clients get, and the servers (PIDs) that have other limits."""

    plan: DomainPlan
    old_servers: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {"plan": domain_plan_json(self.plan), "old_servers": list(self.old_servers)}

    @classmethod
    def from_json(cls, value: Any) -> LimitsInEffect | None:
        """Parse the result of `to_json`; None for anything else, such as another release's record."""
        try:
            plan = plan_from_json(value["plan"])
            servers = tuple(int(pid) for pid in value["old_servers"])
        except (TypeError, KeyError, ValueError):
            return None
        return cls(plan, servers) if plan else None


class LimitsSetter(ControlTask):
    """Brings the limits of a control daemon's plan into effect, and finds out which servers have others.

    If the limits of another program's servers were never recorded, and the answer is not the desired one, the
    servers count as having other limits. Commands are retried without end while another front-end is
    connected.
    """

    def __init__(self, control: ControlDaemon, known: LimitsInEffect, *, set_first: bool, idle: bool) -> None:
        """Do nothing before the first tick.

        known: what is in effect, as far as we know.
        set_first: set the limits without reading them first.
        idle: no job uses its GPUs, so servers with other limits may be shut down.
        """
        super().__init__(control)
        self._known = known
        self._phase = SET if set_first else READ
        self._idle = idle
        self._first: list[str] = []
        #: The servers whose clients are listed in the phase LIST_CLIENTS.
        self._listed_servers: tuple[int, ...] = ()
        self._retry_at_s = 0.0
        #: Why it takes longer than usual, empty if it does not.
        self.note = NO_REASON

    def tick(self, now_s: float) -> float | LimitsInEffect:
        """Return the limits in effect once they are read back; before that, when to call this again.

        Raises UnresponsiveError if there is no answer, ControlError if the limits are not in effect or a
        running server's limits are unknown, and ShortageError if commands cannot be sent to a new server.
        """
        if self._conversation is None and now_s < self._retry_at_s:
            return self._retry_at_s
        conversation = self._conversation or self._start_conversation(now_s)
        if conversation is None:
            return self._retry_at_s
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            return self._on_rejected(now_s)
        if self._phase == LIST_CLIENTS:
            self._end_idle_servers(answer)
        else:
            result = self._result(answer)
            if result:
                return result
            self._phase = LIST_CLIENTS if self._listed_servers else SET
        return self.tick(now_s)

    def _start_conversation(self, now_s: float) -> Conversation | None:
        """Send the commands; None if no process can be started now and it may have jobs, to retry later."""
        if self._phase == LIST_CLIENTS:
            return self._try_to_converse(client_commands(self._listed_servers), now_s)
        commands = [*self._first, *set_commands(self._plan)] if self._phase == SET else []
        # The servers are listed after the limits are set, so one that starts in between counts as old.
        return self._try_to_converse([*commands, "get_server_list", *get_commands(self._plan)], now_s)

    def _try_to_converse(self, commands: Sequence[str], now_s: float) -> Conversation | None:
        try:
            return self._converse(commands, now_s)
        except ShortageError as error:
            if not self._control.has_served:
                raise
            self._retry_later(error, now_s)
            return None

    def _on_rejected(self, now_s: float) -> float:
        return self._retry_later(None if self.note else occupied_error(self._plan.pipe_directory), now_s)

    def _retry_later(self, error: YunionError | None, now_s: float) -> float:
        if error:
            self.note = Reason(f"{error.message}; {error.hint}", error.code)
        self._retry_at_s = now_s + COMMAND_RETRY_S
        return self._retry_at_s

    def _result(self, answer: list[str]) -> LimitsInEffect | None:
        """Return the limits in effect according to the answer, None if the limits have to be set first."""
        target = self._plan
        if self._phase == SET:
            check_percentage(target, answer[0])
            answer = answer[1:]
        servers = tuple(parse_servers(answer))
        limits = answer[len(servers) :]
        before = in_running_order(self._known.plan, target)
        old_servers = tuple(pid for pid in self._known.old_servers if pid in servers)
        if self._phase == SET:
            check_limits(target, limits)
            if before != target or not self._control.has_served or self._control.is_unrecorded:
                # Even of a new control daemon: a job may have started before the limits.
                old_servers = servers
        elif not match(target, limits):
            if self._control.is_unrecorded:
                return None
            has_new_servers = bool(set(servers) - set(self._known.old_servers))
            if has_new_servers and not match(self._without_unknown_gpus(before), limits):
                self._refuse_unknown_limits(servers)
            elif before == target:  # a change was withdrawn: the servers have the desired limits
                self._known = LimitsInEffect(self._known.plan)
            return None
        return LimitsInEffect(before, old_servers) if old_servers else LimitsInEffect(target)

    def _without_unknown_gpus(self, plan: DomainPlan) -> DomainPlan:
        """Return the plan without limits for GPUs that are not queried: these are no longer desired."""
        queried = {gpu.uuid for gpu in self._plan.gpus if gpu.memory_limit_mib is not None}
        gpus: list[PlannedGpu] = []
        for gpu in plan.gpus:
            gpus.append(gpu if gpu.uuid in queried else gpu._replace(memory_limit_mib=None))
        return plan._replace(gpus=tuple(gpus))

    def _refuse_unknown_limits(self, servers: tuple[int, ...]) -> None:
        """Raise ControlError if servers with unknown limits may have jobs; else list their clients next."""
        if self._idle:
            self._listed_servers = servers
            return
        self._refuse(servers)

    def _end_idle_servers(self, answer: Sequence[str]) -> None:
        """Shut down the servers before the limits are set, or raise ControlError if one has clients.

        NVML lists a job only some time after it has attached.
        """
        servers = self._listed_servers
        self._listed_servers = ()
        if servers_without_clients(servers, answer) != [*servers]:
            self._refuse(servers)
        self._phase = SET
        self._first = [f"shutdown_server {pid}" for pid in servers]

    def _refuse(self, servers: tuple[int, ...]) -> NoReturn:
        command = f"echo shutdown_server {servers[0]}"
        raise ControlError(
            f"{describe_servers(servers, 'has')} limits from neither the current configuration nor the "
            "previous one",
            "it is ended once no job uses its GPUs; to end it as soon as its current jobs have ended: "
            f"{command} | CUDA_MPS_PIPE_DIRECTORY={self._plan.pipe_directory} {PROGRAM}",
            reasons.LIMITS_PENDING,
        )


# -- the control daemon's commands and answers


def set_commands(plan: DomainPlan) -> list[str]:
    """Return the commands that set every limit; only the first of them answers, with one line.

    Source: nvidia-cuda-mps-control(1), for the commands; what they answer was measured with 535.
    """
    commands = [f"set_default_active_thread_percentage {decimal(plan.thread_percentage)}"]
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is not None:
            commands.append(f"set_default_device_pinned_mem_limit {device} {memory_mib}M")
    return commands


def get_commands(plan: DomainPlan) -> list[str]:
    """Return the commands that query every limit.

    The percentage is queried after each memory limit, because a limit that is not set has no answer at all
    (measured with 535): so every answer can be matched to its command.
    """
    commands = []
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is not None:
            commands.append(f"get_default_device_pinned_mem_limit {device}")
            commands.append("get_default_active_thread_percentage")
    return commands


def check_limits(plan: DomainPlan, answer: Sequence[str]) -> None:
    """Raise ControlError for the first limit that the answer to `get_commands` does not show as planned."""
    lines = list(answer)
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is None:
            continue
        limit = lines.pop(0) if lines and re.fullmatch(r"\d+[GM]", lines[0]) else None
        if limit != memory_text(memory_mib):
            raise _not_in_effect(f"memory limit of device {device}", f"{memory_mib}M", limit)
        check_percentage(plan, lines.pop(0) if lines else None)
    if lines:
        raise ControlError(f"the control daemon gave an unexpected answer: {lines[0]!r}", _HINT)


def match(plan: DomainPlan, answer: Sequence[str]) -> bool:
    try:
        check_limits(plan, answer)
    except ControlError:
        return False
    return True


def check_percentage(plan: DomainPlan, answer: str | None) -> None:
    """Raise ControlError if the single line that answers `set_commands` is not the planned percentage."""
    desired = f"{plan.thread_percentage:.1f}"
    if answer != desired:
        raise _not_in_effect("thread percentage", desired, answer)


def parse_servers(answer: Sequence[str]) -> list[int]:
    """Parse the PIDs at the start of an answer whose first command was `get_server_list`.

    Source: nvidia-cuda-mps-control(1), get_server_list.
    """
    pids = []
    for line in answer:
        if not line.isdigit():
            break
        pids.append(int(line))
    return pids


def client_commands(servers: Iterable[int]) -> list[str]:
    """Return the commands that list the clients of these servers, for `servers_without_clients`.

    Source: nvidia-cuda-mps-control(1), get_client_list.
    """
    commands: list[str] = []
    for pid in servers:
        commands += (PING, f"get_client_list {pid}")
    return commands


def servers_without_clients(servers: Sequence[int], answer: Sequence[str]) -> list[int]:
    """Return those of the servers that have no clients, according to the answer to `client_commands`.

    Before each list comes a percentage, as `25.0`; then a line for each client.
    """
    clients: list[int] = []
    for line in answer:
        if "." in line:
            clients.append(0)
        elif clients:
            clients[-1] += 1
    return [pid for pid, number in zip(servers, clients) if number == 0]


def parse_client_lists(servers: Sequence[int], answer: Sequence[str]) -> dict[int, list[int]]:
    """Return the clients (PIDs) of each server, by the answer to lists of them in this order.

    Before each list comes a percentage, as `25.0`. Lines that are no PID are left out.
    """
    lists: list[list[int]] = []
    for line in answer:
        if "." in line:
            lists.append([])
        elif lists and line.strip().isdigit():
            lists[-1].append(int(line))
    return dict(zip(servers, lists))


def memory_text(memory_mib: int) -> str:
    """Return a memory limit as the control daemon prints it: in whole G from 1 GiB on, so 5760M is `5G`.

    What it prints was measured with 535.
    """
    return f"{memory_mib // 1024}G" if memory_mib >= 1024 else f"{memory_mib}M"


def _not_in_effect(limit: str, desired: str, got: str | None) -> ControlError:
    reported = f"{got!r}" if got else "nothing"
    return ControlError(
        f"the {limit} is not in effect: it was set to {desired}, but the control daemon reports {reported}",
        _HINT,
        reasons.LIMITS_NOT_IN_EFFECT,
    )
