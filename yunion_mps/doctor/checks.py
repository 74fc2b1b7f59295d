"""What a check is: a function of the host that returns findings, each with a level, a text and a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from yunion_mps.doctor.host import Host, SkipError
from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable

OK = "ok"
SKIPPED = "skipped"  # it cannot be checked here: no daemon, no permission, no GPU
UNKNOWN = "unknown"  # the check failed or took too long
WARNING = "warning"
PROBLEM = "problem"
#: Levels in the order of the report, the worst first, with the exit statuses of monitoring plugins (Nagios,
#: Icinga, NRPE).
NAGIOS_CODES = {PROBLEM: 2, WARNING: 1, UNKNOWN: 3, SKIPPED: 3, OK: 0}


class Finding(NamedTuple):
    """A line of the report; a warning or problem without a `code` gets the code of its check."""

    level: str
    what: str
    hint: str = ""
    code: str = ""


Findings = Iterable[Finding]


def ok(what: str) -> Finding:
    return Finding(OK, what)


def skipped(what: str, hint: str = "") -> Finding:
    return Finding(SKIPPED, what, hint)


def warning(what: str, hint: str, code: str = "") -> Finding:
    """Some programs will fail, or get something other than they should."""
    return Finding(WARNING, what, hint, code)


def problem(what: str, hint: str, code: str = "") -> Finding:
    """Programs fail now, or run without their limits."""
    return Finding(PROBLEM, what, hint, code)


class Check(NamedTuple):
    """A check: without findings, it reports `all_clear`, and warnings or problems get its `code`.

    It is unknown if it takes longer than `timeout_factor` times the host's timeout.
    """

    name: str
    code: str
    run: Callable[[Host], Findings]
    all_clear: str = ""
    timeout_factor: float = 1


def check(
    name: str, code: str, all_clear: str = "", timeout_factor: float = 1
) -> Callable[[Callable[[Host], Findings]], Check]:
    """Declare a function in a module of `report.MODULES` as a check of the host.

    It changes nothing, and returns or yields findings; it raises YunionError if it cannot be checked here.
    """
    return lambda run: Check(name, code, run, all_clear, timeout_factor)


def findings_of(check: Check, host: Host) -> list[Finding]:
    """Return the check's findings, or why there are none; never raises."""
    try:
        found = list(check.run(host)) or [ok(check.all_clear)] * bool(check.all_clear)
    except SkipError as error:
        found = [skipped(error.message, error.hint)]
    except YunionError as error:
        found = [skipped(f"not checked: {error.message}", error.hint)]
    except OSError as error:
        found = [Finding(UNKNOWN, f"this could not be checked: {error}", "run it as root")]
    except Exception as error:  # noqa: BLE001 - a fault of one check must not hide what the others found
        hint = "report this, with the output of: yunion-mps doctor -o json"
        found = [Finding(UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}", hint)]
    # Texts quote environments, logs, files and answers; checks compare them unescaped.
    codes = {WARNING: check.code, PROBLEM: check.code}
    return [
        Finding(level, printable(what), printable(hint), code or codes.get(level, ""))
        for level, what, hint, code in found
    ]
