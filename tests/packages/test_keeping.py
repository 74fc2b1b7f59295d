"""What is kept between runs, and of one that fails."""

from __future__ import annotations

import shutil

import pytest

from packages.conftest import JOURNALS, NewMachine
from packages.images import image


def journals() -> list[str]:
    return sorted(path.name for path in JOURNALS.glob("kept-*"))


def test_the_journal_is_kept_only_if_the_machines_test_fails(new_machine: NewMachine) -> None:
    def fail() -> None:
        with new_machine("trixie", "kept") as machine:
            machine.boot()
            machine.run("logger", "of the first boot")
            machine.reboot()
            machine.run("logger", "of the second boot")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    (kept,) = journals()
    said = (JOURNALS / kept / "journal.log").read_text()
    assert "of the first boot" in said
    assert "of the second boot" in said
    assert (JOURNALS / kept / "console.log").exists()
    shutil.rmtree(JOURNALS / kept)  # this one is no failure to look into
    with new_machine("trixie", "kept") as machine:
        machine.boot()
    assert journals() == []


def test_an_image_is_created_only_once(versions: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mmdebstrap cannot be found, what was made before is there, and nothing else can be had."""
    before = image("trixie")
    made_s = before.stat().st_mtime
    monkeypatch.setenv("PATH", "/nowhere")
    assert (image("trixie"), image("trixie").stat().st_mtime) == (before, made_s)
    with pytest.raises(FileNotFoundError, match="mmdebstrap"):
        image("sid")
    (before.parent / "sid.lock").unlink()
