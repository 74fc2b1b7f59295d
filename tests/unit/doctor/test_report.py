"""All checks are called at once, and none hides what the others found."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from yunion_mps.core.errors import HostError
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import CODES, HOST_ERROR, MIG_ENABLED
from yunion_mps.doctor.checks import Check, Finding, Findings, Host, ok, problem, skipped, warning
from yunion_mps.doctor.report import HOST_CHECKS, Report, run_checks, select_checks

from simhost.environment import CHECKOUT


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(Paths(str(tmp_path)), 30)


ALSO = "lost / gone; also found: 1 problem, 1 warning, 1 unknown"
GOOD = Check("good", HOST_ERROR, lambda _: [ok("fine")])


def report(host: Host, *findings: Finding) -> Report:
    return run_checks([Check("one", HOST_ERROR, lambda _: findings)], host)


def broken(_: Host) -> Findings:
    raise ZeroDivisionError("of ours")


def refused(_: Host) -> Findings:
    raise HostError("you may not", "become root")


def test_a_check_that_breaks_is_a_line_of_its_own(host: Host) -> None:
    found = run_checks([Check("bad", HOST_ERROR, broken), GOOD], host)
    assert [(line.check, line.finding.level) for line in found.lines] == [("bad", "unknown"), ("good", "ok")]
    assert found.lines[0].finding.what == "the check itself failed: ZeroDivisionError: of ours"
    assert found.state == "unknown"


def test_a_check_that_hangs_is_given_up_and_the_others_are_not(host: Host) -> None:
    ended = threading.Event()

    def hangs(_: Host) -> Findings:
        ended.wait(60)
        return []

    found = run_checks([Check("bad", HOST_ERROR, hangs, timeout_factor=0.01), GOOD], host)
    ended.set()
    assert [line.check for line in found.lines] == ["bad", "good"]
    assert found.lines[0].finding.what == "no result within 0.3 s"


def test_checks_without_permission_are_skipped_with_the_reason(host: Host) -> None:
    found = run_checks([Check("root's", HOST_ERROR, refused), GOOD], host)
    assert found.lines[-1].finding == ok("fine")
    assert found.lines[0].finding == skipped("not checked: you may not", "become root")
    assert found.state == "ok"


def test_a_check_without_findings_is_well_in_its_own_words(host: Host) -> None:
    found = run_checks([Check("one", HOST_ERROR, lambda _: [], "all is well")], host)
    assert [line.finding for line in found.lines] == [ok("all is well")]


@pytest.mark.parametrize(
    ("findings", "state", "code", "nagios_code"),
    [
        ([ok("")], "ok", 0, 0),
        ([ok(""), skipped("")], "ok", 0, 0),
        ([ok(""), warning("", "")], "warning", 0, 1),
        ([problem("", ""), warning("", ""), Finding("unknown", "")], "problem", 1, 2),
        ([ok(""), Finding("unknown", "")], "unknown", 0, 3),
        ([skipped("")], "unknown", 0, 3),
        ([], "unknown", 0, 3),
    ],
)
def test_the_exit_status_tells_a_problem_and_nagios_every_level(
    host: Host, findings: list[Finding], state: str, code: int, nagios_code: int
) -> None:
    found = report(host, *findings)
    assert (found.state, found.exit_code(nagios=False)) == (state, code)
    assert found.exit_code(nagios=True) == nagios_code


def test_the_worst_comes_first(host: Host) -> None:
    found = report(host, ok("1"), warning("2", ""), problem("3", ""), skipped("4"), Finding("unknown", "5"))
    assert [line.finding.what for line in found.lines] == ["3", "2", "5", "4", "1"]
    assert found.counts == {"problem": 1, "warning": 1, "unknown": 1, "skipped": 1, "ok": 1}


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        (
            [ok(""), ok(""), skipped("")],
            "MPS OK: 2 checks passed, 1 skipped | {}=0;;0;0 {}=0;0;;0 {}=0;;;0 {}=1;;;0 {}=2;;;0",
        ),
        (
            [
                warning("slow", ""),
                problem("lost | gone", "reset"),
                problem("", ""),
                Finding("unknown", ""),
            ],
            f"MPS CRITICAL: one: {ALSO} | {{}}=2;;0;0 {{}}=1;0;;0 {{}}=1;;;0 {{}}=0;;;0 {{}}=0;;;0",
        ),
        (
            [warning("slow", ""), ok("")],
            "MPS WARNING: one: slow | {}=0;;0;0 {}=1;0;;0 {}=0;;;0 {}=0;;;0 {}=1;;;0",
        ),
        (
            [skipped("no GPU")],
            "MPS UNKNOWN: one: no GPU | {}=0;;0;0 {}=0;0;;0 {}=0;;;0 {}=1;;;0 {}=0;;;0",
        ),
    ],
)
def test_the_line_for_nagios_begins_with_the_worst_and_counts_all(
    host: Host, findings: list[Finding], line: str
) -> None:
    levels = ("problem", "warning", "unknown", "skipped", "ok")
    assert report(host, *findings).nagios_line == line.format(*levels)


def test_each_check_of_the_host_has_a_code_of_the_table() -> None:
    for one in HOST_CHECKS:
        assert one.code in CODES, one.name
        assert one.all_clear not in CODES, one.name


def test_a_finding_has_its_own_code_or_that_of_its_check(host: Host) -> None:
    found = report(host, problem("1", ""), warning("2", "", MIG_ENABLED), ok("3"))
    assert [line.finding.code for line in found.lines] == [HOST_ERROR, MIG_ENABLED, ""]


def test_every_check_has_its_own_name_and_a_row_in_the_documentation() -> None:
    every = select_checks({}, 1, ("true",), selftest_too=True)
    names = {check.name for check in every}
    assert len(HOST_CHECKS) == len({check.name for check in HOST_CHECKS})
    page = (CHECKOUT / "docs/troubleshoot.md").read_text()
    rows = [line.split(" | ")[0][2:] for line in page.splitlines() if line[:2] == "| "]
    listed = rows[rows.index("check") + 1 :]
    assert set(listed) == names
    assert listed[: len(HOST_CHECKS)] == [check.name for check in HOST_CHECKS]
