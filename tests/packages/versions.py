"""The packages under test, and the same program as its version before this one would have been."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from yunion_mps import __version__

from simhost.environment import CHECKOUT

#: The version that is upgraded from: this tree with another number, until there is a release to take.
PREVIOUS = "0.0.9"
#: This machine's processor, as debs name it; rpms name it as the kernel does.
DEB_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
_LIMIT_S = 300
_NAMES = (CHECKOUT / "packaging/scriptlets/names.sh").read_text()
#: The free disk space that the packages require, which must be enough for what they install.
REQUIRED_MIB = int(re.findall(r"^required_mib=(\d+)", _NAMES, re.MULTILINE)[0])


class Packages(NamedTuple):
    version: str
    deb: Path
    rpm: Path


def built(folder: Path, version: str = __version__) -> Packages:
    """Both formats of this checkout, as of `version`, below the folder; built where they are not there."""
    output = folder / f"dist-{version}"
    if not output.exists():
        _build(folder / f"tree-{version}", version, output)
    deb = _only(output, f"yunion-mps-daemon_*_{DEB_ARCHITECTURE}.deb")
    rpm = _only(output, f"yunion-mps-daemon-*.{platform.machine()}.rpm")
    return Packages(version, deb, rpm)


def kubelet_plugin(daemon: Path) -> Path:
    """The package of the kubelet plugin that belongs to a package of the daemon."""
    return daemon.with_name(daemon.name.replace("-daemon", "-kubelet-plugin"))


def _build(tree: Path, version: str, output: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    copy_checkout(tree)
    init = tree / "yunion_mps/__init__.py"
    init.write_text(re.sub(r'(?m)^__version__ = ".+"$', f'__version__ = "{version}"', init.read_text()))
    if version == PREVIOUS:  # a module that is no more
        (tree / "yunion_mps/formerly").mkdir()
        (tree / "yunion_mps/formerly/__init__.py").write_text('"""Of the version before."""\n')
    new = output.with_name(f"{output.name}.new")
    build(tree, new)
    new.rename(output)


def build(checkout: Path, output: Path, environment: Mapping[str, str] = {}) -> None:
    """Build as scripts/package does, with this Python's packages."""
    command = [sys.executable, "-m", "package_build", "--output", str(output)]
    command += ["--cache", str(CHECKOUT / ".cache/package"), "--packager", str(CHECKOUT / ".packager")]
    variables = {**os.environ, **environment, "PYTHONPATH": "scripts/lib"}
    done = subprocess.run(
        command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"scripts/package failed in {checkout}:\n{done.stdout}{done.stderr}")


def stub_rpm(folder: Path, provides: list[str]) -> Path:
    """An empty rpm that provides what Debian's own packages have, of which rpm's database knows nothing."""
    tags = ["Name: debian-itself", "Version: 1", "Release: 1", "Summary: What is there", "License: none"]
    lines = [
        *tags,
        "BuildArch: noarch",
        *(f"Provides: {one}" for one in provides),
        "%description",
        "%files",
        "",
    ]
    return build_rpm(folder / "stub-rpm", "\n".join(lines))


def build_rpm(folder: Path, specification: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "one.spec").write_text(specification)
    places = ["--define", f"_topdir {folder}", "--define", f"_rpmdir {folder}/rpm"]
    command = [
        "rpmbuild",
        "-bb",
        *places,
        "--define",
        "_build_name_fmt %%{NAME}.rpm",
        str(folder / "one.spec"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"rpmbuild failed:\n{done.stdout}{done.stderr}")
    return _only(folder / "rpm", "*.rpm")


def copy_checkout(target: Path) -> None:
    """Copy the checkout as git would know it, in a repository of its own."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(CHECKOUT), str(target)], check=True)
    list_files = ["git", "-C", str(CHECKOUT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(list_files, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        (target / name).unlink(missing_ok=True)
        if (CHECKOUT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, target / name)


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found
