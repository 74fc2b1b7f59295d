"""The section FILES: the paths of `yunion_mps.paths` and of the keys' defaults, and what is in them."""

from __future__ import annotations

from yunion_mps.config import KEYS
from yunion_mps.paths import Paths

from manual.roff import Page
from manual.texts import texts


def add_files(made: Page, *names: str) -> None:
    """Add the section, with these of `files.yml`, or all."""
    about = texts("files")
    made.section("Files")
    for name in names or about:
        made.term(f"`{_path(name)}`", about[name])


def _path(name: str) -> str:
    if name.startswith("/"):
        return name
    return str(KEYS[name].default if name in KEYS else getattr(Paths(), name))
