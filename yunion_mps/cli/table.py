"""Tables as Cloudpods' own command draws them: whole when piped, fitted to the width of a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from yunion_mps.cli.output import Row, cell

#: Cells up to this length are never cut, longer ones (UUIDs, paths, reasons) down to the shorter one.
_SHORT_CELL = 20
_CUT_CELL = 12


def terminal_width() -> int:
    """The columns of the terminal on standard output, 0 where that is none."""
    return _terminal_size()[0]


def terminal_rows() -> int:
    """Its rows, 0 where it is none."""
    return _terminal_size()[1]


def _terminal_size() -> tuple[int, int]:
    if not sys.stdout.isatty():
        return 0, 0
    try:
        return os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 0, 0


def draw(header: Sequence[str], rows: Sequence[Row], drop: Sequence[str] = ()) -> str:
    """A bordered table.

    Where the terminal is too narrow, the columns of `drop` give way, then long cells, then all of them.
    """
    width = terminal_width()
    texts = [[cell(value) for value in row] for row in rows]
    columns = list(range(len(header)))
    widths = [max([len(name), *(len(row[i]) for row in texts)]) for i, name in enumerate(header)]
    hidden = []
    for name in drop:
        least = sum(_least(header[i], widths[i]) + 3 for i in columns) + 1
        if not width or least <= width:
            break
        index = header.index(name)
        if index in columns:
            columns.remove(index)
            hidden.append(name)
    if width:
        _shrink(widths, {i: _least(header[i], widths[i]) for i in columns}, width)
        _shrink(widths, dict.fromkeys(columns, 1), width)
    border = "+" + "+".join("-" * (widths[i] + 2) for i in columns) + "+"
    lines = [border, _line(header, columns, widths), border]
    lines += [_line(row, columns, widths) for row in texts]
    lines.append(border)
    if hidden:
        names = f"(no room for {', '.join(hidden)}: use -o csv)"
        few = f"(no room for {len(hidden)} columns: use -o csv)"
        lines.append(names if len(names) <= width else few)
    return "\n".join(lines) + "\n"


def notes(entries: Iterable[tuple[str, str]]) -> str:
    """What is said of rows below their table, where it can be read whole: `name: text` lines."""
    return "".join(wrapped(f"{name}: {text}") for name, text in entries if text)


def wrapped(text: str, indent: int = 4) -> str:
    """One line; on too narrow a terminal several, broken between words, the later ones indented."""
    line, width = cell(text), terminal_width()
    if not width or len(line) <= width:
        return f"{line}\n"
    import textwrap

    begin = " " * indent
    lines = textwrap.wrap(
        line, max(width, 2 * indent), subsequent_indent=begin, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _shrink(widths: list[int], least: Mapping[int, int], width: int) -> None:
    """Take from the widest column of `least` until all fit, or none can give more."""
    while sum(widths[i] + 3 for i in least) + 1 > width:
        able = [i for i in least if widths[i] > least[i]]
        if not able:
            return
        widths[max(able, key=lambda i: widths[i])] -= 1


def _least(name: str, width: int) -> int:
    return width if width <= _SHORT_CELL else max(len(name), _CUT_CELL)


def _line(row: Sequence[str], columns: Sequence[int], widths: Sequence[int]) -> str:
    return "| " + " | ".join(_fit(row[i], widths[i]) for i in columns) + " |"


def _fit(text: str, width: int) -> str:
    if len(text) <= width:
        return text.ljust(width)
    from yunion_mps.cli.screen.text import is_utf8

    return text[: width - 1] + ("…" if is_utf8() else "~")
