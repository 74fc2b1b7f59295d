"""The report: the list of checks, how they run concurrently, each with a deadline, and their findings."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple, TypedDict

from yunion_mps.core.enums import PROBLEM, WARNING
from yunion_mps.core.errors import YunionError
from yunion_mps.core.reasons import ENVIRONMENT, SELFTEST_FAILED
from yunion_mps.core.text import count
from yunion_mps.doctor import daemon, driver, environment, files, gpus, mps
from yunion_mps.doctor.checks import NAGIOS_CODES, OK, SKIPPED, UNKNOWN, Check, Finding, Host, findings_of
from yunion_mps.host import threads

#: Each check is declared once, by `@host_check(NAME, CODE)`, in one of these modules, in the report's order.
MODULES = (daemon, driver, gpus, mps, files, environment)


def _checks_in(modules: Iterable[ModuleType]) -> Iterator[Check]:
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Check):
                yield value


HOST_CHECKS = tuple(_checks_in(MODULES))
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
        of_command = partial(environment.of_command, environ=environ, argv=command)
        more.append(Check("environment", ENVIRONMENT, of_command))
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
    state: str
    #: The number of findings by level.
    counts: dict[str, int]
    checks: list[FindingRecord]


class Report(NamedTuple):
    """All lines, the worst first."""

    lines: tuple[ReportLine, ...]

    @property
    def state(self) -> str:
        """The worst level: ok, warning, problem, or unknown if a check failed or all were skipped."""
        for level, number in self.counts.items():
            if number and level != SKIPPED:
                return level
        return UNKNOWN

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
        numbers = [f"{level}={number};{_NAGIOS_RANGES[level]};0" for level, number in self.counts.items()]
        text = self._worst_text.replace("|", "/")
        return f"MPS {_NAGIOS_WORDS[self.state]}: {text} | {' '.join(numbers)}"

    @property
    def _worst_text(self) -> str:
        """The first finding that is neither skipped nor ok, and how many others there are; or what passed."""
        counts = self.counts
        if self.state == OK:
            skipped = f", {counts[SKIPPED]} skipped" if counts[SKIPPED] else ""
            return f"{count(counts[OK], 'check')} passed{skipped}"
        if not self.lines:
            return "nothing was checked"
        worst = self.lines[0]
        counts[worst.finding.level] -= 1
        others = []
        if counts[PROBLEM]:
            others.append(count(counts[PROBLEM], PROBLEM))
        if counts[WARNING]:
            others.append(count(counts[WARNING], WARNING))
        if counts[UNKNOWN]:
            others.append(count(counts[UNKNOWN], UNKNOWN, UNKNOWN))
        text = f"{worst.check}: {worst.finding.what}"
        return f"{text}; also found: {', '.join(others)}" if others else text

    def as_json(self) -> ReportRecord:
        """Return the report as `doctor -o json` prints it."""
        records: list[FindingRecord] = []
        for line in self.lines:
            record: FindingRecord = {
                "check": line.check,
                "level": line.finding.level,
                "what": line.finding.what,
                "hint": line.finding.hint,
                "code": line.finding.code,
            }
            records.append(record)
        return {"state": self.state, "counts": self.counts, "checks": records}


def run_checks(checks: Sequence[Check], host: Host) -> Report:
    """Run the checks together, and return their findings."""
    running = [_CheckRun(check, host) for check in checks]
    lines: list[ReportLine] = []
    for run in running:
        for finding in run.findings():
            lines.append(ReportLine(run.check.name, finding))
    levels = list(NAGIOS_CODES)
    return Report(tuple(sorted(lines, key=lambda line: levels.index(line.finding.level))))


class _CheckRun:
    """A check on its own thread, which is abandoned at the deadline."""

    def __init__(self, check: Check, host: Host) -> None:
        self.check = check
        self._host = host
        self._timeout_s = host.timeout_s * check.timeout_factor
        self._end_s = time.monotonic() + self._timeout_s
        #: None until the check has ended.
        self._findings: Sequence[Finding] | None = None
        self._ended = threading.Event()
        try:
            threads.start_thread(self._run, lambda _, __: self._ended.set())
        except YunionError as error:
            self._findings = [Finding(UNKNOWN, error.message, error.hint)]
            self._ended.set()

    def findings(self) -> Sequence[Finding]:
        """Wait for the check's findings, and return them, or a finding that it took too long."""
        self._ended.wait(max(0.0, self._end_s - time.monotonic()))
        if self._findings is not None:
            return self._findings
        hint = "allow more time: yunion-mps doctor --timeout 60"
        return [Finding(UNKNOWN, f"no result within {self._timeout_s:g} s", hint)]

    def _run(self) -> None:
        self._findings = findings_of(self.check, self._host)
