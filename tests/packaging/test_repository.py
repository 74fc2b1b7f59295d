"""The repository in dist/, as apt and dnf read it; tests/packages installs from it."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest
from package_build.repository import write_repository

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


def test_a_key_that_gpg_does_not_have_is_an_error(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gnupg").mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(tmp_path / "gnupg"))
    key, target = "nobody@yunion.example", str(tmp_path / "new")
    with pytest.raises(SystemExit, match=rf"gpg has no key {key}; list its keys"):
        write_repository([str(built.deb)], target, 0, str(ROOT / ".packager"), key)
    assert not (tmp_path / "new").exists()
