"""The tree of errors: each has a message, a hint, a reason code and a command's exit code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.reasons import Reason, hint_of
from yunion_mps.core.text import printable


class YunionError(Exception):
    """An error to report to the user.

    `message` says what is wrong and `hint` what to do, each on one line. `exit_code` is the exit status of a
    command that ends with it. `code` is a reason code, by default that of the class.
    """

    exit_code = 1
    code = reasons.FAILED

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.code

    def replace_hint(self, hint: str) -> None:
        """Say what to do otherwise, because who raises the error again knows more."""
        self.hint = hint

    @property
    def reason(self) -> Reason:
        return Reason(self.message, self.code)

    @property
    def message_with_hint(self) -> str:
        """The message, and the hint in parentheses."""
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def lines(self) -> list[str]:
        """What a program prints: the message with the reason code, unless it is `failed`, and the hint."""
        reason_code = "" if self.code == reasons.FAILED else f" [{self.code}]"
        lines = f"{self.message}{reason_code}".split("\n")
        if self.hint:
            lines += self.hint.split("\n")
        return lines


class WrongUsageError(YunionError):
    """A command line is wrong; a command ends with this exit status."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class Problem(NamedTuple):
    """A problem in a configuration file; `hint` is empty if `what` contains it (`did you mean ...?`).

    `is_minor`: it does not keep the daemon from starting, which ignores the setting with a warning, or leaves
    alone the only `gpu` (a PCI address) or `entry` (its path) that it is about. A reload and `config check`
    refuse it like others.
    """

    file: str
    line: int | None
    what: str
    hint: str = ""
    is_minor: bool = False
    gpu: str = ""
    entry: str = ""

    def __str__(self) -> str:
        """Return `FILE:LINE: what is wrong: hint`, the form of compilers and editors, on one line.

        Line breaks and control characters in quoted text are escaped.
        """
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return printable(": ".join(filter(None, (place, self.what, self.hint))))


class ConfigError(YunionError):
    """The configuration cannot be used; has every problem of its files. The command `check` checks it."""

    exit_code = 6
    code = reasons.INVALID_CONFIGURATION

    def __init__(self, problems: Sequence[Problem], check: str = "yunion-mps config check") -> None:
        fix = "fix these lines, " if any(problem.line is not None for problem in problems) else ""
        message = "\n".join(str(problem) for problem in problems)
        super().__init__(message, f"{fix}then run: {check}")
        self.problems = tuple(problems)


class DriverError(YunionError):
    """NVML or a GPU refused a call."""

    code = reasons.DRIVER_ERROR


class UnsupportedError(DriverError):
    """The driver does not support this on the GPU, so that no later attempt can succeed."""


class ControlError(YunionError):
    """NVIDIA's control daemon did not start, or did not answer as expected."""

    code = reasons.CONTROL_DAEMON_ERROR


class HostError(YunionError):
    """The host's files, directories or users prevent this."""

    code = reasons.HOST_ERROR


class UnsafePathError(HostError):
    """A directory cannot be used because of other users, such as a file of theirs, or a full file system."""


class BusyError(HostError):
    """The daemon cannot do this now: it is stopping or has too much to do."""

    code = reasons.BUSY


class ShortageError(BusyError):
    """The kernel refused memory, a descriptor, a process or a thread; this may pass."""

    code = reasons.SHORTAGE

    def __init__(self, message: str) -> None:
        super().__init__(message, hint_of(self.code))


class LockedError(BusyError):
    """Another process locks the state file; `is_brief` until that has lasted for several seconds."""

    def __init__(self, message: str, hint: str, *, is_brief: bool) -> None:
        super().__init__(message, hint)
        self.is_brief = is_brief


class UnreachableError(YunionError):
    exit_code = 3
    code = reasons.DAEMON_UNREACHABLE


class NotAllowedError(YunionError):
    exit_code = 4
    code = reasons.NOT_ALLOWED


class NothingFreeError(YunionError):
    """No suitable device is free; the message says which ones exist.

    A code other than `nothing_free` is the single reason for which all suitable devices are unavailable.
    Devices that are leased, serve another user, or whose servers do not start now, become free again, so all
    have the same exit code.
    """

    exit_code = 5
    code = reasons.NOTHING_FREE

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message, hint, code)
        if self.code not in reasons.NOT_FREE:
            self.exit_code = 1


class InfeasibleError(NothingFreeError):
    """No device would be suitable even if all were free and served, so there is no use in waiting."""

    exit_code = 1
    code = reasons.INFEASIBLE


class NotConfirmedError(YunionError):
    """What was confirmed is not all that would be lost."""

    code = reasons.NOT_CONFIRMED

    def __init__(self, message: str) -> None:
        super().__init__(message, hint_of(self.code))


class NotFoundError(YunionError):
    code = reasons.NOT_FOUND


class VersionError(YunionError):
    """The daemon's answer is not as expected, because it and this program have different versions."""

    code = reasons.VERSION_DIFFERS

    def __init__(self, message: str) -> None:
        super().__init__(message, hint_of(self.code))
