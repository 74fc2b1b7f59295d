"""Build the deb with dpkg-deb and the rpm with rpmbuild, with the newest section of CHANGELOG.md."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import textwrap
import time
from email.utils import formatdate

from package_build.source import Source
from package_build.tree import DEBIAN, FEDORA, Package, compressed, installed_bytes, put, settle

#: There is no public mailbox: whichever organization publishes the packages is responsible for them.
MAINTAINER = "yunion-mps maintainers <yunion-mps@localhost>"
#: Cloudpods' package of the same name has Cloudpods' version numbers (3.11); the epoch makes ours newer.
EPOCH = 1


def points(source: Source) -> list[str]:
    """Return the items of the newest section, one paragraph each."""
    section = source.read("CHANGELOG.md").split("\n## ")[1]
    return [" ".join(point.split()) for point in section.split("\n- ")[1:]]


def debian_changelog(source: Source, package: Package) -> str:
    """Return the changelog in the format of deb-changelog(5)."""
    head = f"{package.name} ({EPOCH}:{source.version}) unstable; urgency=medium\n\n"
    body = "".join(_indented(point, "  * ", "    ") for point in points(source))
    return f"{head}{body}\n -- {MAINTAINER}  {formatdate(source.epoch_s)}\n"


def rpm_changelog(source: Source) -> str:
    """Return the changelog in the format of a spec's %changelog."""
    day = time.strftime("%a %b %d %Y", time.gmtime(source.epoch_s))
    body = "".join(_indented(point, "- ", "  ") for point in points(source)).replace("%", "%%")
    return f"* {day} {MAINTAINER} - {EPOCH}:{source.version}-1\n{body}"


def _indented(point: str, first: str, rest: str) -> str:
    return textwrap.fill(point, 78, initial_indent=first, subsequent_indent=rest) + "\n"


def build_deb(source: Source, package: Package, root: str, output: str) -> str:
    """Turn the staged tree into a deb; returns its path."""
    ours = f"packaging/debian/{package.name}"
    put(root, f"{package.documents}/changelog.gz", compressed(debian_changelog(source, package).encode()))
    overrides = source.read(ours, "lintian-overrides")
    put(root, f"usr/share/lintian/overrides/{package.name}", overrides.encode())
    sums = _sums(root)
    control = source.read(ours, "control")
    for name, value in (
        ("VERSION", f"{EPOCH}:{source.version}"),
        ("MAINTAINER", MAINTAINER),
        ("INSTALLED_KIB", str(-(-installed_bytes(root) // 1024))),
    ):
        control = control.replace(f"@{name}@", value)
    if os.path.exists(os.path.join(root, DEBIAN.defaults)):
        put(root, "DEBIAN/conffiles", f"/{DEBIAN.defaults}\n".encode())
    put(root, "DEBIAN/control", control.encode())
    put(root, "DEBIAN/md5sums", sums.encode())
    for name in sorted({*os.listdir(source.path(ours))} - {"control", "lintian-overrides"}):
        put(
            root, f"DEBIAN/{name}", source.script(ours, name).encode(), 0o644 if name == "triggers" else 0o755
        )
    settle(root, source.epoch_s)
    path = os.path.join(output, f"{package.name}_{source.version}_all.deb")
    # xz, because dpkg before Debian 12 does not support zstd.
    command = ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, path]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return path


def _sums(root: str) -> str:
    """Return the checksums in the format of deb-md5sums(5), without configuration files."""
    lines = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            place = os.path.relpath(path, root)
            if not place.startswith("etc/"):
                with open(path, "rb") as file:
                    lines.append(f"{hashlib.md5(file.read()).hexdigest()}  {place}\n")
    return "".join(sorted(lines, key=lambda line: line.split("  ")[1]))


def build_rpm(source: Source, package: Package, root: str, work: str, output: str) -> str:
    """Turn the staged tree into an rpm; `work` is an empty folder. Returns its path."""
    settle(root, source.epoch_s)
    with open(os.path.join(work, "files"), "w", encoding="utf-8") as file:
        file.writelines(_file_list(package, root))
    spec = source.script(f"packaging/rpm/{package.name}.spec", percent="%%")
    with open(os.path.join(work, f"{package.name}.spec"), "w", encoding="utf-8") as file:
        file.write(spec + rpm_changelog(source))
    defines = {
        "_topdir": work,
        "_rpmdir": f"{work}/rpms",
        "staged": root,
        "our_version": source.version,
        "our_epoch": str(EPOCH),
        "our_maintainer": MAINTAINER,
        # The file must not depend on the machine or the time.
        "_buildhost": "reproducible",
        "use_source_date_epoch_as_buildtime": "1",
        "clamp_mtime_to_source_date_epoch": "1",
        "source_date_epoch_from_changelog": "0",
        "_binary_payload": "w6.xzdio",
    }
    # Even in a noarch package, the header names a target, by default the building machine.
    command = ["rpmbuild", "-bb", "--quiet", "--nodeps", "--target", "noarch-redhat-linux"]
    for name, value in defines.items():
        command += ["--define", f"{name} {value}"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    done = subprocess.run(
        [*command, f"{work}/{package.name}.spec"],
        check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"package: rpmbuild failed:\n{done.stdout}")
    name = f"{package.name}-{source.version}-1.noarch.rpm"
    return shutil.copy(f"{work}/rpms/noarch/{name}", output)


def _file_list(package: Package, root: str) -> list[str]:
    """List all files and the directories that only this package has; mark configuration and documentation."""
    lines = []
    for folder, folders, names in os.walk(root):
        place = folder[len(root) :]
        if re.match(package.directories, place.lstrip("/")):
            lines.append(f"%dir {place}\n")
        lines += [f"{_mark(f'{place}/{name}')}{place}/{name}\n" for name in names]
        folders.sort()
    return sorted(lines, key=lambda line: line.split()[-1])


def _mark(path: str) -> str:
    if path == f"/{FEDORA.defaults}":
        return "%config(noreplace) "
    if path.endswith("/copyright"):
        return "%license "
    return "%doc " if path.startswith(("/usr/share/doc/", "/usr/share/man/")) else ""
