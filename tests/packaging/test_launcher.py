"""What is on PATH: which Python it runs with, and what that finds."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from yunion_mps import __version__

from .conftest import ROOT

LAUNCHER = ROOT / "packaging/bin/launcher"


class Installed:
    """The launcher as it is installed, but with a library and with other Pythons of a test's own."""

    def __init__(self, root: Path, library: Path) -> None:
        self.root = root
        text = LAUNCHER.read_text()
        for name, place in (("/usr/lib/yunion-mps", library), ("/usr/bin/python3.%d", root / "python3.%d")):
            assert f'"{name}"' in text
            text = text.replace(f'"{name}"', f'"{place}"')
        for program in ("yunion-mps", "yunion-mps-daemon", "yunion-mps-kubelet-plugin"):
            (root / program).write_text(text)
            (root / program).chmod(0o755)

    def python(self, minor: int) -> None:
        path = self.root / f"python3.{minor}"
        path.write_text(f'#!/bin/sh\necho "python3.{minor}"\nexec /usr/bin/python3 "$@"\n')
        path.chmod(0o755)

    def run(self, *words: str, old: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program, `old` by a Python that says it is 3.6."""
        program = self.root / words[0]
        command = [str(program), *words[1:]]
        if old:
            code = (
                "import sys; sys.version_info = (3, 6, 8); sys.argv = sys.argv[1:]; file = sys.argv[0];"
                "exec(compile(open(file).read(), file, 'exec'), {'__name__': '__main__', '__file__': file})"
            )
            command = ["/usr/bin/python3", "-IS", "-c", code, *command]
        environment = {**os.environ, **variables}
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.fixture
def installed(tmp_path: Path, unpacked: Path) -> Installed:
    return Installed(tmp_path, unpacked / "usr/lib/yunion-mps")


def test_an_old_python_can_parse_the_launcher() -> None:
    ast.parse(LAUNCHER.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("program", ["yunion-mps", "yunion-mps-daemon", "yunion-mps-kubelet-plugin"])
def test_each_name_starts_its_own_program(installed: Installed, program: str) -> None:
    assert installed.run(program, "--version").stdout.startswith(f"{program} {__version__} (")
    assert program in installed.run(program, "--help").stdout


def test_a_link_with_another_name_starts_its_target(installed: Installed) -> None:
    (installed.root / "mpsd").symlink_to(installed.root / "yunion-mps-daemon")
    (installed.root / "yunion-mps-daemon-too").symlink_to(installed.root / "yunion-mps")
    assert installed.run("mpsd", "--version").stdout.startswith("yunion-mps-daemon ")
    assert installed.run("yunion-mps-daemon-too", "--version").stdout.startswith("yunion-mps 0")


def test_environment_and_directory_do_not_change_the_program(installed: Installed, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for module in ("click", "yunion_mps", "json"):
        (other / f"{module}.py").write_text("raise SystemExit('not this one')\n")
    done = installed.run(
        "yunion-mps", "--version", PYTHONPATH=str(other), PYTHONSTARTUP=str(other / "json.py")
    )
    assert done.returncode == 0, done.stderr


def test_the_launcher_finds_a_newer_python(installed: Installed) -> None:
    installed.python(8)
    installed.python(12)
    installed.python(11)
    done = installed.run("yunion-mps", "config", "--help", old=True)
    assert done.stdout.splitlines()[0] == "python3.11"
    assert "yunion-mps config check" in done.stdout


def test_the_launcher_reports_that_every_python_is_too_old(installed: Installed) -> None:
    done = installed.run("yunion-mps-daemon", "--check", old=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "yunion-mps-daemon: Python 3.9 or later is required, but /usr/bin/python3 is 3.6",
        "yunion-mps-daemon: install a newer one next to it, for example python3.11",
    ]
