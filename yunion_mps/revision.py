"""Which sources these are; only --version asks, for finding it out takes reading files."""

from __future__ import annotations

import contextlib
import os

from yunion_mps import __version__


def version_line(program: str) -> str:
    """What --version says: `yunion-mps 0.1.0 (6c4fb29c1d2e)`."""
    return f"{program} {__version__} ({revision()})"


def revision() -> str:
    """The git revision: that which scripts/package wrote down, else that of the checkout, else `unknown`."""
    with contextlib.suppress(ImportError):
        from yunion_mps._revision import REVISION  # type: ignore[import-not-found,unused-ignore]

        return str(REVISION)
    git = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".git")
    head = _read(f"{git}/HEAD")
    if head.startswith("ref: "):
        reference = head[len("ref: ") :]
        packed = (line.split(" ") for line in _read(f"{git}/packed-refs").splitlines())
        head = _read(f"{git}/{reference}") or next((row[0] for row in packed if row[1:] == [reference]), "")
    return head[:12] or "unknown"


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
