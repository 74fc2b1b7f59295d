"""Write docs/modules.md: what each module of the package is, by the summary of its docstring."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent.parent
PAGE = CHECKOUT / "docs/modules.md"
_PACKAGE = CHECKOUT / "yunion_mps"
_HEAD = """\
# All modules

After reading this page, you know which module of the package `yunion_mps` does what, by the first sentence of
its docstring; `scripts/modules` generates it. [architecture.md](architecture.md) explains how they work
together, and where decisions are made.
"""


def content() -> str:
    """Return the contents of the page."""
    text = _HEAD
    for directory in _packages():
        name = directory.relative_to(_PACKAGE).as_posix()
        title = "At the top" if name == "." else f"{name}/"
        about = _summary(directory / "__init__.py")
        text += f"\n## {title}\n\n{about}\n"
        rows = [
            f"| `{file.stem}` | {_summary(file)} |\n"
            for file in sorted(directory.glob("*.py"))
            if file.stem != "__init__"
        ]
        if rows:
            text += "\n| module | is |\n|---|---|\n" + "".join(rows)
    return text


def _packages() -> Iterator[Path]:
    for file in sorted(_PACKAGE.rglob("__init__.py")):
        yield file.parent


def _summary(file: Path) -> str:
    """Return the first paragraph of the module's docstring as one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = docstring.partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(content())
