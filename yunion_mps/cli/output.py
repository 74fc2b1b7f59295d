"""What commands print: an answer as a table for people, or as JSON, YAML or CSV for programs (`--output`).

Tables are drawn as Cloudpods' own command draws them: whole in a pipe, fitted to the width of a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import click

from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable
from yunion_mps.times import seconds

FORMATS = ("table", "json", "yaml", "csv")

#: Cells up to this length are never cut, longer ones (UUIDs, paths, reasons) down to the shorter one.
_SHORT_CELL = 20
_CUT_CELL = 12
_UNITS_S = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Row = Sequence[object]
F = TypeVar("F", bound=Callable[..., Any])


def output_option(function: F) -> F:
    """Give a command the option `--output`."""
    option = click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", metavar="FORMAT",
        help=f"Output format: {', '.join(FORMATS)}. Default: table.",
    )  # fmt: skip
    return option(function)


def fields(answer: Mapping[str, object], names: Iterable[str]) -> list[object]:
    """These fields of an answer, as a row."""
    return [answer[name] for name in names]


def show(
    value: Any, output: str, header: Sequence[str], rows: Sequence[Row], table: Callable[[], str]
) -> None:
    """Print `value` as JSON or YAML, the rows under their header as CSV, or what `table` makes."""
    if output == "json":
        text = as_json(value, indent=2) + "\n"
    elif output == "yaml":
        import yaml

        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        if not _is_printable(text):
            text = yaml.safe_dump(value, sort_keys=False)  # ASCII, with all else as YAML escapes it
    elif output == "csv":
        text = csv_rows([header, *rows])
    else:
        text = table()
    sys.stdout.write(text)


def show_pairs(value: Mapping[str, object], output: str, table: Callable[[], str] | None = None) -> None:
    """As `show`, for an answer that is one thing and no list."""
    header, rows = ("Field", "Value"), pairs(value)
    show(value, output, header, rows, table or (lambda: draw(header, rows)))


def as_json(value: object, **layout: Any) -> str:
    """The value as JSON without characters that control a terminal; only then is non-ASCII text escaped."""
    import json

    text = json.dumps(value, ensure_ascii=False, **layout)
    return text if _is_printable(text) else json.dumps(value, **layout)


def _is_printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def csv_rows(rows: Iterable[Row]) -> str:
    """The rows as CSV, without a header."""
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def cell(value: object) -> str:
    """A value as a cell: empty if unknown, JSON if it has parts, and without control characters."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if isinstance(value, (dict, list)):
        return as_json(value, separators=(",", ":"))
    return printable(str(value))


def pairs(value: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """A nested answer as (name, value) lines, the names joined by dots."""
    found: list[tuple[str, object]] = []
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            found += pairs(inner, f"{name}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            for index, item in enumerate(inner):
                found += pairs(item, f"{name}.{index}.")
        else:
            found.append((name, inner))
    return found


def draw(
    header: Sequence[str], rows: Sequence[Row], drop: Sequence[str] = (), numbers: Collection[str] = ()
) -> str:
    """A bordered table, with the cells of the columns of `numbers` on the right.

    On too narrow a terminal the columns of `drop` give way first, then long cells, then all of them.
    """
    width = terminal_size()[0]
    texts = [[cell(value) for value in row] for row in rows]
    columns = list(range(len(header)))
    widths = [max([len(name), *(columns_of(row[i]) for row in texts)]) for i, name in enumerate(header)]
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
    lines = [border, f"| {' | '.join(fit(header[i], widths[i]) for i in columns)} |", border]
    for row in texts:
        cells = [fit(row[i], widths[i], to_the_right=header[i] in numbers) for i in columns]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(border)
    if hidden:
        names = f"(no room for {', '.join(hidden)}: use -o csv)"
        few = f"(no room for {len(hidden)} columns: use -o csv)"
        lines.append(names if len(names) <= width else few)
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


def notes(entries: Iterable[tuple[str, str]]) -> str:
    """What is said of rows below their table, where it can be read whole: `name: text` lines."""
    return "".join(wrapped(f"{name}: {text}") for name, text in entries if text)


def wrapped(text: str, indent: int = 4, narrowest: int = 0) -> str:
    """One line; on too narrow a terminal several, broken between words, the later ones indented."""
    line, width = cell(text), terminal_size()[0]
    if not width or len(line) <= width:
        return f"{line}\n"
    import textwrap

    lines = textwrap.wrap(
        line, max(width, 2 * indent, narrowest), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def terminal_size() -> tuple[int, int]:
    """The columns and rows of the terminal on standard output, 0 and 0 if that is none."""
    if not sys.stdout.isatty():
        return 0, 0
    try:
        return os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 0, 0


@cache
def is_utf8() -> bool:
    """Whether the locale is UTF-8, by the environment that this program was started with.

    Python itself takes the C locale for UTF-8, and changes the environment to say so (PEP 538, PEP 540).
    """
    from yunion_mps.host.proc import environment_of

    started_with = environment_of(os.getpid())
    names = (started_with.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    locale = next((name for name in names if name), "C")
    return "utf-8" in locale.lower() or "utf8" in locale.lower()


def columns_of(text: str) -> int:
    """The columns that the text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns_of_one, text))


def _columns_of_one(character: str) -> int:
    """Two for what is wide in East Asia, none for what combines with the one before (UAX #11)."""
    if character < "\u0300":
        return 1
    import unicodedata

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, *, utf8: bool | None = None, to_the_right: bool = False) -> str:
    """The text, cut or filled to so many columns; `utf8` is that of the locale if it is not given."""
    text = cell(text)
    taken = columns_of(text)
    if taken <= width:
        space = " " * (width - taken)
        return space + text if to_the_right else text + space
    kept, taken = "", 0
    for one in text:
        taken += _columns_of_one(one)
        if taken > width - 1:
            break
        kept += one
    mark = "…" if (is_utf8() if utf8 is None else utf8) else "~"
    return kept + mark + " " * (width - 1 - columns_of(kept)) if width > 0 else ""


def duration(seconds: float, parts: int = 2) -> str:
    """Seconds in the largest units: `3 d 4 h`, and of one part `3 d`."""
    left = max(0, int(seconds))
    found = []
    for size, name in _UNITS_S:
        if left >= size:
            found.append(f"{left // size} {name}")
            left %= size
    return " ".join(found[:parts]) or "0 s"


def date_and_time(moment: str) -> str:
    """A time of the API as people read it, in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds(moment)))


def say(text: str) -> None:
    """Tell a person how it goes, beside the output."""
    if sys.stderr is not None:  # print would take standard output instead
        print(f"yunion-mps: {printable(text)}", file=sys.stderr, flush=True)


def refuse_closed_output() -> None:
    """Raise YunionError if nothing can be printed."""
    if sys.stdout is None:
        raise unwritable("standard output is closed")


def unwritable(why: str | None) -> YunionError:
    """The error for output that cannot be written."""
    return YunionError(f"the output cannot be written: {why}", "look at where it goes: df")
