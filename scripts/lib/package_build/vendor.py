"""The bundled dependencies: the published file of each, fetched by its hash, and what is installed of it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

#: Which of several published files is taken: the one for the oldest Python. PyYAML publishes one for each
#: architecture; they differ only in its C part, which is left out.
_PLATFORM = [
    *("--python-version", "3.9", "--implementation", "cp", "--abi", "cp39", "--abi", "abi3", "--abi", "none"),
    *("--platform", "manylinux2014_x86_64", "--platform", "any"),
]


class Component(NamedTuple):
    """A dependency: its name, a regular expression for the files to install, and its licence (SPDX)."""

    name: str
    taken: str
    licence: str
    package: str = "yunion-mps-daemon"


_PLUGIN = "yunion-mps-kubelet-plugin"
COMPONENTS = (
    Component("click", r"click/.+\.py", "BSD-3-Clause"),
    Component("h11", r"h11/.+\.py", "MIT"),
    Component("h2", r"h2/.+\.py", "MIT", _PLUGIN),
    Component("hpack", r"hpack/.+\.py", "MIT", _PLUGIN),
    Component("hyperframe", r"hyperframe/.+\.py", "MIT", _PLUGIN),
    Component("nvidia-ml-py", r"pynvml\.py", "BSD-3-Clause"),
    # Only the modules that format metrics; yunion_mps/core/exposition.py says why.
    Component(
        "prometheus-client",
        r"prometheus_client/((metrics_core|process_collector|registry|samples|utils|validation)\.py"
        r"|openmetrics/(__init__|exposition)\.py)",
        "Apache-2.0",
    ),
    Component("pyyaml", r"yaml/.+\.py", "MIT"),
)


class Bundled(NamedTuple):
    """A component: its version, the published file's SHA-256, and what is installed of it."""

    component: Component
    version: str
    sha256: str
    files: dict[str, bytes]


def bundled(lock: str, cache: str) -> list[Bundled]:
    """Return the components that the lock file lists, from `cache`, and download those that it lacks."""
    pinned = dict(_pins(lock))
    if sorted(pinned) != [component.name for component in COMPONENTS]:
        raise SystemExit(f"package: {lock} is not of these: {[one.name for one in COMPONENTS]}")
    with _locked(cache):  # another build may be about to fill it
        found = _files_by_hash(cache)
        if any(sha256 not in found for _, sha256 in pinned.values()):
            download(lock, cache)
            found = _files_by_hash(cache)
    return [_unpack(component, *pinned[component.name], found) for component in COMPONENTS]


def bundled_in(package: str, bundle: Iterable[Bundled]) -> list[Bundled]:
    """Return the components that the package installs."""
    return [one for one in bundle if one.component.package == package]


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def relock(runtime_lock: str, lock: str, cache: str) -> None:
    """Rewrite the lock file: for each dependency in runtime.lock, the one file that is bundled."""
    for path in _files_by_hash(cache).values():
        os.unlink(path)
    download(runtime_lock, cache)
    hashes = {os.path.basename(path): sha256 for sha256, path in _files_by_hash(cache).items()}
    lines = ["# Written by scripts/package --lock: the one file of every dependency that is bundled.\n"]
    for name, sha256 in sorted((_normal(file), sha256) for file, sha256 in hashes.items()):
        lines.append(f"{name} \\\n    --hash=sha256:{sha256}\n")
    with open(lock, "w", encoding="utf-8") as file:
        file.writelines(lines)


def download(lock: str, cache: str) -> None:
    """Fetch the files that the lock file allows."""
    os.makedirs(cache, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    how = ["--no-deps", "--require-hashes", "--only-binary=:all:", *_PLATFORM]
    subprocess.run([*pip, *how, "--dest", cache, "-r", lock], check=True)


def _normal(file: str) -> str:
    """Return `name==version` for the name of a published file."""
    name, version = file.split("-")[:2]
    return f"{name.replace('_', '-').lower()}=={version}"


def _pins(lock: str) -> Iterator[tuple[str, tuple[str, str]]]:
    with open(lock, encoding="utf-8") as file:
        text = file.read()
    for name, version, sha256 in re.findall(r"^(\S+)==(\S+) \\\n +--hash=sha256:([0-9a-f]{64})$", text, re.M):
        yield name, (version, sha256)


def _files_by_hash(cache: str) -> dict[str, str]:
    found = {}
    for name in sorted(os.listdir(cache)) if os.path.isdir(cache) else []:
        path = os.path.join(cache, name)
        with open(path, "rb") as file:
            found[hashlib.sha256(file.read()).hexdigest()] = path
    return found


def _unpack(component: Component, version: str, sha256: str, found: dict[str, str]) -> Bundled:
    installed = re.compile(component.taken)
    with zipfile.ZipFile(found[sha256]) as wheel:
        files = {name: wheel.read(name) for name in sorted(wheel.namelist()) if installed.fullmatch(name)}
    return Bundled(component, version, sha256, files)
