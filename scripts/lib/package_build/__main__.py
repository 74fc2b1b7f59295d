"""`scripts/package`: build all files of a release."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile

from package_build.formats import build_deb, build_rpm
from package_build.sbom import sbom
from package_build.source import Source, take_source
from package_build.tree import DEBIAN, FEDORA, PACKAGES, Made, Package, generate, stage
from package_build.vendor import bundled, bundled_in, relock

_LOCK = "requirements/package.lock"


def main() -> None:
    """Build, or rewrite the lock file."""
    parser = argparse.ArgumentParser(
        prog="scripts/package", description="Build all files of a release.", allow_abbrev=False
    )
    parser.add_argument(
        "--output", metavar="DIRECTORY", default="dist", help="output directory (default: %(default)s)"
    )
    parser.add_argument("--lock", action="store_true", help=f"rewrite {_LOCK}, after scripts/lock")
    parser.add_argument("--cache", default=".cache/package", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lock:
        relock("requirements/runtime.lock", _LOCK, options.cache)
        return
    missing = [program for program in ("git", "dpkg-deb", "rpmbuild") if shutil.which(program) is None]
    if missing:
        raise SystemExit(
            f"package: missing: {' '.join(missing)}\npackage: install them with: scripts/setup build"
        )
    os.umask(0o022)
    os.makedirs(options.output, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="yunion-mps-package.") as work:
        for path in build(os.getcwd(), options.cache, work, options.output):
            print(f"{os.path.getsize(path):>9} {path}")


def build(checkout: str, cache: str, work: str, output: str) -> list[str]:
    """Build everything into `output`; returns the paths."""
    source = take_source(checkout, os.path.join(work, "source"))
    bundle = bundled(_LOCK, cache)
    sdist, wheel = (_flit(source, kind, output) for kind in ("sdist", "wheel"))
    made = Made(wheel, bundle, os.path.join(work, "generated"))
    generate(source, made.generated)
    built = [_build_package(source, package, made, work, output) for package in PACKAGES]
    return [*(path for paths in built for path in paths), wheel, sdist]


def _build_package(source: Source, package: Package, made: Made, work: str, output: str) -> list[str]:
    """Build the deb, the rpm and the list of bundled libraries; returns the paths."""
    bill = sbom(source, package.name, bundled_in(package.name, made.bundle))
    listed = os.path.join(output, f"{package.name}-{source.version}.cdx.json")
    with open(listed, "w", encoding="utf-8") as file:
        file.write(bill)
    debian, fedora, rpm_work = (
        os.path.join(work, package.name, name) for name in ("debian", "fedora", "rpm")
    )
    stage(source, package, DEBIAN, made, bill, debian)
    stage(source, package, FEDORA, made, bill, fedora)
    os.mkdir(rpm_work)
    return [
        build_deb(source, package, debian, output),
        build_rpm(source, package, fedora, rpm_work, output),
        listed,
    ]


def _flit(source: Source, kind: str, output: str) -> str:
    """Build a wheel or an sdist by the project's own build backend."""
    code = f"import sys; from flit_core.buildapi import build_{kind} as build; print(build(sys.argv[1]))"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source.epoch_s)}
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.abspath(output)],
        check=True, cwd=source.directory, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    path = os.path.join(output, done.stdout.split()[-1])
    os.chmod(path, 0o644)  # flit creates wheels that only their owner can read
    return path


main()
