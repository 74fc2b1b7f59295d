"""Reason codes: each has one meaning, is used, and is explained in docs/reason-codes.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.core import reasons
from yunion_mps.core.errors import YunionError
from yunion_mps.core.reasons import (
    CODES,
    COMPUTE_MODE_FIXED,
    COMPUTE_MODE_UNSUPPORTED,
    GPU_GONE,
    NO_REASON,
    Reason,
    hint_of,
)

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = {
    path: path.read_text() for path in (CHECKOUT / "yunion_mps").rglob("*.py") if path.name != "reasons.py"
}
NAMES = {name: value for name, value in vars(reasons).items() if name[0].isupper() and type(value) is str}


def kinds_of_errors(kind: type[YunionError] = YunionError) -> list[type[YunionError]]:
    return [kind, *(below for one in kind.__subclasses__() for below in kinds_of_errors(one))]


def test_a_reason_is_its_text_and_has_a_code() -> None:
    reason = Reason("the GPU is lost", reasons.GPU_LOST)
    assert reason == f"{reason}" == "the GPU is lost"
    assert (reason.code, NO_REASON.code, bool(NO_REASON)) == ("gpu_lost", "", False)


def test_each_code_has_its_name_a_meaning_and_a_hint() -> None:
    assert sorted(NAMES.values()) == sorted(CODES)
    for name, code in NAMES.items():
        assert code == name.lower()
        meaning, hint = CODES[code]
        assert re.fullmatch(r"[A-Z].*\.", meaning), code
        assert re.fullmatch(r"[a-z].*[^.]", hint), code


def test_a_hint_names_its_object_or_is_general() -> None:
    expected = "disable MIG mode: nvidia-smi -i GPU-1 -mig 0; then: yunion-mps reload"
    assert hint_of(reasons.MIG_ENABLED, gpu="GPU-1").startswith(expected)
    reset = "reset it (nvidia-smi --gpu-reset -i 0000:00:06.0) or reboot, then: yunion-mps reload"
    assert hint_of(reasons.GPU_FAULT, gpu="00:06.0-g1") == reset, "an instance cannot be reset"
    assert hint_of(reasons.OVER_BUDGET, pid=4711).endswith("yunion-mps terminate 4711")
    assert hint_of(reasons.OVER_BUDGET).endswith("yunion-mps terminate PID")
    assert hint_of(reasons.LEASE_OUTDATED, lease="7c1f0e7a").endswith("lease release 7c1f0e7a")
    created_again = "if the MIG layout includes it, wait until it is created again: yunion-mps gpus"
    assert hint_of(reasons.MIG_INSTANCE_GONE) == created_again, "there is no lease to release"
    released = f"{created_again}; or release its lease: yunion-mps lease release 7c1f0e7a"
    assert hint_of(reasons.MIG_INSTANCE_GONE, lease="7c1f0e7a") == released
    assert hint_of("from_a_newer_daemon") == "run the diagnostics: yunion-mps doctor"


def test_each_code_is_used() -> None:
    used: set[str] = set()
    for text in SOURCES.values():
        used.update(re.findall(r"\b[A-Z][A-Z0-9_]+\b", text))
    assert set(NAMES) - used == set()


def test_each_error_has_a_code_of_the_table() -> None:
    for kind in kinds_of_errors():
        assert kind.code in CODES, kind


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """The calls of the class in the whole program."""
    found = []
    for path, text in SOURCES.items():
        if f"{name}(" in text:
            nodes = ast.walk(ast.parse(text))
            called = [node for node in nodes if isinstance(node, ast.Call)]
            found += [(path, node) for node in called if getattr(node.func, "id", "") == name]
    return found


def test_each_warning_and_error_event_has_a_code() -> None:
    for path, call in calls("Event"):
        severity: Any = call.args[0] if call.args else None
        is_told = isinstance(severity, ast.Constant) and severity.value in ("warning", "error")
        has_code = len(call.args) > 6 or any(one.arg == "code" for one in call.keywords)
        assert has_code or not is_told or path.name == "gpus.py", f"{path}:{call.lineno}"


def test_each_reason_is_made_with_a_code() -> None:
    """`Reason` requires one; only `NO_REASON`, in reasons.py, has an empty one."""
    found = calls("Reason")
    assert len(found) > 30
    for path, call in found:
        code: Any = call.args[1] if len(call.args) == 2 else None
        assert code is not None, f"{path}:{call.lineno}"
        assert not isinstance(code, ast.Constant), f"{path}:{call.lineno}"
    with pytest.raises(TypeError):
        Reason("the GPU is lost")  # type: ignore[call-arg]


def test_no_text_is_compared_where_there_is_a_code() -> None:
    """A reason, warning, message or hint is for people: nothing looks for words in one."""
    words = r"(?:reason|warning|message|hint|what|notice)(?:\"\])?"
    within = r"\bin (?:\w+(?:\.|\[\"))?(?:reason|warning|message|hint)\b"
    matching = re.compile(rf"\b{words}\.(?:startswith|endswith|find)\(|{within}")
    for path, text in SOURCES.items():
        found = matching.search(text)
        assert found is None, f"{path}: {found and found[0]}"


def test_the_page_has_each_code_with_its_meaning_and_hint() -> None:
    page = (CHECKOUT / "docs/reason-codes.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    shown = {code: (meaning, hint.replace("\\|", "|")) for code, meaning, hint in rows}
    assert shown == {code: (one.meaning, hint_of(code, lease="LEASE")) for code, one in CODES.items()}


def test_a_hint_about_an_entry_also_fits_hosts_without_entries() -> None:
    assert hint_of(GPU_GONE).endswith("or, if it has none, wait for the next boot, which gives it up")


def test_status_gives_no_hint_to_run_status() -> None:
    assert {code for code in CODES if "yunion-mps status;" in hint_of(code)} == set()


def test_no_hint_sets_a_mode_that_the_driver_does_not_let_change() -> None:
    for code in (COMPUTE_MODE_FIXED, COMPUTE_MODE_UNSUPPORTED):
        assert "nvidia-smi" not in hint_of(code)
