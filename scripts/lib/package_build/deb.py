"""The deb, by dpkg-deb."""

from __future__ import annotations

import hashlib
import os
import subprocess

from package_build.changelog import EPOCH, MAINTAINER, debian_changelog
from package_build.source import Source
from package_build.tree import DEBIAN, DOCUMENTS, compressed, installed_bytes, put, settle


def build_deb(source: Source, root: str, output: str) -> str:
    """Turn the staged tree into a deb; returns its path."""
    put(root, f"{DOCUMENTS}/changelog.gz", compressed(debian_changelog(source).encode()))
    overrides = source.read("packaging/debian/lintian-overrides")
    put(root, "usr/share/lintian/overrides/yunion-mps-daemon", overrides.encode())
    sums = _sums(root)
    control = source.read("packaging/debian/control")
    for name, value in (
        ("VERSION", f"{EPOCH}:{source.version}"),
        ("MAINTAINER", MAINTAINER),
        ("INSTALLED_KIB", str(-(-installed_bytes(root) // 1024))),
    ):
        control = control.replace(f"@{name}@", value)
    put(root, "DEBIAN/control", control.encode())
    put(root, "DEBIAN/conffiles", f"/{DEBIAN.defaults}\n".encode())
    put(root, "DEBIAN/triggers", source.read("packaging/debian/triggers").encode())
    put(root, "DEBIAN/md5sums", sums.encode())
    for name in ("preinst", "postinst", "prerm", "postrm"):
        put(root, f"DEBIAN/{name}", source.script("packaging/debian", name).encode(), 0o755)
    settle(root, source.epoch_s)
    path = os.path.join(output, f"yunion-mps-daemon_{source.version}_amd64.deb")
    # xz, for dpkg before Debian 12 knows no zstd.
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, path]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return path


def _sums(root: str) -> str:
    """As deb-md5sums(5) has it; configuration files are not named there."""
    lines = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            place = os.path.relpath(path, root)
            if not place.startswith("etc/"):
                with open(path, "rb") as file:
                    lines.append(f"{hashlib.md5(file.read()).hexdigest()}  {place}\n")
    return "".join(sorted(lines, key=lambda line: line.split("  ")[1]))
