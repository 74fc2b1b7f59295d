"""The limits of a domain: set, read back, and found out for which servers they are not in effect.

Limits that are set count for the next MPS server only. A control daemon that was adopted is therefore asked
before it is told anything: what its servers have can be known only from what it says and what was recorded.

A limit of None is that of a GPU which the control daemon serves and the plan does not: it is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import ControlError, ShortageError, YunionError
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control_daemon import ASK_AGAIN_S, ControlDaemon, Task
from yunion_mps.mps.conversation import Conversation, occupied
from yunion_mps.mps.processes import PROGRAM, describe_servers
from yunion_mps.mps.startup import as_served
from yunion_mps.planning.environment import decimal
from yunion_mps.reasons import NO_REASON, Reason

_HINT = "no device is served without its limits; check the end of the control daemon's log"


class LimitsInEffect(NamedTuple):
    """What a control daemon's clients get, and the servers (PIDs) that do not have what is desired."""

    plan: DomainPlan
    old_servers: tuple[int, ...] = ()


class LimitsSetter(Task):
    """Brings limits into effect."""

    def __init__(self, control: ControlDaemon, known: LimitsInEffect, *, set_first: bool, idle: bool) -> None:
        """Begin; `known` is what is in effect as far as we know.

        `set_first`: the limits are set without asking first. `idle`: no job uses its GPUs, so a server with
        other limits may be asked to end. If what the servers of another program's control daemon have was
        never recorded, and its answer is not what is desired, they count as ones with other limits. It is
        asked again without end while another front-end is connected.
        """
        super().__init__(control)
        self._known = known
        self._setting = set_first
        self._idle = idle
        self._first: list[str] = []
        self._again_s = 0.0
        #: Why it takes longer than usual, empty if it does not.
        self.note = NO_REASON

    def tick(self, now_s: float) -> float | LimitsInEffect:
        """What is in effect, once that is read back; before that, when to be called again.

        Raises SilentError if there is no answer, ControlError if the limits are not in effect, or if it is
        unknown which a running server has; ShortageError if a new one cannot be talked to.
        """
        if self._conversation is None and now_s < self._again_s:
            return self._again_s
        conversation = self._conversation or self._begin(now_s)
        if conversation is None:
            return self._again_s
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            return self._turned_away(now_s)
        settled = self._settled(answer)
        if settled:
            return settled
        self._setting = True
        return self.tick(now_s)

    def _begin(self, now_s: float) -> Conversation | None:
        """Talk to it; None if no process can be started for that, and it may have jobs: it is tried again."""
        first = [*self._first, *set_commands(self._plan)] if self._setting else []
        # The servers are asked for after the limits were set: one that comes in between counts as an old one.
        try:
            return self._converse([*first, "get_server_list", *get_commands(self._plan)], now_s)
        except ShortageError as error:
            if not self._control.has_served:
                raise
            self._wait(error, now_s)
            return None

    def _turned_away(self, now_s: float) -> float:
        return self._wait(None if self.note else occupied(self._plan.pipe_directory), now_s)

    def _wait(self, error: YunionError | None, now_s: float) -> float:
        if error:
            self.note = Reason(f"{error.message}; {error.hint}", error.code)
        self._again_s = now_s + ASK_AGAIN_S
        return self._again_s

    def _settled(self, answer: list[str]) -> LimitsInEffect | None:
        """What is in effect by the answer, None if the limits have to be set first."""
        target = self._plan
        if self._setting:
            check_percentage(target, answer[0])
            answer = answer[1:]
        servers = tuple(servers_in(answer))
        limits = answer[len(servers) :]
        before = as_served(self._known.plan, target)
        old = tuple(pid for pid in self._known.old_servers if pid in servers)
        if self._setting:
            check(target, limits)
            if before != target or not self._control.has_served or self._control.is_unrecorded:
                old = servers  # of a new control daemon too: a job may have come before the limits did
        elif not match(target, limits):
            if self._control.is_unrecorded:
                return None
            if set(servers) - set(self._known.old_servers) and not match(self._asked(before), limits):
                self._refuse_unknown_limits(servers)
            elif before == target:  # a change was taken back: the servers have what is desired
                self._known = LimitsInEffect(self._known.plan)
            return None
        return LimitsInEffect(before, old) if old else LimitsInEffect(target)

    def _asked(self, plan: DomainPlan) -> DomainPlan:
        """The plan's limits for the GPUs that are asked for: not for one that is not desired any more."""
        asked = {gpu.uuid for gpu in self._plan.gpus if gpu.memory_limit_mib is not None}
        gpus = (gpu if gpu.uuid in asked else gpu._replace(memory_limit_mib=None) for gpu in plan.gpus)
        return plan._replace(gpus=tuple(gpus))

    def _refuse_unknown_limits(self, servers: tuple[int, ...]) -> None:
        """Raise ControlError if servers with unknown limits may have jobs; otherwise have them end."""
        if self._idle:
            self._first = [f"shutdown_server {pid}" for pid in servers]
            return
        command = f"echo shutdown_server {servers[0]}"
        raise ControlError(
            f"{describe_servers(servers)} keeps limits that neither this configuration nor the last one has",
            "it is ended once no job uses its GPUs; to have it end after its jobs, before others come: "
            f"{command} | CUDA_MPS_PIPE_DIRECTORY={self._plan.pipe_directory} {PROGRAM}",
            reasons.LIMITS_PENDING,
        )


