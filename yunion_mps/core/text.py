"""Text made safe to show.

Text from other processes, files and drivers is escaped once, where it is read. Outputs escape all text again,
which does not change what is escaped already.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence

#: Every number of so many digits fits into 64 bits.
_MAX_DIGITS = 18
_PIDS = re.compile(r"\bPIDs? \d+(, \d+)*(, \.\.\.)?")


def printable(text: str) -> str:
    """Return the text on one line, with line breaks, control characters, bidirectional marks etc. escaped.

    Letters of all languages are kept; printable text is not changed.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


def without_pids(text: str) -> str:
    """Return the text with `PID` for each PID or list of them, to compare what is said of processes."""
    return _PIDS.sub("PID", text)


def shell_word(text: str) -> str:
    r"""Quote the text as one word of a shell command (bash, ksh, zsh), on one line.

    Bytes that cannot be shown are written as `$'\x1b'`, so that the command means the same file.
    """
    if text.isprintable():
        return shlex.quote(text)
    word = ""
    for byte in os.fsencode(text):
        char = chr(byte)
        is_plain = char.isascii() and char.isprintable() and char not in "'\\"
        word += char if is_plain else f"\\x{byte:02x}"
    return f"$'{word}'"


def command_line(words: Sequence[str]) -> str:
    """Join a command's words; one that contains spaces is quoted, unless it is a process's title."""
    if len(words) > 1:
        words = [f"'{word}'" if " " in word else word for word in words]
    return printable(" ".join(words))


def decode_line(raw: bytes) -> str:
    """Decode bytes that should be UTF-8, onto one line."""
    return printable(raw.decode(errors="replace"))


def parse_number(text: str) -> int | None:
    """Return the number that is written as 1 to 18 ASCII digits; None for any other text.

    int() also accepts spaces, signs, underscores and digits of other scripts, and raises ValueError for
    thousands of digits; str.isdigit() accepts characters that int() refuses, such as superscripts.
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None


def count(number: int, name: str, names: str = "") -> str:
    """Return `1 GPU`, `2 GPUs`; `names` is the plural if it does not end in s."""
    if number == 1:
        return f"1 {name}"
    return f"{number} {names or name + 's'}"


def gpus_that_are(how: str, gpus: Sequence[str]) -> str:
    """Return `GPU 00:06.0, which is time-sliced`, or the same of several."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]}, which is {how}"
    return f"GPUs {', '.join(gpus)}, which are {how}"


def list_of(names: Iterable[str]) -> str:
    """Return `a`, `a and b` or `a, b and c`; empty without names."""
    listed = list(names)
    if len(listed) > 1:
        return f"{', '.join(listed[:-1])} and {listed[-1]}"
    return "".join(listed)
