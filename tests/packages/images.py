"""Debian as a minimal host has it, made once and kept under .cache/images, and a machine's own changes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from simhost.environment import CHECKOUT

IMAGES = CHECKOUT / ".cache/images"
_SOURCES = CHECKOUT / "scripts/lib/debian_sources.py"
#: python3 and systemd are all that the packages may need; curl asks a socket, rpm is the other way in.
_PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "procps", "curl", "rpm")
_RECIPE = (
    "--mode=root",
    "--variant=minbase",
    '--aptopt=APT::Install-Recommends "false"',
    '--aptopt=Acquire::Languages "none"',
    "--dpkgopt=force-unsafe-io",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    f"--include={','.join(_PACKAGES)}",
)
#: Docker and the programs that it calls in the tests that start it; the rest (80 MB) is left out.
_DOCKER = (
    "--include=docker.io,docker-cli",
    *(
        f"--dpkgopt=path-exclude=/usr/bin/{name}"
        for name in ("ctr", "docker-proxy", "containerd-shim", "containerd-shim-runc-v1", "containerd-stress")
    ),
    '--customize-hook=chroot "$1" systemctl --quiet disable docker.service docker.socket containerd.service',
)
#: What a release has beyond the others: dnf; docker, which reads CDI from trixie's on.
_BEYOND = {"bookworm": ("--include=dnf",), "trixie": _DOCKER}
_LIMIT_S = 420


class ImageError(RuntimeError):
    """An image could not be made."""


def image(release: str) -> Path:
    """The root of Debian `release` (bullseye, bookworm, trixie), to be copied and not to be changed.

    It is made from this machine's own sources of Debian, whatever their release. Raises ImageError.
    """
    key = hashlib.sha256(" ".join([release, *_recipe(release)]).encode()).hexdigest()[:12]
    target = IMAGES / f"{release}-{key}"
    IMAGES.mkdir(parents=True, exist_ok=True)
    with open(IMAGES / f"{release}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in IMAGES.glob(f"{release}-*"):
                shutil.rmtree(old)
            _make(release, target)
    return target


def _recipe(release: str) -> tuple[str, ...]:
    return (*_RECIPE, *_BEYOND.get(release, ()))


def _make(release: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = _sources(release, Path(folder) / "apt")
        new = target.with_name(f"{target.name}.new")
        command = ["mmdebstrap", *_recipe(release), release, str(new), *map(str, sources)]
        # A session of its own: Ctrl-C in the middle of it would leave mounts behind.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, start_new_session=True
        )
    if done.returncode != 0:
        shutil.rmtree(new, ignore_errors=True)
        raise ImageError(f"Debian {release} could not be made: {' '.join(command)}\n{done.stderr[-3000:]}")
    (new / "var/log/journal").mkdir(exist_ok=True)
    new.rename(target)


def _sources(release: str, folder: Path) -> list[Path]:
    """Write this machine's sources of Debian as those of `release`, component main; return the files."""
    here = platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")
    command = [sys.executable, "-I", str(_SOURCES), here, "/etc/apt", str(folder), release, "main"]
    subprocess.run(command, check=True)
    return [path for path in folder.rglob("*") if path.is_file()]


def lay_over(image: Path, root: Path) -> None:
    """Let the image be seen at `root`, where all that is written stays apart from it.

    Where overlayfs cannot do that (in most containers), `root` is a copy.
    """
    parts = {name: root.with_name(f"{root.name}.{name}") for name in ("upper", "work")}
    for folder in (root, *parts.values()):
        folder.mkdir()
    options = f"lowerdir={image},upperdir={parts['upper']},workdir={parts['work']}"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", str(root)], capture_output=True
    )
    if mounted.returncode != 0:
        subprocess.run(["cp", "-a", "--reflink=auto", f"{image}/.", str(root)], check=True)


def take_off(root: Path) -> None:
    """Undo it; what was written is still to be removed."""
    if os.path.ismount(root):
        subprocess.run(["umount", "--recursive", "--lazy", str(root)], check=True)
