"""The tree of files that both packages are made of."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import zipfile
from typing import NamedTuple

from package_build.source import Source
from package_build.vendor import Bundled

LIBRARY = "usr/lib/yunion-mps"
DOCUMENTS = "usr/share/doc/yunion-mps-daemon"


class Family(NamedTuple):
    """Paths that differ between two families of distributions."""

    defaults: str
    zsh: str


DEBIAN = Family("etc/default/yunion-mps-daemon", "usr/share/zsh/vendor-completions/_yunion-mps")
FEDORA = Family("etc/sysconfig/yunion-mps-daemon", "usr/share/zsh/site-functions/_yunion-mps")

#: What is installed as it lies in the sources: from, to, mode.
_FILES = (
    ("packaging/bin/launcher", "usr/bin/yunion-mps", 0o755),
    ("packaging/bin/launcher", "usr/bin/yunion-mps-daemon", 0o755),
    ("packaging/bin/launcher", "usr/bin/yunion-mps-kubelet-plugin", 0o755),
    ("systemd/yunion-mps-daemon.service", "usr/lib/systemd/system/yunion-mps-daemon.service", 0o644),
    ("systemd/yunion-mps-job@.service", "usr/lib/systemd/system/yunion-mps-job@.service", 0o644),
    ("systemd/yunion-mps-gateway.service", "usr/lib/systemd/system/yunion-mps-gateway.service", 0o644),
    (
        "systemd/yunion-mps-kubelet-plugin.service",
        "usr/lib/systemd/system/yunion-mps-kubelet-plugin.service",
        0o644,
    ),
    ("systemd/yunion-mps-gateway.path", "usr/lib/systemd/system/yunion-mps-gateway.path", 0o644),
    ("packaging/systemd/yunion-mps.sysusers", "usr/lib/sysusers.d/yunion-mps.conf", 0o644),
    ("packaging/systemd/yunion-mps.tmpfiles", "usr/lib/tmpfiles.d/yunion-mps.conf", 0o644),
    (
        "packaging/systemd/90-yunion-mps.preset",
        "usr/lib/systemd/system-preset/90-yunion-mps.preset",
        0o644,
    ),
    # Copied to /etc/yunion if the host has no such files; see packaging/scriptlets/maintain.sh.
    ("etc/yunion/host.conf", "usr/share/yunion-mps/host.conf", 0o644),
    ("etc/yunion/host_container_device.yml", "usr/share/yunion-mps/host_container_device.yml", 0o644),
    ("etc/prometheus/yunion-mps.rules.yml", "usr/share/yunion-mps/prometheus/yunion-mps.rules.yml", 0o644),
    ("etc/grafana/yunion-mps.json", "usr/share/yunion-mps/grafana/yunion-mps.json", 0o644),
    ("packaging/copyright", f"{DOCUMENTS}/copyright", 0o644),
)


def stage(source: Source, family: Family, wheel: str, bundle: list[Bundled], bill: str, root: str) -> None:
    """Write everything that is installed below `root`, except the packages' own changelogs."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("yunion_mps/"):
                put(root, f"{LIBRARY}/{name}", archive.read(name))
    for one in bundle:
        for name, data in one.files.items():
            put(root, f"{LIBRARY}/vendor/{name}", data)
    for origin, place, mode in _FILES:
        put(root, place, _bytes(source.path(origin)), mode)
    maintain = [source.read("packaging/scriptlets", name) for name in ("names.sh", "maintain.sh")]
    put(root, f"{LIBRARY}/maintain", "\n".join(["#!/bin/sh", *maintain]).encode(), 0o755)
    put(root, family.defaults, _bytes(source.path("packaging/yunion-mps-daemon.default")))
    put(root, f"{DOCUMENTS}/sbom.cdx.json", bill.encode())
    _generate(source, family, root)


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


def _generate(source: Source, family: Family, root: str) -> None:
    """Return the man pages and shell completions, generated from the program."""
    made = f"{root}.generated"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    command = [sys.executable, "-I", source.path("scripts/manual/__main__.py"), made]
    subprocess.run(command, check=True, env=environment)
    for name in sorted(os.listdir(f"{made}/man")):
        section = name.rpartition(".")[2]
        put(root, f"usr/share/man/man{section}/{name}.gz", compressed(_bytes(f"{made}/man/{name}")))
    for name, place in (
        ("yunion-mps.bash", "usr/share/bash-completion/completions/yunion-mps"),
        ("_yunion-mps", family.zsh),
        ("yunion-mps.fish", "usr/share/fish/vendor_completions.d/yunion-mps.fish"),
    ):
        put(root, place, _bytes(f"{made}/completions/{name}"))


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
