"""The report: the list of checks, how they run concurrently, each with a deadline, and their findings."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypedDict

from yunion_mps.doctor import daemon, driver, environment, files, gpus, mps
from yunion_mps.doctor.checks import NAGIOS_CODES, OK, SKIPPED, UNKNOWN, Check, Finding, Host, findings_of
from yunion_mps.enums import PROBLEM, WARNING
from yunion_mps.errors import YunionError
from yunion_mps.host import threads
from yunion_mps.reasons import ENVIRONMENT, SELFTEST_FAILED
from yunion_mps.text import count

#: Each check is declared once, by `@check(NAME, CODE)`, in one of these modules, whose order is the report's.
MODULES = (daemon, driver, gpus, mps, files, environment)
HOST_CHECKS = tuple(
    value for module in MODULES for value in vars(module).values() if isinstance(value, Check)
)
#: The words of monitoring plugins for the states.
_NAGIOS_WORDS = {PROBLEM: "CRITICAL", WARNING: "WARNING", UNKNOWN: "UNKNOWN", OK: "OK"}
#: The ranges in which the number of findings of a level is no warning and not critical.
_NAGIOS_RANGES = {PROBLEM: ";0", WARNING: "0;", UNKNOWN: ";", SKIPPED: ";", OK: ";"}
_SELFTEST = Check(
    "selftest", SELFTEST_FAILED, daemon.selftest, timeout_factor=daemon.SELFTEST_TIMEOUT_FACTOR + 1
)


def select_checks(
    environ: Mapping[str, str], pid: int | None, command: Sequence[str], *, selftest_too: bool
) -> tuple[Check, ...]:
    """Return the checks of the host, and as requested of a process, of a command and on a GPU."""
    more = []
    if pid is not None:
        more.append(Check("environment", ENVIRONMENT, partial(environment.of_process, pid=pid)))
    if command:
        more.append(
            Check("environment", ENVIRONMENT, partial(environment.of_command, environ=environ, argv=command))
        )
    if selftest_too:
        more.append(_SELFTEST)
    return (*HOST_CHECKS, *more)


class ReportLine(NamedTuple):
    check: str
    finding: Finding


class FindingRecord(TypedDict):
    check: str
    level: str
    what: str
    hint: str
    code: str


class ReportRecord(TypedDict):
    """`counts` is by level."""

    state: str
    counts: dict[str, int]
    checks: list[FindingRecord]


class Report(NamedTuple):
    """All lines, the worst first."""

    lines: tuple[ReportLine, ...]

    @property
    def state(self) -> str:
        """The worst level: ok, warning, problem, or unknown if a check failed or all were skipped."""
        counts = self.counts
        return next((level for level in NAGIOS_CODES if counts[level] and level != SKIPPED), UNKNOWN)

    def exit_code(self, *, nagios: bool) -> int:
        """Return 1 if there is a problem, otherwise 0; with `nagios`, a monitoring plugin's exit status."""
        return NAGIOS_CODES[self.state] if nagios else int(self.state == PROBLEM)

    @property
    def counts(self) -> dict[str, int]:
        by_level = Counter(line.finding.level for line in self.lines)
        return {level: by_level[level] for level in NAGIOS_CODES}

    @property
    def nagios_line(self) -> str:
        """The output of a monitoring plugin: the worst finding, the number of the others, and all numbers.

        The form is that of the Monitoring Plugins Development Guidelines, "Plugin Output for Nagios" and
        "Performance data". A vertical bar separates the numbers, so the text contains none.
        """
        numbers = " ".join(
            f"{level}={number};{_NAGIOS_RANGES[level]};0" for level, number in self.counts.items()
        )
        return f"MPS {_NAGIOS_WORDS[self.state]}: {self._worst_text.replace('|', '/')} | {numbers}"

    @property
    def _worst_text(self) -> str:
        """The first finding that is neither skipped nor ok, and how many others there are; or what passed."""
        counts = self.counts
        if self.state == OK:
            skipped = f", {counts[SKIPPED]} skipped" if counts[SKIPPED] else ""
            return f"{count(counts[OK], 'check')} passed{skipped}"
        if not self.lines:
            return "nothing was checked"
        check, finding = self.lines[0]
        counts[finding.level] -= 1
        others = [
            count(counts[level], level, names)
            for level, names in ((PROBLEM, ""), (WARNING, ""), (UNKNOWN, UNKNOWN))
            if counts[level]
        ]
        return f"{check}: {finding.what}" + (f"; also found: {', '.join(others)}" if others else "")

    def as_json(self) -> ReportRecord:
        return {
            "state": self.state,
            "counts": self.counts,
            "checks": [
                {"check": check, "level": level, "what": what, "hint": hint, "code": code}
                for check, (level, what, hint, code) in self.lines
            ],
        }


def run_checks(checks: Sequence[Check], host: Host) -> Report:
    running = [_CheckRun(check, host) for check in checks]
    lines = [ReportLine(run.check.name, finding) for run in running for finding in run.findings()]
    levels = list(NAGIOS_CODES)
    return Report(tuple(sorted(lines, key=lambda line: levels.index(line.finding.level))))


class _CheckRun:
    """A check on its own thread, which is abandoned at the deadline."""

    def __init__(self, check: Check, host: Host) -> None:
        self.check = check
        self._host = host
        self._timeout_s = host.timeout_s * check.timeout_factor
        self._end_s = time.monotonic() + self._timeout_s
        self._found: Sequence[Finding] | None = None
        self._ended = threading.Event()
        try:
            threads.start_thread(self._run, lambda _, __: self._ended.set())
        except YunionError as error:
            self._found = [Finding(UNKNOWN, error.message, error.hint)]
            self._ended.set()

    def findings(self) -> Sequence[Finding]:
        """Wait for the check's findings, and return them, or a finding that it took too long."""
        self._ended.wait(max(0.0, self._end_s - time.monotonic()))
        if self._found is not None:
            return self._found
        hint = "allow more time: yunion-mps doctor --timeout 60"
        return [Finding(UNKNOWN, f"no result within {self._timeout_s:g} s", hint)]

    def _run(self) -> None:
        self._found = findings_of(self.check, self._host)
