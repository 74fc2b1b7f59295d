"""The repository in dist/, as apt and dnf read it; tests/packages installs from it."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ARCHITECTURES, ROOT, Built, run


@pytest.fixture
def repository(built: Built) -> Path:
    return built.directory / "repository"


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_lists_for_apt_have_each_deb_of_the_processor(repository: Path, architecture: str) -> None:
    suite = repository / "deb/dists/stable"
    listed = suite / f"main/binary-{architecture}/Packages"
    files = re.findall(r"^Filename: (.+)\n(?:.+\n)*?SHA256: (\w+)$", listed.read_text(), re.MULTILINE)
    debs = repository.glob(f"deb/pool/*_{architecture}.deb")
    assert len(files) == 2
    assert dict(files) == {str(deb.relative_to(repository / "deb")): sha256_of(deb) for deb in debs}
    assert run("xz", "--decompress", "--stdout", f"{listed}.xz") == listed.read_text()
    release = (suite / "Release").read_text()
    for name in ("Packages", "Packages.xz"):
        path = f"main/binary-{architecture}/{name}"
        assert re.search(rf"^ {sha256_of(suite / path)} +\d+ {path}$", release, re.MULTILINE), path


def test_the_lists_for_dnf_have_each_rpm(repository: Path) -> None:
    (primary,) = repository.glob("rpm/repodata/*-primary.xml.gz")
    text = gzip.decompress(primary.read_bytes()).decode()
    assert sha256_of(primary) in (repository / "rpm/repodata/repomd.xml").read_text()
    rpms = list(repository.glob("rpm/*.rpm"))
    assert len(rpms) == 2 * len(ARCHITECTURES)
    listed = re.findall(r'<checksum type="sha256" pkgid="YES">(\w+)</checksum>', text)
    assert sorted(listed) == sorted(sha256_of(rpm) for rpm in rpms)


def test_a_key_that_gpg_does_not_have_is_an_error_before_the_build(tmp_path: Path) -> None:
    (tmp_path / "gnupg").mkdir(mode=0o700)
    environment = {**os.environ, "GNUPGHOME": str(tmp_path / "gnupg"), "PYTHONPATH": "scripts/lib"}
    command = [sys.executable, "-m", "package_build", "--output", str(tmp_path / "dist")]
    result = subprocess.run(
        [*command, "--sign", "nobody@yunion.example"],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    message = "package: --sign: gpg has no key nobody@yunion.example; list its keys: gpg --list-secret-keys\n"
    assert (result.returncode, result.stderr) == (1, message)
    assert not (tmp_path / "dist").exists()
