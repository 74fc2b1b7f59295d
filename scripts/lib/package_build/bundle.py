"""The bundled libraries: of each, the published wheel that fits every Python from 3.9 on, whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

from package_build.source import Source

LOCK = "requirements/runtime.lock"
#: What determines the wheels: build.lock has what those are built with that are published as source only.
_LOCKS = (LOCK, "requirements/build.lock")

#: The processors that packages are made for, as Debian and nfpm name them, and as wheels do.
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}

#: Libraries that only the kubelet plugin uses, and its package has; in the form of PEP 503.
OF_KUBELET_PLUGIN = {
    "grpclib",
    "h2",
    "hpack",
    "hyperframe",
    "multidict",
    "protobuf",
    "typing-extensions",
}


def wheels(source: Source, architecture: str, cache: str) -> dict[str, str]:
    """Return the path of each library's wheel, by the library's name in the form of PEP 503.

    They are downloaded into `cache` unless they are there already.
    """
    digest = hashlib.sha256()
    for lock in _LOCKS:
        digest.update(source.read(lock).encode())
    directory = os.path.join(cache, f"{digest.hexdigest()[:16]}-{architecture}")
    with _locked(cache):  # another build may be about to fill it
        if not os.path.isdir(directory):
            with tempfile.TemporaryDirectory(dir=cache) as work:
                complete = os.path.join(work, "wheels")
                _download(source, architecture, complete)
                os.rename(complete, directory)
    return {_library(name): os.path.join(directory, name) for name in sorted(os.listdir(directory))}


def unpack(wheel: str, directory: str) -> None:
    """Unpack a wheel, whole, as `pip install --target` does.

    Raises SystemExit if it is for one version of Python only, or if it installs files in other directories.
    """
    file = os.path.basename(wheel)
    if not re.search(r"-(none-any|abi3-manylinux[^-]+)\.whl$", file):
        raise SystemExit(f"package: {file} is for one version of Python only, so it cannot be bundled")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".data/" in name:
                raise SystemExit(f"package: {file} installs files elsewhere: {name}")
            if not name.endswith("/"):
                put(os.path.join(directory, name), archive.read(name))


def put(path: str, data: bytes, mode: int = 0o644) -> None:
    """Write a file, and create its parent directories."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, mode)


def _download(source: Source, architecture: str, directory: str) -> None:
    """Download what the lock file allows: wheels that fit any Python, or else sources, which are built."""
    platform = f"manylinux2014_{ARCHITECTURES[architecture]}"
    _pip(
        *("download", "--require-hashes", "-r", source.path(LOCK), "--dest", directory),
        *("--python-version", "3.9", "--implementation", "cp", "--abi", "abi3", "--abi", "none"),
        *("--platform", platform, "--platform", "any"),
    )
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".whl"):
            archive = os.path.join(directory, name)
            _pip("wheel", "--no-cache-dir", "--wheel-dir", directory, archive)
            os.unlink(archive)


def _pip(*arguments: str) -> None:
    # PyYAML's C part would be for one version of Python only.
    environment = {**os.environ, "PYYAML_FORCE_LIBYAML": "0"}
    common = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", arguments[0], *common, *arguments[1:]]
    subprocess.run(command, check=True, env=environment)


def _library(wheel: str) -> str:
    return re.sub("[-_.]+", "-", wheel.split("-")[0]).lower()


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
