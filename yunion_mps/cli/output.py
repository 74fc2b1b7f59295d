"""Output of commands: a table for people, or JSON, YAML or CSV for programs (`--output`).

Tables are complete in a pipe, and fitted to the width of a terminal.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, Union

import click

from yunion_mps.core.errors import YunionError
from yunion_mps.core.text import printable
from yunion_mps.core.units import seconds

FORMATS = ("table", "json", "yaml", "csv")

#: What a clause of a hint begins with if all of it is a command.
_PROGRAMS = "chmod docker dmesg echo journalctl kubectl mount nvidia-smi systemctl yunion-mps"
#: A setting or a command in a hint: `key: value`, what is in parentheses, what follows a colon, a clause.
_COMMAND = re.compile(
    rf"\w+_\w+: \S+|\([^)]*\)|(?<=: )[^;]+|(?:^|(?<=; ))(?:{_PROGRAMS.replace(' ', '|')}) [^;]+"
)
#: Spaces between the columns of a table without borders.
_GAP = 2
#: Stands for a space at which no line is broken; no text has it once it is printable.
_KEPT_SPACE = "\0"

F = TypeVar("F", bound=Callable[..., Any])


#: A record's value in a column: its key in the record, or a function of the record.
ColumnValue = Union[str, int, Callable[[Any], object]]


class Column(NamedTuple):
    """A column of a table.

    If the terminal is too narrow, cells are cut, the longest first. If that is not enough, `short` replaces
    `value`, and then columns are omitted.
    """

    header: str
    value: ColumnValue
    #: Right-aligned.
    numeric: bool = False
    #: The width below which cells are not cut; with 0, they are never cut.
    least: int = 0
    #: The column may be omitted, the highest number first; 0: never.
    drop: int = 0
    #: Shown only with `-o wide`.
    wide: bool = False
    short: ColumnValue | None = None


def output_option(function: F, formats: Sequence[str] = FORMATS) -> F:
    """Add the option `--output` to a command."""
    option = click.option(
        "-o", "--output", type=click.Choice(formats), default="table", metavar="FORMAT",
        help=f"Output format: {', '.join(formats)}. Default: table.",
    )  # fmt: skip
    return option(function)


def wide_output_option(function: F) -> F:
    """Add the option `--output` with the format `wide`: a table with all columns."""
    return output_option(function, (FORMATS[0], "wide", *FORMATS[1:]))


def show(
    value: Any,
    output: str,
    header: Sequence[str],
    records: Sequence[Mapping[str, object] | Sequence[object]],
    table: Callable[[], str],
) -> None:
    """Print an answer in the format `output`.

    value: what JSON and YAML show.
    header: the names of the fields that CSV shows of each record.
    records: a record that is a sequence has its fields in the order of the header.
    table: returns what people are shown.
    """
    if output == "json":
        text = as_json(value, indent=2) + "\n"
    elif output == "yaml":
        import yaml  # 9 ms, which the other formats need not pay

        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        if not _is_printable(text):
            text = yaml.safe_dump(value, sort_keys=False)  # ASCII, with all other characters escaped
    elif output == "csv":
        text = csv_rows([header, *(_in_order(record, header) for record in records)])
    else:
        text = table()
    sys.stdout.write(text)


def _in_order(record: Mapping[str, object] | Sequence[object], header: Sequence[str]) -> Sequence[object]:
    return [record[name] for name in header] if isinstance(record, Mapping) else record


def show_pairs(value: Mapping[str, object], output: str, table: Callable[[], str]) -> None:
    """Print an answer that is a single object, as `show` prints a list."""
    show(value, output, ("field", "value"), pairs(value), table)


def as_json(value: object, **layout: Any) -> str:
    """Format the value as JSON; non-ASCII text is escaped only if it contains control characters."""
    text = json.dumps(value, ensure_ascii=False, **layout)
    return text if _is_printable(text) else json.dumps(value, **layout)


def _is_printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def csv_rows(rows: Iterable[Sequence[object]]) -> str:
    """Format the rows as CSV, without a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([cell(value) for value in row])
    return text.getvalue()


