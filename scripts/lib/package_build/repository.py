"""A repository that apt and dnf can use as it is: a directory to copy to any web server.

Layout, with the same packages in both:

- `deb/`: for apt; the packages in `pool/`, their lists in `dists/stable/`
- `rpm/`: for dnf, yum and zypper; the packages, and their lists in `repodata/`
- `yunion-mps.asc`: the public key, if the lists are signed

The lists have the SHA-256 of each package, so that a signature of the lists also vouches for the packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path

#: Debian's names of the architectures for which packages are built.
_ARCHITECTURES = ("amd64", "arm64")
_SUITE = "stable"
_COMPONENT = "main"
_KEY = "yunion-mps.asc"


class Signer:
    """Signs files with a key of gpg's keyring; `key` is its fingerprint, or what else gpg finds it by."""

    def __init__(self, key: str) -> None:
        self._key = key

    def public_key(self) -> bytes:
        """Return the public key, armored, or exit if there is none."""
        key = _output(["gpg", "--batch", "--armor", "--export", self._key])
        if not key:
            raise SystemExit(
                f"package: --sign: gpg has no key {self._key}; list its keys: gpg --list-secret-keys"
            )
        return key

    def sign(self, path: Path, signature: Path, kind: str = "--detach-sign") -> None:
        """Write the armored signature of a file; `--clearsign` includes the file itself."""
        command = ["gpg", "--batch", "--yes", "--armor", "--local-user", self._key, "--digest-algo", "SHA256"]
        _output([*command, "--output", str(signature), kind, str(path)])


def write_repository(packages: Sequence[str], target: str, epoch_s: int, packager: str, key: str) -> None:
    """Write the repository of these deb and rpm files, in place of one from before.

    epoch_s: when its lists were made, in s since 1970, so that they are the same whenever they are built.
    packager: the virtual environment with createrepo_c.
    key: the gpg key that signs the lists; empty to leave them unsigned.
    """
    repository = Path(target)
    signer = Signer(key) if key else None
    public_key = signer.public_key() if signer else b""
    shutil.rmtree(repository, ignore_errors=True)
    repository.mkdir(parents=True)
    if signer:
        (repository / _KEY).write_bytes(public_key)
    _write_apt(repository / "deb", packages, epoch_s, signer)
    _write_dnf(repository / "rpm", packages, epoch_s, packager, signer)


def _write_apt(root: Path, packages: Sequence[str], epoch_s: int, signer: Signer | None) -> None:
    """Write the packages and their lists, in the format of Debian's archives.

    Source: wiki.debian.org/DebianRepository/Format.
    """
    _copy(packages, ".deb", root / "pool", epoch_s)
    suite = root / "dists" / _SUITE
    for architecture in _ARCHITECTURES:
        folder = suite / _COMPONENT / f"binary-{architecture}"
        folder.mkdir(parents=True)
        listed = _apt_ftparchive(["--arch", architecture, "packages", "pool"], root)
        (folder / "Packages").write_bytes(listed)
        subprocess.run(["xz", "--keep", "-6", folder / "Packages"], check=True)
    fields = {
        "Origin": "yunion-mps",
        "Label": "yunion-mps",
        "Suite": _SUITE,
        "Codename": _SUITE,
        "Architectures": " ".join(_ARCHITECTURES),
        "Components": _COMPONENT,
    }
    options = []
    for name, value in fields.items():
        options += ["-o", f"APT::FTPArchive::Release::{name}={value}"]
    release = suite / "Release"
    text = _apt_ftparchive([*options, "release", str(suite)], root)
    date = f"Date: {formatdate(epoch_s)}".encode()  # apt-ftparchive has no option for it
    release.write_bytes(re.sub(rb"^Date: .*$", date, text, flags=re.MULTILINE))
    if signer:
        signer.sign(release, suite / "InRelease", "--clearsign")
        signer.sign(release, suite / "Release.gpg")


def _apt_ftparchive(arguments: Sequence[str], root: Path) -> bytes:
    """Return what apt-ftparchive(1) prints, with SHA-256 and SHA-512 as the only hashes."""
    command = [
        "apt-ftparchive",
        "--quiet",
        "-o",
        "APT::FTPArchive::MD5=false",
        "-o",
        "APT::FTPArchive::SHA1=false",
    ]
    return _output([*command, *arguments], root)


def _write_dnf(
    root: Path, packages: Sequence[str], epoch_s: int, packager: str, signer: Signer | None
) -> None:
    """Write the packages and their lists; compressed by gzip, which dnf of RHEL 8 can read, too."""
    _copy(packages, ".rpm", root, epoch_s)
    command = [f"{packager}/bin/createrepo_c", "--quiet", "--no-database", "--general-compress-type", "gz"]
    command += ["--revision", str(epoch_s), "--set-timestamp-to-revision", str(root)]
    _output(command)
    if signer:
        lists = root / "repodata/repomd.xml"
        signer.sign(lists, lists.with_suffix(".xml.asc"))


def _copy(packages: Sequence[str], suffix: str, folder: Path, epoch_s: int) -> None:
    folder.mkdir(parents=True)
    for package in packages:
        if package.endswith(suffix):
            copied = shutil.copy(package, folder)
            os.utime(copied, (epoch_s, epoch_s))  # which the lists for dnf contain


def _output(command: Sequence[str], folder: Path | None = None) -> bytes:
    """Return what the program prints, or exit with what it says is wrong."""
    result = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"package: {command[0]} failed:\n{result.stderr.decode(errors='replace')}")
    return result.stdout
