"""scripts/generate itself: the same source gives the same files, and what is wrong is said in a line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from unit.generated import CHECKOUT, generate, run


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_the_files_are_the_same_whatever_the_environment(generated: Path, tmp_path: Path) -> None:
    other = generate(
        tmp_path,
        TZ="Pacific/Kiritimati",
        LC_ALL="C",
        COLUMNS="40",
        YUNION_MPS_LOG_LEVEL="debug",
        YUNION_MPS_ROOT="/x",
    )
    assert contents(other) == contents(generated)
    assert len(contents(generated)) == 9


def test_another_date_changes_nothing_but_the_date(generated: Path, tmp_path: Path) -> None:
    other = contents(generate(tmp_path, "86400"))
    old = contents(generated)
    for name, text in other.items():
        assert text.replace(b" 1970-01-02 ", b" 2026-09-21 ") == old[name], name
    assert sum(b" 1970-01-02 " in text for text in other.values()) == 4


def test_a_second_run_replaces_the_files(tmp_path: Path) -> None:
    generate(tmp_path)
    page = tmp_path / "man/yunion-mps.1"
    whole = page.read_text()
    page.write_text("something else, and longer than the page: " + whole)
    generate(tmp_path)
    assert page.read_text() == whole


def test_the_files_describe_the_sources_beside_the_script(tmp_path: Path) -> None:
    """Packages are built from a copy of the sources, with the checkout's Python."""
    copy = tmp_path / "copy"
    shutil.copytree(CHECKOUT / "yunion_mps", copy / "yunion_mps")
    shutil.copytree(CHECKOUT / "scripts/manual", copy / "scripts/manual")
    command = copy / "yunion_mps/cli/devices.py"
    command.write_text(command.read_text().replace("List the NVIDIA GPUs", "Count the NVIDIA GPUs"))
    made = [sys.executable, "-I", str(copy / "scripts/manual/__main__.py"), str(tmp_path / "made")]
    subprocess.run(made, env={"SOURCE_DATE_EPOCH": "0"}, check=True, timeout=60)
    assert "Count the NVIDIA GPUs" in (tmp_path / "made/man/yunion-mps.1").read_text()


def test_a_missing_argument_prints_the_usage() -> None:
    for arguments in ([], ["--help"], ["one", "two"], [""]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "usage: scripts/generate DIRECTORY\n"


def test_an_invalid_date_is_reported(tmp_path: Path) -> None:
    done = run(str(tmp_path), epoch="yesterday")
    assert done.returncode == 2
    assert done.stderr == "generate: SOURCE_DATE_EPOCH is 'yesterday': write seconds since 1970\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "man").write_text("a file\n")
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"generate: {tmp_path}/man cannot be written: File exists\n"


def test_the_programs_do_not_import_the_generator() -> None:
    """What explains the keys costs no start anything: it is not even in the package."""
    for path in CHECKOUT.glob("yunion_mps/**/*.py"):
        assert not re.search(r"^\s*(from|import) manual", path.read_text(), re.MULTILINE), path
    assert (CHECKOUT / "scripts/manual/writing.py").is_file()
