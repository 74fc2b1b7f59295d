"""The limits of a domain in the control daemon's own words: how they are set, asked for, and read back.

A limit of None is that of a GPU which the control daemon serves and the plan does not: it is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from yunion_mps.errors import ControlError
from yunion_mps.models import DomainPlan
from yunion_mps.planning import decimal

_HINT = "no device is served without its limits; look at the end of the control daemon's log"


def setting(plan: DomainPlan) -> list[str]:
    """The commands that set every limit; only the first of them answers, with one line."""
    commands = [f"set_default_active_thread_percentage {decimal(plan.thread_percentage)}"]
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is not None:
            commands.append(f"set_default_device_pinned_mem_limit {device} {memory_mib}M")
    return commands


def asking(plan: DomainPlan) -> list[str]:
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
    """Raise ControlError for the first limit that the answer to `asking` does not show as planned."""
    lines = list(answer)
    for device, memory_mib in enumerate(plan.memory_limits_mib):
        if memory_mib is None:
            continue
        got = lines.pop(0) if lines and _is_memory(lines[0]) else None
        if got != shown(memory_mib):
            raise _not_in_force(f"memory limit of device {device}", f"{memory_mib}M", got)
        check_percentage(plan, lines.pop(0) if lines else None)
    if lines:
        raise ControlError(f"the control daemon answers more than was asked for: {lines[0]!r}", _HINT)


def match(plan: DomainPlan, answer: Sequence[str]) -> bool:
    """Whether `check` finds nothing."""
    try:
        check(plan, answer)
    except ControlError:
        return False
    return True


def check_percentage(plan: DomainPlan, answer: str | None) -> None:
    """As `check`, for the one line that `setting` is answered with."""
    wanted = f"{plan.thread_percentage:.1f}"
    if answer != wanted:
        raise _not_in_force("thread percentage", wanted, answer)


def servers_in(answer: Sequence[str]) -> list[int]:
    """The PIDs at the beginning of an answer that begins with that to `get_server_list`."""
    pids = []
    for line in answer:
        if not line.isdigit():
            break
        pids.append(int(line))
    return pids


def shown(memory_mib: int) -> str:
    """How the control daemon shows a memory limit: cut to whole G from 1 GiB on, so 5760M is `5G`."""
    return f"{memory_mib // 1024}G" if memory_mib >= 1024 else f"{memory_mib}M"


def _is_memory(line: str) -> bool:
    return re.fullmatch(r"\d+[GM]", line) is not None


def _not_in_force(what: str, wanted: str, got: str | None) -> ControlError:
    answered = f"{got!r}" if got else "nothing"
    return ControlError(
        f"the {what} is not in force: it was set to {wanted}, and the control daemon answers {answered}",
        _HINT,
    )
