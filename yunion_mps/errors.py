"""One tree of errors: what is wrong, what to do about it, and the exit code of a command that meets it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.escaping import printable
from yunion_mps.reasons import Reason


class YunionError(Exception):
    """Something a person must know of.

    `message` is one line that says what is wrong, `hint` one line that says what to do, and `exit_code`
    what a command that ends with this error returns to its shell. `code` is its reason code, by default its
    class's.
    """

    exit_code = 1
    code = reasons.FAILED

    def __init__(self, message: str, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.code

    @property
    def reason(self) -> Reason:
        return Reason(self.message, self.code)


class Problem(NamedTuple):
    """One thing wrong in a configuration file: where, what, and what would be right, unless `what` asks that.

    `is_minor`: no job needs what is wrong, so a start leaves it out and says so. A reload and
    `config check` refuse it as they do all others.
    """

    file: str
    line: int | None
    what: str
    hint: str = ""
    is_minor: bool = False

    def __str__(self) -> str:
        """`FILE:LINE: what is wrong: what would be right`, as compilers and editors have it.

        One line, whatever it quotes: line ends and control characters are shown as Python writes them.
        """
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return printable(": ".join(filter(None, (place, self.what, self.hint))))


class ConfigError(YunionError):
    """The configuration cannot be used; carries every problem of both files."""

    exit_code = 6
    code = reasons.INVALID_CONFIGURATION

    def __init__(self, problems: Sequence[Problem]) -> None:
        fix = "fix these lines, " if any(problem.line is not None for problem in problems) else ""
        message = "\n".join(str(problem) for problem in problems)
        super().__init__(message, f"{fix}then run: yunion-mps config check")
        self.problems = tuple(problems)


class DriverError(YunionError):
    """NVML, or a GPU behind it, refused a call."""

    code = reasons.DRIVER_ERROR


class ControlError(YunionError):
    """NVIDIA's control daemon did not start, did not answer, or answered something else than it should."""

    code = reasons.CONTROL_DAEMON_ERROR


class HostError(YunionError):
    """The host's files, directories or users are not as they must be."""

    code = reasons.HOST_ERROR


class BusyError(HostError):
    """The daemon cannot do it at this moment, which passes by itself: it stops, or has too much to do."""

    code = reasons.BUSY


class ShortageError(BusyError):
    """The kernel refused memory, a descriptor, a process or a thread; that may pass by itself."""

    code = reasons.SHORTAGE

    def __init__(self, message: str) -> None:
        shown = "systemctl show yunion-mps-daemon | grep -E 'Limit|Tasks|Memory'"
        hint = f"check the limits on memory, files, processes and threads: {shown}"
        super().__init__(message, hint)


class UnreachableError(YunionError):
    """The daemon does not answer on its socket."""

    exit_code = 3
    code = reasons.DAEMON_UNREACHABLE


class NotAllowedError(YunionError):
    """The caller may not do this."""

    exit_code = 4
    code = reasons.NOT_ALLOWED


class NothingFreeError(YunionError):
    """No device is free that would do; the message says what there is."""

    exit_code = 5
    code = reasons.NOTHING_FREE


class InfeasibleError(NothingFreeError):
    """No device would do if all were free and served: to wait for one is no use."""

    exit_code = 1
    code = reasons.INFEASIBLE


class NotFoundError(YunionError):
    """What was asked for by name does not exist."""

    code = reasons.NOT_FOUND


class VersionError(YunionError):
    """The daemon answers otherwise than this program expects: one of them is older than the other."""

    code = reasons.VERSION_DIFFERS

    def __init__(self, message: str) -> None:
        super().__init__(message, reasons.hint_of(self.code))
