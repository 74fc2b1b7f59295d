"""A man page in those macros of man(7) that both groff and mandoc support."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

from yunion_mps import __version__

#: What would be read as something else, or shown as a typographer's sign that cannot be copied.
_ESCAPES = {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti", '"': r"\(dq"}
#: mandoc calls longer lines bad style.
_MAX_LINE = 76


class Page:
    """A page to which sections are added; `str` returns its source.

    In paragraphs, what stands between backquotes is shown bold.
    """

    def __init__(self, name: str, section: int, date: str, title: str) -> None:
        """`title` is what the page is about, in half a line."""
        kind = {1: "User Commands", 5: "File Formats", 8: "System Administration"}[section]
        # The longest name would not fit into the header and the footer.
        head = name.replace("yunion-mps-host", "host").upper()
        # Do not hyphenate or justify text, because it is copied. groff's macros restore HY after each
        # paragraph, and AD from 1.23 on.
        self._lines = [
            ".nr HY 0",
            ".ds AD l",
            f'.TH "{escaped(head)}" {section} {date} "yunion\\-mps {__version__}" "{kind}"',
            ".nh",
            ".ad l",
        ]
        self.section("Name")
        self._lines.append(f"{escaped(name)} \\- {escaped(title)}")

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def section(self, title: str) -> None:
        self._lines.append(f".SH {escaped(title.upper())}")
        self._fresh = True

    def subsection(self, title: str) -> None:
        self._lines.append(f'.SS "{escaped(title)}"')
        self._fresh = True

    def paragraph(self, text: str) -> None:
        """Add a paragraph, filled to the width of the page."""
        self._apart()
        self._fill(text)

    def verbatim(self, lines: Iterable[str]) -> None:
        """Add lines that stay as they are: commands, files."""
        self._apart()
        self._lines += [".EX", *(_line(escaped(line)) for line in lines), ".EE"]
        self._fresh = False

    def term(self, tag: str, *paragraphs: str) -> None:
        self._lines += [".TP", _line(marked(tag))]
        self._fill(paragraphs[0])
        for text in paragraphs[1:]:
            self._lines.append(".IP")
            self._fill(text)

    def synopsis(self, name: str, words: str) -> None:
        self._apart()
        self._lines.append(_line(f"\\fB{escaped(name)}\\fR {escaped(words)}".rstrip()))

    def see_also(self, pages: Sequence[str]) -> None:
        """Add the last section: names of pages, as `name(section)`."""
        self.section("See also")
        found = [re.fullmatch(r"(.+)\((\d)\)", page) for page in pages]
        self._lines += [
            f".BR {escaped(one[1])} ({one[2]}){',' if one is not found[-1] else ''}" for one in found if one
        ]

    def _apart(self) -> None:
        """Add space before the next paragraph, except after a title, which has its own."""
        if not self._fresh:
            self._lines.append(".PP")
        self._fresh = False

    def _fill(self, text: str) -> None:
        self._fresh = False
        lines = wrap(marked(text), _MAX_LINE, break_long_words=False, break_on_hyphens=False)
        # Without this mark, the end of a sentence at the end of a line is followed by two spaces.
        self._lines += [_line(line) + ("\\&" if line.endswith((".", "?", "!")) else "") for line in lines]


def escaped(text: str) -> str:
    """Escape `text`."""
    return "".join(
        _ESCAPES.get(char) or (char if char.isascii() else f"\\[u{ord(char):04X}]") for char in text
    )


def marked(text: str) -> str:
    """Escape `text`, and make what is between backquotes bold."""
    parts = text.split("`")
    return "".join(
        f"\\fB{escaped(part)}\\fR" if number % 2 else escaped(part) for number, part in enumerate(parts)
    )


def _line(text: str) -> str:
    """Escape a line of the source, because a line that begins with a dot would be a macro."""
    return "\\&" + text if text.startswith(".") else text
