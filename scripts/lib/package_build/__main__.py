"""`scripts/package`: build all files of a release."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

from package_build import sbom
from package_build.bundle import ARCHITECTURES
from package_build.repository import Signer, write_repository
from package_build.source import Source, take_source
from package_build.stage import PACKAGES, documents, maintainer, stage


def main() -> None:
    """Build everything into the output directory, and print what was written."""
    parser = argparse.ArgumentParser(
        prog="scripts/package", description="Build all files of a release.", allow_abbrev=False
    )
    parser.add_argument(
        "--output", metavar="DIRECTORY", default="dist", help="output directory (default: %(default)s)"
    )
    parser.add_argument(
        "--sign", metavar="KEY", default="", help="sign the repository with this key of gpg's keyring"
    )
    parser.add_argument("--cache", default=".cache/package", help=argparse.SUPPRESS)
    parser.add_argument("--packager", default=".packager", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sign:  # an unknown key is an error before all is built
        Signer(options.sign).public_key()
    os.umask(0o022)
    output, cache, packager = (
        os.path.abspath(path) for path in (options.output, options.cache, options.packager)
    )
    os.makedirs(output, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="yunion-mps-package.") as work:
        source = take_source(os.getcwd(), os.path.join(work, "source"))
        built = build(source, cache, packager, output)
        repository = os.path.join(output, "repository")
        write_repository(built, repository, source.epoch_s, packager, options.sign)
    sums = os.path.join(output, "SHA256SUMS")
    with open(sums, "w", encoding="utf-8") as file:
        for path in sorted(built):
            file.write(f"{_sha256(path)}  {os.path.basename(path)}\n")
    for path in [*sorted(built), sums]:
        print(f"{os.path.getsize(path):>9} {os.path.relpath(path)}")
    print(f"{os.path.relpath(repository)}: for apt and dnf, {'signed' if options.sign else 'not signed'}")


def build(source: Source, cache: str, packager: str, output: str) -> list[str]:
    """Build everything but the checksums into `output`; returns the paths."""
    sdist = _flit(source, "sdist", output)
    wheel = _flit(source, "wheel", output)
    built = [sdist, wheel]
    stage(source, wheel, cache, packager)
    for package in PACKAGES:
        listed = os.path.join(output, f"{package}-{source.version}.cdx.json")
        built.append(shutil.copyfile(os.path.join(documents(source, package), sbom.NAME), listed))
        for architecture in ARCHITECTURES:
            for kind in ("deb", "rpm"):
                built.append(_nfpm(source, package, architecture, kind, packager, output))
    return built


def _nfpm(source: Source, package: str, architecture: str, kind: str, packager: str, output: str) -> str:
    """Build a deb or an rpm as packaging/PACKAGE.yaml says; returns its path."""
    with tempfile.TemporaryDirectory(dir=output) as target:
        environment = {
            **os.environ,
            "ARCHITECTURE": architecture,
            "MAINTAINER": maintainer(source),
            "SOURCE_DATE_EPOCH": str(source.epoch_s),
            "TZ": "UTC",
            "VERSION": source.version,
        }
        command = [f"{packager}/bin/nfpm", "package", "--config", f"packaging/{package}.yaml"]
        command += ["--packager", kind, "--target", target]
        done = subprocess.run(
            command, check=False, cwd=source.directory, env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"package: nfpm failed:\n{done.stdout}{done.stderr}")
        (name,) = os.listdir(target)
        path = os.path.join(output, name)
        os.replace(os.path.join(target, name), path)
    return path


def _flit(source: Source, kind: str, output: str) -> str:
    """Build a wheel or an sdist by the project's own build backend; returns its path."""
    code = f"import sys; from flit_core.buildapi import build_{kind} as build; print(build(sys.argv[1]))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    done = subprocess.run(
        [sys.executable, "-c", code, output],
        check=True, cwd=source.directory, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    path = os.path.join(output, done.stdout.split()[-1])
    os.chmod(path, 0o644)  # flit creates wheels that only their owner can read
    return path


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


main()
