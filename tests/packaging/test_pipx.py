"""`pipx install` of the wheel, without a network, gives working programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from yunion_mps import __version__

from simhost import SimHost

from .conftest import ROOT, Built, run

#: What the wheel depends on, and pip, which pipx brings up to date.
NEEDED = (
    "click",
    "grpclib",
    "h11",
    "h2",
    "hpack",
    "hyperframe",
    "multidict",
    "nvidia-ml-py",
    "prometheus-client",
    "protobuf",
    "psutil",
    "PyYAML",
    "sdnotify",
    "typing_extensions",
    "pip",
)


def repack(name: str, folder: Path) -> None:
    """Make a wheel of a package that is installed here: a folder of them is all that pip needs."""
    found = distribution(name)
    files = [file for file in found.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    tags = [line[5:] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    stem = "_".join(found.metadata["Name"].lower().replace("-", "_").split("."))
    with zipfile.ZipFile(folder / f"{stem}-{found.version}-{tags[0]}.whl", "w") as wheel:
        for file in files:
            if file.name not in ("INSTALLER", "REQUESTED", "direct_url.json"):
                wheel.write(str(file.locate()), str(file))


class Pipx:
    def __init__(self, home: Path, wheels: Path) -> None:
        self.home = home
        own = {
            "HOME": home,
            "PIPX_HOME": home / "pipx",
            "PIPX_BIN_DIR": home / "bin",
            "PIPX_MAN_DIR": home / "man",
        }
        pip = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": wheels,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
        }
        self.environment = {
            "PATH": os.environ["PATH"],
            **{name: str(value) for name, value in {**own, **pip}.items()},
        }

    def run(self, *words: str) -> None:
        command = [sys.executable, "-m", "pipx", *words]
        done = subprocess.run(command, env=self.environment, cwd=self.home, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def pipx(tmp_path: Path, built: Built) -> Pipx:
    wheels, home = tmp_path / "wheels", tmp_path / "home"
    wheels.mkdir()
    home.mkdir()
    for name in NEEDED:
        repack(name, wheels)
    made = Pipx(home, wheels)
    made.run("install", str(built.wheel))
    return made


def test_the_wheel_installs_the_programs_and_nothing_else(pipx: Pipx) -> None:
    programs = ["yunion-mps", "yunion-mps-daemon", "yunion-mps-kubelet-plugin"]
    assert sorted(path.name for path in (pipx.home / "bin").iterdir()) == programs
    with SimHost.create() as host:
        for name in ("host.conf", "host_container_device.yml"):
            shutil.copy(ROOT / "etc/yunion" / name, host.root / "etc/yunion" / name)

        def said(program: str, *words: str) -> str:
            command = [str(pipx.home / "bin" / program), *words]
            done = subprocess.run(command, env=host.env, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        revision = run("git", "-C", ROOT, "rev-parse", "--short=12", "HEAD").strip()
        revision += "+changes" if run("git", "-C", ROOT, "status", "--porcelain") else ""
        for name in programs[:2]:
            assert said(name, "--version") == f"{name} {__version__} ({revision})\n"
        assert "--adopt PID" in said("yunion-mps-daemon", "--help")
        assert "The configuration is valid" in said("yunion-mps", "config", "check")
        assert "4 devices" not in said("yunion-mps-daemon", "--check")
    pipx.run("uninstall", "yunion-mps")
    assert list((pipx.home / "bin").iterdir()) == []
