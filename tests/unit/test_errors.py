from __future__ import annotations

import pytest
from yunion_mps.core import errors
from yunion_mps.core.errors import ConfigError, Problem, YunionError


def test_a_problem_is_one_line_without_control_characters() -> None:
    shown = str(Problem("/etc/a\nb", 1, "x is \x1b[31m\r\n\x85\u2028\u202e", "write … or é 😀"))
    assert shown == "/etc/a\\nb:1: x is \\x1b[31m\\r\\n\\x85\\u2028\\u202e: write … or é 😀"


def test_a_bad_configuration_carries_every_problem_and_a_hint() -> None:
    problems = [Problem("a", 1, "b", "c"), Problem("d", None, "e", "f")]
    error = ConfigError(problems)
    assert error.problems == tuple(problems)
    assert error.message == str(error) == "a:1: b: c\nd: e: f"
    assert error.hint == "fix these lines, then run: yunion-mps config check"


def test_the_hint_for_a_missing_file_speaks_of_no_lines() -> None:
    error = ConfigError([Problem("a", None, "cannot be read", "copy the example")])
    assert error.hint == "then run: yunion-mps config check"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("YunionError", 1),
        ("DriverError", 1),
        ("ControlError", 1),
        ("HostError", 1),
        ("NotFoundError", 1),
        ("UnreachableError", 3),
        ("NotAllowedError", 4),
        ("NothingFreeError", 5),
        ("InfeasibleError", 1),
        ("ConfigError", 6),
    ],
)
def test_every_error_is_of_one_tree_and_has_the_exit_code_of_the_design(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, YunionError)
    assert kind.exit_code == code
