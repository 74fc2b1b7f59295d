"""Checks and their findings: how a check is declared, how all run at once, and the report that they make."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from yunion_mps.doctor.host import Host, SkipError
from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable
from yunion_mps.host import threads

OK = "ok"
SKIPPED = "skipped"  # it cannot be checked here: no daemon, no permission, no GPU
UNKNOWN = "unknown"  # the check broke, or took too long
WARNING = "warning"
PROBLEM = "problem"

#: From the worst to the best: the order of the report.
LEVELS = (PROBLEM, WARNING, UNKNOWN, SKIPPED, OK)

#: As monitoring plugins have it (Nagios, Icinga, NRPE).
EXIT_CODES = {OK: 0, WARNING: 1, PROBLEM: 2, UNKNOWN: 3}


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    what: str
    hint: str = ""


Findings = Iterable[Finding]


def ok(what: str) -> Finding:
    """All is well."""
    return Finding(OK, what)


def skipped(what: str, hint: str = "") -> Finding:
    """Not checked, and why."""
    return Finding(SKIPPED, what, hint)


def warning(what: str, hint: str) -> Finding:
    """Some programs will fail, or get something else than they should."""
    return Finding(WARNING, what, hint)


def problem(what: str, hint: str) -> Finding:
    """Programs fail now, or run without their limits."""
    return Finding(PROBLEM, what, hint)


class Check(NamedTuple):
    """One thing to look at: `well` is the finding of a check without any.

    A check is unknown if it takes more than so many `times` the host's timeout.
    """

    name: str
    look: Callable[[Host], Findings]
    well: str = ""
    times: float = 1


def check(name: str, well: str = "", times: float = 1) -> Callable[[Callable[[Host], Findings]], Check]:
    """Declare a function of a module in `checks.MODULES` as a check of the host.

    It changes nothing, and returns or yields findings; it raises YunionError if it cannot be checked here.
    """
    return lambda look: Check(name, look, well, times)


class Line(NamedTuple):
    """One finding, and the name of its check."""

    check: str
    finding: Finding


class Report(NamedTuple):
    """All lines, the worst first."""

    lines: tuple[Line, ...]

    @property
    def state(self) -> str:
        """The worst level: ok, warning, problem, or unknown if a check broke or all were skipped."""
        levels = {line.finding.level for line in self.lines}
        for level in (PROBLEM, WARNING, UNKNOWN):
            if level in levels:
                return level
        return OK if OK in levels else UNKNOWN

    @property
    def exit_code(self) -> int:
        """The exit status for monitoring."""
        return EXIT_CODES[self.state]

    @property
    def counts(self) -> dict[str, int]:
        """How many lines there are of each level, the worst first."""
        found = Counter(line.finding.level for line in self.lines)
        return {level: found[level] for level in LEVELS}

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        lines = [{"check": line.check, **line.finding._asdict()} for line in self.lines]
        return {"state": self.state, "exit_code": self.exit_code, "counts": self.counts, "checks": lines}


def run(checks: Sequence[Check], host: Host) -> Report:
    """Run all checks; takes no longer than the slowest check's deadline, and never raises."""
    running = [_Running(check, host) for check in checks]
    lines = [Line(one.check.name, finding) for one in running for finding in one.findings()]
    return Report(tuple(sorted(lines, key=lambda line: LEVELS.index(line.finding.level))))


class _Running:
    """One check on a thread of its own, which nothing waits for after its deadline."""

    def __init__(self, check: Check, host: Host) -> None:
        self.check = check
        self._host = host
        self._timeout_s = host.timeout_s * check.times
        self._end_s = time.monotonic() + self._timeout_s
        self._found: Sequence[Finding] | None = None
        self._ended = threading.Event()
        try:
            threads.start(self._look, lambda _, __: self._ended.set())
        except YunionError as error:
            self._found = [Finding(UNKNOWN, error.message, error.hint)]
            self._ended.set()

    def findings(self) -> Sequence[Finding]:
        """What the check found, or that it did not."""
        self._ended.wait(max(0.0, self._end_s - time.monotonic()))
        what, hint = (
            f"no result within {self._timeout_s:g} s",
            "give it more time: yunion-mps doctor --timeout 60",
        )
        return [Finding(UNKNOWN, what, hint)] if self._found is None else self._found

    def _look(self) -> None:
        try:
            found = list(self.check.look(self._host)) or [ok(self.check.well)] * bool(self.check.well)
        except SkipError as error:
            found = [skipped(error.message, error.hint)]
        except YunionError as error:
            found = [skipped(f"not checked: {error.message}", error.hint)]
        except OSError as error:
            found = [Finding(UNKNOWN, f"this could not be checked: {error}", "run it as root")]
        except Exception as error:  # noqa: BLE001 - a fault of one check must not hide what the others found
            hint = "please report this, with the output of: yunion-mps doctor -o json"
            found = [Finding(UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}", hint)]
        # Quotations come from environments, logs, files and answers; comparisons saw them as they are.
        self._found = [Finding(one.level, printable(one.what), printable(one.hint)) for one in found]