def cell(value: object) -> str:
    """Format a value without control characters: "" for None, strings with commas, nested values as JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return printable(",".join(value))
    if isinstance(value, (dict, list)):
        return as_json(value, separators=(",", ":"))
    return printable(str(value))


def pairs(value: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Flatten a nested answer into (name, value) pairs, with the names joined by dots."""
    flat: list[tuple[str, object]] = []
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            flat += pairs(inner, f"{name}.")
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            for index, item in enumerate(inner):
                flat += pairs(item, f"{name}.{index}.")
        else:
            flat.append((name, inner))
    return flat


def table(
    columns: Iterable[Column],
    records: Sequence[Any],
    *,
    none: str = "",
    wide: bool = False,
    boxed: bool = False,
) -> str:
    """Format the records under the columns' headers.

    none: the text if there are no records.
    wide: show all columns in full, whatever the terminal's width.
    boxed: the same with borders, and without the wide columns; unknown values are empty instead of dashes.
    """
    if none and not records:
        return wrapped(none)
    unknown = "" if boxed else "-"
    width = 0 if wide or boxed else terminal_size()[0]
    cells: dict[Column, list[str]] = {}
    for column in columns:
        if wide or not column.wide:
            cells[column] = _cell_texts(column.value, records, unknown)
    if width and _total_width(_min_widths(_widths(cells))) > width:
        for column in cells:
            if column.short is not None:
                cells[column] = _cell_texts(column.short, records, unknown)
    widths = _widths(cells)
    if width:
        _narrow(widths, width)
    rows = [_fitted_row([column.header for column in widths], widths)]
    for index in range(len(records)):
        rows.append(_fitted_row([cells[column][index] for column in widths], widths))
    lines = _boxed(rows) if boxed else [(" " * _GAP).join(row).rstrip() for row in rows]
    hidden = [column.header for column in cells if column not in widths]
    if hidden:
        lines.append(hidden_columns(hidden, "-o csv", width))
    return "\n".join(lines) + "\n"


def _cell_texts(value: ColumnValue, records: Sequence[Any], unknown: str) -> list[str]:
    return [_cell_text(value, record) or unknown for record in records]


def _fitted_row(texts: Sequence[str], widths: Mapping[Column, int]) -> list[str]:
    fitted: list[str] = []
    for text, (column, width) in zip(texts, widths.items()):
        fitted.append(fit(text, width, right_aligned=column.numeric))
    return fitted


