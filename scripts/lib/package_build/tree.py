"""The trees of files that the packages are made of."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from package_build.source import Source
from package_build.vendor import Bundled, bundled_in

LIBRARY = "usr/lib/yunion-mps"
_UNITS = "usr/lib/systemd/system"
_PRESETS = "usr/lib/systemd/system-preset"


class Family(NamedTuple):
    """Paths that differ between two families of distributions."""

    defaults: str
    zsh: str


DEBIAN = Family("etc/default/yunion-mps-daemon", "usr/share/zsh/vendor-completions/_yunion-mps")
FEDORA = Family("etc/sysconfig/yunion-mps-daemon", "usr/share/zsh/site-functions/_yunion-mps")


class Package(NamedTuple):
    """One of the packages: what it installs as it lies in the sources (from, to, mode), and the rest."""

    name: str
    #: A regular expression for its modules.
    modules: str
    man_pages: str
    #: A regular expression for the beginning of each directory that no other package has.
    directories: str
    files: tuple[tuple[str, str, int], ...]
    #: Directories of the sources of which everything is installed, and where.
    directories_of_files: tuple[tuple[str, str], ...] = ()

    @property
    def documents(self) -> str:
        return f"usr/share/doc/{self.name}"


DAEMON = Package(
    "yunion-mps-daemon",
    r"yunion_mps/(?!kubernetes/).+",
    r"(?!yunion-mps-kubelet-plugin\.).+",
    r"usr/(lib/yunion-mps|libexec/yunion-mps|share/yunion-mps|share/doc/yunion-mps-daemon)",
    (
        ("packaging/bin/launcher", "usr/bin/yunion-mps", 0o755),
        ("packaging/bin/launcher", "usr/bin/yunion-mps-daemon", 0o755),
        *(
            (f"libexec/slurm-{hook}", f"usr/libexec/yunion-mps/slurm-{hook}", 0o755)
            for hook in ("prolog", "task-prolog", "epilog", "health-check")
        ),
        ("systemd/yunion-mps-daemon.service", f"{_UNITS}/yunion-mps-daemon.service", 0o644),
        ("systemd/yunion-mps-job@.service", f"{_UNITS}/yunion-mps-job@.service", 0o644),
        ("systemd/yunion-mps-gateway.service", f"{_UNITS}/yunion-mps-gateway.service", 0o644),
        ("systemd/yunion-mps-gateway.path", f"{_UNITS}/yunion-mps-gateway.path", 0o644),
        ("packaging/systemd/yunion-mps.sysusers", "usr/lib/sysusers.d/yunion-mps.conf", 0o644),
        ("packaging/systemd/yunion-mps.tmpfiles", "usr/lib/tmpfiles.d/yunion-mps.conf", 0o644),
        (
            "packaging/systemd/yunion-mps-directory.tmpfiles",
            "usr/lib/tmpfiles.d/yunion-mps-directory.conf",
            0o644,
        ),
        ("packaging/systemd/90-yunion-mps.preset", f"{_PRESETS}/90-yunion-mps.preset", 0o644),
        # Copied to /etc/yunion if the host has no such files; see packaging/scriptlets/maintain.sh.
        ("etc/yunion/host.conf", "usr/share/yunion-mps/host.conf", 0o644),
        ("etc/yunion/host_container_device.yml", "usr/share/yunion-mps/host_container_device.yml", 0o644),
        (
            "etc/prometheus/yunion-mps.rules.yml",
            "usr/share/yunion-mps/prometheus/yunion-mps.rules.yml",
            0o644,
        ),
        ("etc/grafana/yunion-mps.json", "usr/share/yunion-mps/grafana/yunion-mps.json", 0o644),
    ),
)
KUBELET_PLUGIN = Package(
    "yunion-mps-kubelet-plugin",
    r"yunion_mps/kubernetes/.+",
    r"yunion-mps-kubelet-plugin\..+",
    r"usr/(lib/yunion-mps/(vendor/.|yunion_mps/.)|share/yunion-mps/.|share/doc/yunion-mps-kubelet-plugin)",
    (
        ("packaging/bin/launcher", "usr/bin/yunion-mps-kubelet-plugin", 0o755),
        ("systemd/yunion-mps-kubelet-plugin.service", f"{_UNITS}/yunion-mps-kubelet-plugin.service", 0o644),
        (
            "packaging/systemd/90-yunion-mps-kubelet-plugin.preset",
            f"{_PRESETS}/90-yunion-mps-kubelet-plugin.preset",
            0o644,
        ),
    ),
    (("etc/kubernetes", "usr/share/yunion-mps/kubernetes"),),
)
PACKAGES = (DAEMON, KUBELET_PLUGIN)


class Made(NamedTuple):
    """What was made of the sources: the wheel, the bundled libraries, and what `generate` has written."""

    wheel: str
    bundle: list[Bundled]
    generated: str


def stage(source: Source, package: Package, family: Family, made: Made, bill: str, root: str) -> None:
    """Write everything that the package installs below `root`, except its own changelog."""
    with zipfile.ZipFile(made.wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(package.modules, name):
                put(root, f"{LIBRARY}/{name}", archive.read(name))
    for one in bundled_in(package.name, made.bundle):
        for name, data in one.files.items():
            put(root, f"{LIBRARY}/vendor/{name}", data)
    for origin, place, mode in (*package.files, *_files_below(source, package.directories_of_files)):
        put(root, place, _bytes(source.path(origin)), mode)
    put(root, f"{package.documents}/copyright", _bytes(source.path("packaging/copyright")))
    put(root, f"{package.documents}/sbom.cdx.json", bill.encode())
    for name in sorted(os.listdir(f"{made.generated}/man")):
        if re.fullmatch(package.man_pages, name):
            section = name.rpartition(".")[2]
            page = compressed(_bytes(f"{made.generated}/man/{name}"))
            put(root, f"usr/share/man/man{section}/{name}.gz", page)
    if package is DAEMON:
        _stage_daemon(source, family, made.generated, root)


def _files_below(source: Source, directories: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    for origin, place in directories:
        for folder, _, names in os.walk(source.path(origin)):
            below = os.path.relpath(folder, source.path(origin))
            for name in names:
                yield os.path.join(folder, name), os.path.normpath(f"{place}/{below}/{name}"), 0o644


def _stage_daemon(source: Source, family: Family, generated: str, root: str) -> None:
    """Write what is made of several files, or has another place in each family."""
    maintain = [source.read("packaging/scriptlets", name) for name in ("names.sh", "maintain.sh")]
    put(root, f"{LIBRARY}/maintain", "\n".join(["#!/bin/sh", *maintain]).encode(), 0o755)
    put(root, family.defaults, _bytes(source.path("packaging/yunion-mps-daemon.default")))
    for name, place in (
        ("yunion-mps.bash", "usr/share/bash-completion/completions/yunion-mps"),
        ("_yunion-mps", family.zsh),
        ("yunion-mps.fish", "usr/share/fish/vendor_completions.d/yunion-mps.fish"),
    ):
        put(root, place, _bytes(f"{generated}/completions/{name}"))


def generate(source: Source, directory: str) -> None:
    """Write the man pages and shell completions, which are generated from the programs."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    command = [sys.executable, "-I", source.path("scripts/manual/__main__.py"), directory]
    subprocess.run(command, check=True, env=environment)


def put(root: str, place: str, data: bytes, mode: int = 0o644) -> None:
    """Write a file of the tree, and create its parent directories."""
    path = os.path.join(root, place)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, mode)


def compressed(data: bytes) -> bytes:
    """Compress data like gzip -9n, without a name or time."""
    return gzip.compress(data, 9, mtime=0)


def settle(root: str, epoch_s: int) -> None:
    """Set the usual mode of all directories, whatever the umask is, and the time of the sources."""
    for folder, _, names in os.walk(root):
        os.chmod(folder, 0o755)
        for name in [*names, "."]:
            os.utime(os.path.join(folder, name), (epoch_s, epoch_s))


def installed_bytes(root: str) -> int:
    """The sum of the files' sizes."""
    return sum(
        os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names
    )


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
