"""Text as screens need it: bars, numbers on the right, durations, and what a terminal's line has room for."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from yunion_mps.cli.output import Row, cell

_UNITS_S = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_EIGHTHS = " ▏▎▍▌▋▊▉"


def is_utf8() -> bool:
    """Whether the locale is UTF-8, by the environment that this program was started with.

    Python itself takes the C locale for UTF-8, and changes the environment to say so (PEP 538, PEP 540).
    """
    from yunion_mps.host.proc import environment_of

    started_with = environment_of(os.getpid())
    names = (started_with.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    locale = next((name for name in names if name), "C")
    return "utf-8" in locale.lower() or "utf8" in locale.lower()


def bar(share: float, width: int, *, utf8: bool) -> str:
    """A bar of `width` columns for a share from 0 to 1; more than 1 is full. What is not nothing shows."""
    share = min(max(share, 0.0), 1.0)
    if not utf8:
        inner = max(width - 2, 0)
        full = max(int(share * inner + 0.5), 1 if share else 0)
        return f"[{'#' * full}{'-' * (inner - full)}]"[:width]
    eighths = max(int(share * width * 8 + 0.5), 1 if share else 0)
    full, part = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[part] if part else "")
    return drawn + "░" * (width - len(drawn))


def duration(seconds: float, parts: int = 2) -> str:
    """Seconds in the largest units: `3 d 4 h`, and of one part `3 d`."""
    left = max(0, int(seconds))
    found = []
    for size, name in _UNITS_S:
        if left >= size:
            found.append(f"{left // size} {name}")
            left %= size
    return " ".join(found[:parts]) or "0 s"


def right(header: Sequence[str], rows: Sequence[Row], names: Collection[str]) -> list[list[object]]:
    """The rows with the columns of these names padded, so that a table has their numbers on the right."""
    texts: list[list[object]] = [list(row) for row in rows]
    for place, name in enumerate(header):
        if name in names:
            width = max([len(name), *(len(cell(row[place])) for row in rows)])
            for row in texts:
                row[place] = cell(row[place]).rjust(width)
    return texts


def columns_of(text: str) -> int:
    """The columns that the text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_columns_of_one(one) for one in text)


def fit(text: str, width: int, *, utf8: bool = True, to_the_right: bool = False) -> str:
    """The text, cut or filled to so many columns."""
    text = cell(text)
    taken = columns_of(text)
    if taken > width:
        return _cut(text, width, "…" if utf8 else "~")
    space = " " * (width - taken)
    return space + text if to_the_right else text + space


def _cut(text: str, width: int, mark: str) -> str:
    kept, taken = "", 0
    for one in text:
        taken += _columns_of_one(one)
        if taken > width - 1:
            break
        kept += one
    return kept + mark + " " * (width - 1 - columns_of(kept)) if width > 0 else ""


def _columns_of_one(character: str) -> int:
    """Two for what is wide in East Asia, none for what combines with the one before (UAX #11)."""
    if character < "\u0300":
        return 1
    import unicodedata

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
