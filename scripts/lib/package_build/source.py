"""A copy of the checkout's sources, with their version and revision."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import NamedTuple


class Source(NamedTuple):
    """A copy of the sources: its directory, version, revision and time of the commit (seconds since 1970)."""

    directory: str
    version: str
    revision: str
    epoch_s: int

    def path(self, *names: str) -> str:
        """The path of a file of the sources."""
        return os.path.join(self.directory, *names)

    def read(self, *names: str) -> str:
        """The text of a file of the sources."""
        with open(self.path(*names), encoding="utf-8") as file:
            return file.read()


def take_source(checkout: str, directory: str) -> Source:
    """Copy the files of the checkout that git tracks or does not ignore, and add `_revision.py`.

    A checkout with changes that are not committed has `+changes` in its revision.
    """
    revision = _git(checkout, "rev-parse", "--short=12", "HEAD").strip()
    if _git(checkout, "status", "--porcelain"):
        revision += "+changes"
    epoch_s = int(_git(checkout, "log", "-1", "--format=%ct"))
    for name in _git(checkout, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        origin = os.path.join(checkout, name)
        if name and os.path.lexists(origin):
            place = os.path.join(directory, name)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            shutil.copyfile(origin, place, follow_symlinks=False)
            if not os.path.islink(place):
                os.chmod(place, 0o755 if os.access(origin, os.X_OK) else 0o644)
    source = Source(directory, "", revision, epoch_s)
    found = re.search(r'^__version__ = "(.+)"$', source.read("yunion_mps", "__init__.py"), re.M)
    if found is None:
        raise SystemExit("package: yunion_mps/__init__.py has no __version__")
    with open(source.path("yunion_mps", "_revision.py"), "w", encoding="utf-8") as file:
        file.write(f'"""Written by scripts/package."""\n\nREVISION = "{revision}"\n')
    return source._replace(version=found[1])


def _git(checkout: str, *arguments: str) -> str:
    command = ["git", "-C", checkout, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise SystemExit(f"package: version and revision are git's to tell, and it says: {why}")
    return done.stdout
