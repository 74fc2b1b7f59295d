"""A machine's files: those of an image, with its own changes over them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def lay_over(image: Path, root: Path) -> None:
    """Let the image be seen at `root`, where all that is written stays apart from it.

    Where overlayfs cannot do that (in most containers), `root` is a copy.
    """
    parts = {name: root.with_name(f"{root.name}.{name}") for name in ("upper", "work")}
    for folder in (root, *parts.values()):
        folder.mkdir()
    options = f"lowerdir={image},upperdir={parts['upper']},workdir={parts['work']}"
    mounted = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", str(root)], capture_output=True
    )
    if mounted.returncode != 0:
        subprocess.run(["cp", "-a", "--reflink=auto", f"{image}/.", str(root)], check=True)


def take_off(root: Path) -> None:
    """Undo it; what was written is still to be removed."""
    if os.path.ismount(root):
        subprocess.run(["umount", "--recursive", "--lazy", str(root)], check=True)
