"""What the packages have beside files of the sources: made or collected in the directory `stage` of these."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time

from package_build.bundle import ARCHITECTURES, OF_KUBELET_PLUGIN, put, unpack, wheels
from package_build.sbom import write_sbom
from package_build.source import Source

PACKAGES = ("yunion-mps-daemon", "yunion-mps-kubelet-plugin")


def stage(source: Source, wheel: str, cache: str, packager: str) -> None:
    """Write everything that packaging/*.yaml names below stage/.

    `wheel` is this project's; `packager` is the virtual environment with cyclonedx-py.
    """
    _stage_modules(source, wheel)
    for architecture in ARCHITECTURES:
        _stage_libraries(source, architecture, cache)
    _stage_generated(source)
    for package in PACKAGES:
        _stage_scripts(source, package)
        _stage_documents(source, package, packager)
    maintain = _with_included_parts(source, source.path("packaging/scriptlets/maintain.sh"))
    put(source.path("stage/maintain"), maintain.encode(), 0o755)
    put(source.path("stage/changelog.yaml"), changelog(source).encode())
    # nfpm takes the times of files and directories that are installed as a tree from these.
    for folder, _, names in os.walk(source.directory):
        for name in [*names, "."]:
            os.utime(os.path.join(folder, name), (source.epoch_s, source.epoch_s), follow_symlinks=False)


def maintainer(source: Source) -> str:
    """Return the maintainers' name and address, as pyproject.toml has them."""
    found = re.search(
        r'^maintainers = \[\{name = "(.+?)", email = "(.+?)"\}\]$', source.read("pyproject.toml"), re.M
    )
    if not found:
        raise SystemExit("package: pyproject.toml: maintainers: name and email are missing")
    return f"{found[1]} <{found[2]}>"


def documents(source: Source, package: str) -> str:
    """Return the directory of a package's documents."""
    return source.path("stage", package, "share/doc", package)


def libraries(source: Source, package: str, architecture: str) -> str:
    """Return the directory of the libraries that a package bundles."""
    name = "vendor-kubelet-plugin" if package == "yunion-mps-kubelet-plugin" else "vendor"
    return source.path("stage", architecture, name)


def changelog(source: Source) -> str:
    """Return the newest section of CHANGELOG.md in nfpm's format."""
    section = source.read("CHANGELOG.md").split("\n## ")[1]
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(source.epoch_s))
    lines = [
        f"- semver: {source.version}",
        f"  date: {date}",
        f"  packager: {maintainer(source)}",
        "  deb: {urgency: medium, distributions: [unstable]}",
        "  changes:",
    ]
    for point in section.split("\n- ")[1:]:
        lines.append(f"  - note: {json.dumps(' '.join(point.split()))}")
    return "\n".join([*lines, ""])


def _stage_modules(source: Source, wheel: str) -> None:
    """Unpack the project's own wheel, without its metadata, and the kubelet plugin's modules apart."""
    unpack(wheel, source.path("stage/wheel"))
    os.rename(source.path("stage/wheel/yunion_mps/kubernetes"), source.path("stage/kubernetes"))
    os.rename(source.path("stage/wheel/yunion_mps"), source.path("stage/yunion_mps"))
    shutil.rmtree(source.path("stage/wheel"))


def _stage_libraries(source: Source, architecture: str, cache: str) -> None:
    for library, wheel in wheels(source, architecture, cache).items():
        package = PACKAGES[library in OF_KUBELET_PLUGIN]
        unpack(wheel, libraries(source, package, architecture))


def _stage_generated(source: Source) -> None:
    """Write the man pages and shell completions, which are generated from the programs."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    command = [sys.executable, "-I", source.path("scripts/manual/__main__.py"), source.path("stage")]
    subprocess.run(command, check=True, env=environment)
    daemon, kubelet_plugin = PACKAGES
    for name in os.listdir(source.path("stage/man")):
        package = kubelet_plugin if name.startswith(kubelet_plugin) else daemon
        section = name.rpartition(".")[2]
        with open(source.path("stage/man", name), "rb") as file:
            page = _gzip(file.read())
        put(source.path("stage", package, f"share/man/man{section}/{name}.gz"), page)


def _gzip(data: bytes) -> bytes:
    """Compress data without a name or time; gzip.compress() writes other bytes in some versions of Python."""
    compressed = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, compressed, mtime=0) as file:
        file.write(data)
    return compressed.getvalue()


def _stage_documents(source: Source, package: str, packager: str) -> None:
    directory = documents(source, package)
    put(os.path.join(directory, "copyright"), source.read("packaging/copyright").encode())
    # Names and versions are the same for all architectures: they are those of the lock file.
    write_sbom(source, package, libraries(source, package, "amd64"), packager, directory)
    overrides = source.read("packaging", package, "lintian-overrides")
    put(source.path("stage", package, "share/lintian/overrides", package), overrides.encode())


def _stage_scripts(source: Source, package: str) -> None:
    """Write the package's scripts with the parts that they include."""
    directory = source.path("packaging", package)
    for name in os.listdir(directory):
        if name.endswith(".sh"):
            script = _with_included_parts(source, os.path.join(directory, name))
            put(source.path("stage", package, name), script.encode())


def _with_included_parts(source: Source, path: str) -> str:
    """Return a script with its lines `#INCLUDE name` replaced by packaging/scriptlets/name."""
    with open(path, encoding="utf-8") as file:
        script = file.read()

    def included(line: re.Match[str]) -> str:
        return source.read("packaging/scriptlets", line[1]).rstrip()

    return re.sub("^#INCLUDE (.+)$", included, script, flags=re.M)
