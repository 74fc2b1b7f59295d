"""The build: the same each time, from what the lock file names, with a list of what is bundled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from yunion_mps import __version__

from packages.versions import build, copy_checkout

from .conftest import DAEMON, KUBELET_PLUGIN, ROOT, Built, run

VENDOR = "/usr/lib/yunion-mps/vendor/"


@pytest.fixture(scope="module")
def sboms(built: Built, plugin: Built) -> list[Any]:
    """The lists of both packages."""
    return [json.loads(one.sbom.read_text()) for one in (built, plugin)]


def pins(name: str) -> dict[str, tuple[str, list[str]]]:
    """Name, version and hashes of a lock file's entries."""
    text = (ROOT / "requirements" / name).read_text()
    entries = re.findall(r"^(\S+)==(\S+).*((?:\\\n +--hash=\S+ ?)+)", text, re.M)
    return {package: (version, re.findall(r"sha256:(\w+)", rest)) for package, version, rest in entries}


def test_two_builds_are_identical(built: Built, tmp_path: Path) -> None:
    """The second is of a copy in another place, by another user's habits, at another time of its files."""
    copy, again, scratch = (tmp_path / name for name in ("another place", "dist", "scratch"))
    copy_checkout(copy)
    for path in copy.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    scratch.mkdir()
    before = os.umask(0o077)
    try:
        build(copy, again, {
            "TMPDIR": str(scratch), "TZ": "Pacific/Chatham", "LC_ALL": "C", "PYTHONHASHSEED": "7",
            "COLUMNS": "40", "YUNION_MPS_LOG_LEVEL": "debug", "YUNION_MPS_ROOT": "/x",
        })  # fmt: skip
    finally:
        os.umask(before)
    changes = run("git", "-C", ROOT, "status", "--porcelain")
    since = f"files that are not committed may have changed since the first build:\n{changes}"
    assert hashes(again) == hashes(built.directory), since if changes else "the copy's place, time or user"
    assert list(scratch.iterdir()) == []
    assert {path.stat().st_mode & 0o777 for path in built.directory.iterdir()} == {0o644}


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_lock_file_names_one_file_of_each_dependency() -> None:
    runtime = pins("runtime.lock")
    bundled = pins("package.lock")
    assert set(bundled) == set(runtime) - {"colorama"}  # which is for Windows
    for name, (version, digests) in bundled.items():
        assert version == runtime[name][0]
        assert len(digests) == 1
        assert digests[0] in runtime[name][1]


def test_the_lists_of_bundled_libraries_match_the_lock_file(sboms: list[Any]) -> None:
    each = [one for sbom in sboms for one in sbom["components"]]
    listed = {one["name"]: (one["version"], [one["hashes"][0]["content"]]) for one in each}
    assert listed == pins("package.lock")
    assert len(each) == len(listed)
    assert {sbom["metadata"]["component"]["version"] for sbom in sboms} == {__version__}


def test_every_bundled_file_is_listed_with_its_hash(sboms: list[Any], unpacked: Path) -> None:
    listed = {
        file["name"]: file["hashes"][0]["content"]
        for sbom in sboms
        for one in sbom["components"]
        for file in one["components"]
    }
    installed = {
        f"/{path.relative_to(unpacked)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in unpacked.rglob("*")
        if path.is_file() and f"/{path.relative_to(unpacked)}".startswith(VENDOR)
    }
    assert installed
    assert listed == installed


def test_the_installed_list_is_the_published_one(each: Built, unpacked: Path) -> None:
    installed = unpacked / f"usr/share/doc/{each.package}/sbom.cdx.json"
    assert installed.read_bytes() == each.sbom.read_bytes()
    assert json.loads(each.sbom.read_text())["metadata"]["component"]["name"] == each.package


def test_the_lists_have_the_fields_that_cyclonedx_requires(sboms: list[Any]) -> None:
    for sbom in sboms:
        assert (sbom["bomFormat"], sbom["specVersion"], sbom["version"]) == ("CycloneDX", "1.5", 1)
        assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", sbom["serialNumber"])
        references = [one["bom-ref"] for one in sbom["components"]]
        assert len(set(references)) == len(references)
        assert sbom["dependencies"][0]["dependsOn"] == references
        for one in sbom["components"]:
            assert one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"
            assert one["licenses"][0]["license"]["id"] in ("Apache-2.0", "BSD-3-Clause", "MIT")


def test_the_licence_of_every_bundled_module_is_installed(unpacked: Path) -> None:
    told, of_plugin = (
        (unpacked / f"usr/share/doc/{name}/copyright").read_text() for name in (DAEMON, KUBELET_PLUGIN)
    )
    assert told == of_plugin
    for path in (unpacked / VENDOR[1:]).iterdir():
        assert f"Files: vendor/{path.name}{'/*' if path.is_dir() else ''}\n" in told


def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    run("tar", "-C", tmp_path, "-xf", built.sdist)
    (source,) = tmp_path.iterdir()
    code = "from flit_core.buildapi import build_wheel; build_wheel('dist')"
    (source / "dist").mkdir()
    epoch_s = run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch_s}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=source, env=environment)
    (wheel,) = (source / "dist").iterdir()
    assert wheel.read_bytes() == built.wheel.read_bytes()


def test_building_outside_a_checkout_fails_with_one_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts/lib", tmp_path / "scripts/lib")
    above = {"PYTHONPATH": str(tmp_path / "scripts/lib"), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "package_build"],
        cwd=tmp_path, check=False, capture_output=True, text=True, env={**os.environ, **above},
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("package: ")
