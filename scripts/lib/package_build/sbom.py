"""The list of a package's bundled libraries (CycloneDX), which cyclonedx-py makes from their metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

from package_build.source import Source

NAME = "sbom.cdx.json"


def write_sbom(source: Source, package: str, libraries: str, packager: str, directory: str) -> None:
    """Write the list of the libraries that are unpacked in the directory `libraries` into `directory`.

    `packager` is the virtual environment with cyclonedx-py.
    """
    names = sorted(library.metadata["Name"] for library in distributions(path=[libraries]))
    # cyclonedx-py learns from a pyproject.toml what the list is about, and from a Python's sys.path where
    # the libraries are.
    about = os.path.join(directory, "pyproject.toml")
    with open(about, "w", encoding="utf-8") as file:
        file.write(
            f'[project]\nname = "{package}"\nversion = "{source.version}"\n'
            f'license = {{text = "Apache-2.0"}}\ndependencies = {names}\n'
        )
    command = [f"{packager}/bin/python", "-I", "-m", "cyclonedx_py", "environment", "-S", sys.executable]
    # Without the texts, a licence whose name is none of SPDX's would be left out.
    command += ["--gather-license-texts", "--output-reproducible", "--pyproject", about]
    command += ["--output-file", os.path.join(directory, NAME)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.path.abspath(libraries),
        "SOURCE_DATE_EPOCH": str(source.epoch_s),
    }
    subprocess.run(command, check=True, env=environment)
    os.unlink(about)