def _boxed(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with borders, whose first row is its header."""
    border = "+" + "+".join("-" * (len(text) + 2) for text in rows[0]) + "+"
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return [border, header, border, *lines, border]


def hidden_columns(headers: Sequence[str], all_of_them: str, width: int) -> str:
    """Name the columns that do not fit, or only count them; the words `all_of_them` show them."""
    names = f"(hidden: {', '.join(headers)}; show all: {all_of_them})"
    return names if len(names) <= width else f"({len(headers)} columns hidden; show all: {all_of_them})"


def _cell_text(value: ColumnValue, record: Any) -> str:
    content = value(record) if callable(value) else record[value]
    if isinstance(content, bool):
        return "yes" if content else "no"
    return cell(content)


def _widths(cells: Mapping[Column, Sequence[str]]) -> dict[Column, int]:
    widths: dict[Column, int] = {}
    for column, texts in cells.items():
        widths[column] = max(map(display_width, (column.header, *texts)))
    return widths


def _total_width(widths: Mapping[Column, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _min_widths(widths: Mapping[Column, int]) -> dict[Column, int]:
    least: dict[Column, int] = {}
    for column, width in widths.items():
        least[column] = width
        if column.least:
            least[column] = min(width, max(column.least, display_width(column.header)))
    return least


def _narrow(widths: dict[Column, int], width: int) -> None:
    """Omit columns and cut others until they fit, or nothing more can be done."""
    least = _min_widths(widths)
    for column in sorted(widths, key=lambda column: -column.drop):
        if not column.drop or _total_width(least) <= width:
            break
        del widths[column]
        del least[column]
    while _total_width(widths) > width:
        able = [column for column in widths if widths[column] > least[column]]
        if not able:
            break
        widths[max(able, key=lambda column: widths[column])] -= 1


def notes(entries: Iterable[tuple[str, str]]) -> str:
    """Format `name: text` lines below a table, for texts that are too long for a column."""
    return "".join(wrapped(f"{name}: {text}") for name, text in entries if text)


def incomplete_note(errors: Iterable[str]) -> str:
    """Format a line for each reason why an answer is incomplete."""
    return "".join(wrapped(f"Incomplete: {error}") for error in errors)


def wrapped(text: str, indent: int = 4, min_width: int = 0) -> str:
    """Format a line, wrapped between words and indented if the terminal is too narrow."""
    return _wrapped(cell(text), indent, min_width)


def hint_text(hint: str, begin: str = "Hint: ", indent: int = 4) -> str:
    """Wrap a hint, but keep each command on one line, so that it can be copied; "" without a hint."""
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", _KEPT_SPACE), cell(hint))
    return _wrapped(f"{begin}{whole}", indent).replace(_KEPT_SPACE, " ") if hint else ""


def _wrapped(line: str, indent: int, min_width: int = 0) -> str:
    width = terminal_size()[0]
    if not width or len(line) <= width:
        return f"{line}\n"
    import textwrap  # 1 ms, and only narrow terminals need it

    lines = textwrap.wrap(
        line, max(width, 2 * indent, min_width), subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def terminal_size() -> tuple[int, int]:
    """Return columns and rows of the terminal on standard output; (0, 0) if it is not a terminal."""
    if not sys.stdout.isatty():
        return 0, 0
    try:
        return os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 0, 0


@cache
def is_utf8() -> bool:
    """Return whether the locale is UTF-8, in the environment this program was started with.

    Python itself replaces the C locale by UTF-8, and changes the environment accordingly (PEP 538, PEP 540).
    """
    from yunion_mps.host.proc import environment_of  # 1 ms, which a plain `run` need not pay

    started_with = environment_of(os.getpid())
    variables = ("LC_ALL", "LC_CTYPE", "LANG")
    locales = [started_with[name] for name in variables if started_with.get(name)]
    locale = locales[0].lower() if locales else "c"
    return "utf-8" in locale or "utf8" in locale


def display_width(text: str) -> int:
    """Return the number of columns that the text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def _character_width(character: str) -> int:
    """Return 2 for wide East Asian characters, 0 for combining characters, otherwise 1 (UAX #11)."""
    if character < "\u0300":
        return 1
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, *, utf8: bool | None = None, right_aligned: bool = False) -> str:
    """Cut or pad the text to a width in columns.

    utf8: whether the terminal shows UTF-8; by default as the locale says
    """
    text = cell(text)
    text_width = display_width(text)
    if text_width <= width:
        space = " " * (width - text_width)
        return space + text if right_aligned else text + space
    if width <= 0:
        return ""
    start = ""
    start_width = 0
    for character in text:
        character_width = _character_width(character)
        if start_width + character_width > width - 1:
            break
        start += character
        start_width += character_width
    if utf8 is None:
        utf8 = is_utf8()
    mark = "…" if utf8 else "~"
    return start + mark + " " * (width - 1 - start_width)


def age(duration_s: float) -> str:
    """Format a duration: `42s`, `5m`, `2h10m`, `4d2h`; from ten days on without hours."""
    whole_s = max(0, int(duration_s))
    if whole_s < 60:
        return f"{whole_s}s"
    if whole_s < 3600:
        return f"{whole_s // 60}m"
    if whole_s < 86400:
        hours = whole_s // 3600
        minutes = whole_s // 60 % 60
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days = whole_s // 86400
    hours = whole_s // 3600 % 24
    return f"{days}d{hours}h" if hours and days < 10 else f"{days}d"


def age_of(moment: str | None) -> str | None:
    """Format the time since an API time; None if it is unknown."""
    return None if moment is None else age(time.time() - seconds(moment))


def mib_text(number: float | None) -> str | None:
    """Format `5760 MiB`; None if it is unknown."""
    return None if number is None else f"{number} MiB"


def date_and_time(moment: str) -> str:
    """Format an API time for people, in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds(moment)))


def print_notice(text: str) -> None:
    """Print progress to standard error, for users. An error of the output is ignored."""
    if sys.stderr is not None:  # print would use standard output instead
        with contextlib.suppress(OSError):
            print(f"yunion-mps: {printable(text)}", file=sys.stderr, flush=True)


def refuse_closed_output() -> None:
    """Raise YunionError if standard output is closed."""
    if sys.stdout is None:
        raise unwritable("standard output is closed")


def unwritable(cause: str | None) -> YunionError:
    """Return the error for output that cannot be written."""
    return YunionError(f"the output cannot be written: {cause}", "check its destination: df")
