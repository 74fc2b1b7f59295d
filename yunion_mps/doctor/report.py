"""The report: all checks, how they run at once, and what becomes of their findings."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from yunion_mps.doctor import daemon, environment, files, gpus, mps
from yunion_mps.doctor.host import (
    NAGIOS_CODES,
    PROBLEM,
    SKIPPED,
    UNKNOWN,
    WARNING,
    Check,
    Finding,
    Host,
    SkipError,
    ok,
    skipped,
)
from yunion_mps.doctor.selftest import selftest
from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable
from yunion_mps.host import threads
from yunion_mps.reasons import ENVIRONMENT

#: Each check is declared once, by `@check(NAME, CODE)`, in one of these; a good report has their order.
MODULES = (daemon, gpus, mps, files, environment)
OF_THE_HOST = tuple(one for module in MODULES for one in vars(module).values() if isinstance(one, Check))


def checks(
    own: Mapping[str, str], pid: int | None, command: Sequence[str], *, selftest_too: bool
) -> tuple[Check, ...]:
    """The checks of the host, of a process, of a command with the environment `own`, and on a GPU."""
    more = []
    if pid is not None:
        more.append(Check("environment", ENVIRONMENT, partial(environment.of_process, pid=pid)))
    if command:
        more.append(
            Check("environment", ENVIRONMENT, partial(environment.of_command, own=own, words=command))
        )
    if selftest_too:
        more.append(selftest)
    return (*OF_THE_HOST, *more)


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
        counts = self.counts
        return next((level for level in NAGIOS_CODES if counts[level] and level != SKIPPED), UNKNOWN)

    def exit_code(self, *, nagios: bool) -> int:
        """1 if there is a problem, otherwise 0; or what a monitoring plugin exits with."""
        return NAGIOS_CODES[self.state] if nagios else int(self.state == PROBLEM)

    @property
    def counts(self) -> dict[str, int]:
        """How many lines there are of each level, the worst first."""
        found = Counter(line.finding.level for line in self.lines)
        return {level: found[level] for level in NAGIOS_CODES}

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        lines = [{"check": line.check, **line.finding._asdict()} for line in self.lines]
        return {"state": self.state, "counts": self.counts, "checks": lines}


def run(checks: Sequence[Check], host: Host) -> Report:
    """Run all checks; takes no longer than the slowest check's deadline, and never raises."""
    running = [_CheckRun(check, host) for check in checks]
    lines = [Line(one.check.name, finding) for one in running for finding in one.findings()]
    levels = list(NAGIOS_CODES)
    return Report(tuple(sorted(lines, key=lambda line: levels.index(line.finding.level))))


class _CheckRun:
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
        if self._found is not None:
            return self._found
        hint = "allow more time: yunion-mps doctor --timeout 60"
        return [Finding(UNKNOWN, f"no result within {self._timeout_s:g} s", hint)]

    def _look(self) -> None:
        self._found = findings_of(self.check, self._host)


def findings_of(check: Check, host: Host) -> list[Finding]:
    """What the check finds, or why it finds nothing; never raises."""
    try:
        found = list(check.look(host)) or [ok(check.well)] * bool(check.well)
    except SkipError as error:
        found = [skipped(error.message, error.hint)]
    except YunionError as error:
        found = [skipped(f"not checked: {error.message}", error.hint)]
    except OSError as error:
        found = [Finding(UNKNOWN, f"this could not be checked: {error}", "run it as root")]
    except Exception as error:  # noqa: BLE001 - a fault of one check must not hide what the others found
        hint = "report this, with the output of: yunion-mps doctor -o json"
        found = [Finding(UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}", hint)]
    # Quotations come from environments, logs, files and answers; comparisons saw them as they are.
    codes = {WARNING: check.code, PROBLEM: check.code}
    return [
        Finding(one.level, printable(one.what), printable(one.hint), one.code or codes.get(one.level, ""))
        for one in found
    ]
