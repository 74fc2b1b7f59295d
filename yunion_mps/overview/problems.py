"""The problems in the daemon's status, prepared for people: folded, with each hint once. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import __version__
from yunion_mps.enums import PROBLEM_LEVELS, WARNING
from yunion_mps.reasons import VERSION_DIFFERS, hint_of

if TYPE_CHECKING:
    from yunion_mps.answers import Status, StatusProblem

#: The command that makes the daemon execute the installed version.
REEXEC = "yunion-mps daemon-reexec"


class ShownProblem(NamedTuple):
    """A problem, or as many similar ones as `number` counts."""

    level: str
    code: str
    text: str
    hint: str
    number: int = 1

    @property
    def title(self) -> str:
        return self.level.capitalize()


def version_mismatch(status: Status) -> str:
    """Return how the running version differs from the installed one, as after a refused upgrade; or ""."""
    if status["version"] == __version__:
        return ""
    return f"the daemon runs version {status['version']}, but {__version__} is installed"


def problems_of(status: Status) -> list[StatusProblem]:
    """The problems in the status, and that it is of another version, which only its reader knows."""
    mismatch = version_mismatch(status)
    if not mismatch:
        return status["problems"]
    own: StatusProblem = {
        "level": WARNING,
        "code": VERSION_DIFFERS,
        "text": mismatch,
        "hint": hint_of(VERSION_DIFFERS),
        "gpu": None,
        "devices": [],
        "pid": None,
    }
    return sorted([own, *status["problems"]], key=lambda one: PROBLEM_LEVELS.index(one["level"]))


def folded(problems: Sequence[StatusProblem], limit: int = 3) -> list[ShownProblem]:
    """Keep at most `limit` similar problems of each level, and add one that counts the rest.

    Problems with the same code are similar, because their hints may name different processes or GPUs.
    """
    counts = Counter((one["level"], one["code"]) for one in problems)
    shown: dict[tuple[str, str], list[ShownProblem]] = {}
    for one in problems:
        level, code, hint = one["level"], one["code"], one["hint"]
        alike = shown.setdefault((level, code), [])
        if len(alike) < limit:
            alike.append(ShownProblem(level, code, one["text"], hint))
        elif len(alike) == limit:
            more = counts[level, code] - limit
            text = f"and {more} more of the same kind (all: yunion-mps status -o json)"
            hint = hint if hint == alike[-1].hint else hint_of(code)
            alike.append(ShownProblem(level, code, text, hint, more))
    return [problem for alike in shown.values() for problem in alike]


def with_hints(problems: Sequence[ShownProblem]) -> Iterator[tuple[ShownProblem, str]]:
    """Yield each problem with its hint, or "" if the next problem has the same hint."""
    for problem, after in zip_longest(problems, problems[1:]):
        yield problem, "" if after and after.hint == problem.hint else problem.hint
