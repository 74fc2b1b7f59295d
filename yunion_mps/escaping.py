"""Text of other processes, files and drivers, made safe to show.

It is escaped once, where it is read; outputs do it again to what they are given, which changes nothing then.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line: control characters, line ends, bidirectional marks and the like as escapes.

    Readable letters of every language stay as they are; what is printable already is not changed.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def decoded(raw: bytes) -> str:
    """Bytes that should be UTF-8, on one line."""
    return printable(raw.decode(errors="replace"))