# -- in the control daemon's own words


def set_commands(plan: DomainPlan) -> list[str]:
    """The commands that set every limit; only the first of them answers, with one line."""
    commands = [f"set_default_active_thread_percentage {decimal(plan.thread_percentage)}"]
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is not None:
            commands.append(f"set_default_device_pinned_mem_limit {device} {memory_mib}M")
    return commands


def get_commands(plan: DomainPlan) -> list[str]:
    """The commands that ask for every limit.

    The percentage is asked for after each memory limit, because a limit that is not set is answered by
    no line at all: so each answer stays beside its question.
    """
    commands = []
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is not None:
            commands.append(f"get_default_device_pinned_mem_limit {device}")
            commands.append("get_default_active_thread_percentage")
    return commands


def check(plan: DomainPlan, answer: Sequence[str]) -> None:
    """Raise ControlError for the first limit that the answer to `get_commands` does not show as planned."""
    lines = list(answer)
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is None:
            continue
        got = lines.pop(0) if lines and re.fullmatch(r"\d+[GM]", lines[0]) else None
        if got != memory_text(memory_mib):
            raise _not_in_effect(f"memory limit of device {device}", f"{memory_mib}M", got)
        check_percentage(plan, lines.pop(0) if lines else None)
    if lines:
        raise ControlError(f"the control daemon gave an unexpected answer: {lines[0]!r}", _HINT)


def match(plan: DomainPlan, answer: Sequence[str]) -> bool:
    """Whether `check` finds nothing."""
    try:
        check(plan, answer)
    except ControlError:
        return False
    return True


def check_percentage(plan: DomainPlan, answer: str | None) -> None:
    """As `check`, for the one line that `set_commands` are answered with."""
    desired = f"{plan.thread_percentage:.1f}"
    if answer != desired:
        raise _not_in_effect("thread percentage", desired, answer)


def servers_in(answer: Sequence[str]) -> list[int]:
    """The PIDs at the beginning of an answer that begins with that to `get_server_list`."""
    pids = []
    for line in answer:
        if not line.isdigit():
            break
        pids.append(int(line))
    return pids


def memory_text(memory_mib: int) -> str:
    """How the control daemon shows a memory limit: cut to whole G from 1 GiB on, so 5760M is `5G`."""
    return f"{memory_mib // 1024}G" if memory_mib >= 1024 else f"{memory_mib}M"


def _not_in_effect(what: str, desired: str, got: str | None) -> ControlError:
    answered = f"{got!r}" if got else "nothing"
    return ControlError(
        f"the {what} is not in effect: it was set to {desired}, and the control daemon answers {answered}",
        _HINT,
        reasons.LIMITS_NOT_IN_EFFECT,
    )
