"""The rpm, by rpmbuild."""

from __future__ import annotations

import os
import shutil
import subprocess

from package_build.changelog import EPOCH, MAINTAINER, rpm_changelog
from package_build.source import Source
from package_build.tree import FEDORA, settle


def build_rpm(source: Source, root: str, work: str, output: str) -> str:
    """Turn the staged tree into an rpm; `work` is an empty folder. Returns its path."""
    settle(root, source.epoch_s)
    with open(os.path.join(work, "files"), "w", encoding="utf-8") as file:
        file.writelines(_file_list(root))
    spec = source.script("packaging/rpm/yunion-mps-daemon.spec", percent="%%")
    with open(os.path.join(work, "yunion-mps-daemon.spec"), "w", encoding="utf-8") as file:
        file.write(spec + rpm_changelog(source))
    defines = {
        "_topdir": work,
        "_rpmdir": f"{work}/rpms",
        "staged": root,
        "our_version": source.version,
        "our_epoch": str(EPOCH),
        "our_maintainer": MAINTAINER,
        # Nothing of the machine and of the moment goes into the file.
        "_buildhost": "reproducible",
        "use_source_date_epoch_as_buildtime": "1",
        "clamp_mtime_to_source_date_epoch": "1",
        "source_date_epoch_from_changelog": "0",
        "_binary_payload": "w6.xzdio",
    }
    command = ["rpmbuild", "-bb", "--quiet", "--nodeps", "--target", "x86_64-redhat-linux"]
    for name, value in defines.items():
        command += ["--define", f"{name} {value}"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s), "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    done = subprocess.run(
        [*command, f"{work}/yunion-mps-daemon.spec"],
        check=False, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"package: rpmbuild failed:\n{done.stdout}")
    name = f"yunion-mps-daemon-{source.version}-1.x86_64.rpm"
    return shutil.copy(f"{work}/rpms/x86_64/{name}", output)


def _file_list(root: str) -> list[str]:
    """Every file, and the folders that are ours alone; what is configuration or text is marked as such."""
    lines = ["%dir /usr/lib/yunion-mps\n"]
    for folder, folders, names in os.walk(root):
        place = folder[len(root) :]
        if place.startswith(
            ("/usr/lib/yunion-mps/", "/usr/share/yunion-mps", "/usr/share/doc/yunion-mps-daemon")
        ):
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
