"""The generated files, and their pages as a reader sees them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unit.cli.conftest import cli, serve, troubled_cli
from unit.generated import generate

__all__ = ["cli", "serve", "troubled_cli"]

Done = subprocess.CompletedProcess[str]

PAGES = (
    "yunion-mps.1",
    "yunion-mps-daemon.8",
    "yunion-mps-kubelet-plugin.8",
    "yunion-mps-host.conf.5",
    "yunion-mps-host_container_device.yml.5",
)


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("generated"))


class Manual:
    """The pages as plain text."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._texts: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.directory / name

    def text(self, name: str) -> str:
        """The page as man shows it on a terminal of 80 columns."""
        if name not in self._texts:
            page = run("mandoc", "-Tutf8", "-Owidth=80", self.path(name)).stdout
            self._texts[name] = re.sub(".\b", "", page)
        return self._texts[name]


@pytest.fixture(scope="session")
def manual(generated: Path) -> Manual:
    return Manual(generated / "man")


def program(name: str) -> str:
    path = shutil.which(name)
    assert path, f"{name} is missing: scripts/setup installs it"
    return path


def run(name: str, *arguments: object, env: dict[str, str] | None = None) -> Done:
    """A program that the tests need, which ends with 0 and says nothing on standard error."""
    command = [program(name), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done


def squeezed(text: str) -> str:
    """Without blanks and line ends, of which a help and a man page have others."""
    return re.sub(r"\s", "", text)
