"""Documents in Markdown, as the tests read them: their blocks of code and their paragraphs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_FENCE = re.compile(r"^( *)```(.*)$")
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ")


class CodeBlock(NamedTuple):
    """A fenced block: the number of its first line, and its text without the fences and their indentation."""

    line: int
    language: str
    text: str


class Paragraph(NamedTuple):
    """A paragraph of prose, or one item of a list. `line` is the number of its first line."""

    line: int
    lines: list[str]


def code_blocks(page: str) -> list[CodeBlock]:
    """Return the page's fenced blocks in their order."""
    blocks = []
    opening: re.Match[str] | None = None
    start = 0
    inside: list[str] = []
    for number, line in enumerate(page.splitlines(), 1):
        fence = _FENCE.match(line)
        if opening is None and fence:
            opening = fence
            start = number
            inside = []
        elif opening is not None and fence:
            blocks.append(CodeBlock(start, opening[2], "\n".join(inside)))
            opening = None
        elif opening is not None:
            inside.append(line[len(opening[1]) :])
    return blocks


def blocks_of(page: str, language: str) -> list[str]:
    """Return the text of each fenced block in this language."""
    return [block.text for block in code_blocks(page) if block.language == language]


def without_code(page: str) -> list[str]:
    """Return the page's lines; those of fenced blocks, with their fences, are empty."""
    lines = []
    fenced = False
    for line in page.splitlines():
        is_fence = _FENCE.match(line) is not None
        lines.append("" if fenced or is_fence else line)
        fenced = fenced != is_fence
    return lines


def paragraphs(page: str) -> Iterator[Paragraph]:
    """Yield the page's prose: no code, no headings, and no rows of tables."""
    current: list[str] = []
    start = 0
    for number, line in enumerate([*without_code(page), ""], 1):
        is_prose = bool(line.strip()) and not re.match(r" *(?:#|\||<!--)", line)
        if current and (not is_prose or _ITEM.match(line)):
            yield Paragraph(start, current)
            current = []
        if is_prose:
            start = start if current else number
            current.append(line)
