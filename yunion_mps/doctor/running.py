"""Calling all checks at once, each with a deadline, and the report that they make."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from yunion_mps.doctor.finding import LEVELS, OK, PROBLEM, SKIPPED, UNKNOWN, WARNING, Finding, Findings
from yunion_mps.doctor.host import Host
from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable
from yunion_mps.host import threads

#: As monitoring plugins have it (Nagios, Icinga, NRPE).
EXIT_CODES = {OK: 0, WARNING: 1, PROBLEM: 2, UNKNOWN: 3}


class Check(NamedTuple):
    """One thing to look at; what takes more than the host's time, so many `times` as long, is unknown."""

    name: str
    look: Callable[[Host], Findings]
    times: float = 1


class Line(NamedTuple):
    """One finding, and the check that it is of."""

    check: str
    finding: Finding


class Report(NamedTuple):
    """All lines, the worst first."""

    lines: tuple[Line, ...]

    @property
    def state(self) -> str:
        """The worst of it: ok, warning, problem, or unknown where a check broke or all were skipped."""
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
    """Look at everything; takes no longer than the slowest check's deadline, and never raises."""
    running = [_Running(check, host) for check in checks]
    lines = [Line(one.check.name, finding) for one in running for finding in one.findings()]
    return Report(tuple(sorted(lines, key=lambda line: LEVELS.index(line.finding.level))))


class _Running:
    """One check on a thread of its own, which nobody waits for after its deadline."""

    def __init__(self, check: Check, host: Host) -> None:
        self.check = check
        self._host = host
        self._timeout_s = host.timeout_s * check.times
        self._end_s = time.monotonic() + self._timeout_s
        self._found: list[Findings] = []
        self._ended = threading.Event()
        try:
            threads.start(self._look, lambda _, __: self._ended.set())
        except YunionError as error:
            self._found.append([Finding(UNKNOWN, error.message, error.hint)])
            self._ended.set()

    def findings(self) -> Findings:
        """What the check found, or that it did not."""
        self._ended.wait(max(0.0, self._end_s - time.monotonic()))
        if self._found:
            return self._found[0]
        what = f"this was not found out within {self._timeout_s:g} s"
        return [Finding(UNKNOWN, what, "give it more time: yunion-mps doctor --timeout 60")]

    def _look(self) -> None:
        try:
            found = self.check.look(self._host)
        except YunionError as error:
            found = [Finding(SKIPPED, f"not looked at: {error.message}", error.hint)]
        except OSError as error:
            found = [Finding(UNKNOWN, f"this could not be looked at: {error}", "run it as root")]
        except Exception as error:  # noqa: BLE001 - a fault of one check must not hide what the others found
            what = f"the check itself failed: {type(error).__name__}: {error}"
            found = [
                Finding(UNKNOWN, what, "please report this, with the output of: yunion-mps doctor -o json")
            ]
        # What is quoted is of every sort: environments, logs, files, answers. It was compared as it is.
        shown = [Finding(one.level, printable(one.what), printable(one.remedy)) for one in found]
        self._found.append(shown)
