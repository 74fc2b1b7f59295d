"""What commands print: an answer as a table for people, or as JSON, YAML or CSV for programs (`--output`).

Tables are whole in a pipe, and fitted to the width of a terminal.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, Union

import click

from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable
from yunion_mps.units import seconds

FORMATS = ("table", "json", "yaml", "csv")

#: What a clause of a hint begins with if all of it is a command.
_PROGRAMS = "chmod docker dmesg echo journalctl kubectl mount nvidia-smi systemctl yunion-mps"
#: A setting or a command in a hint: `key: value`, what is in parentheses, what follows a colon, a clause.
_COMMAND = re.compile(
    rf"\w+_\w+: \S+|\([^)]*\)|(?<=: )[^;]+|(?:^|(?<=; ))(?:{_PROGRAMS.replace(' ', '|')}) [^;]+"
)
#: Stands for a space at which no line is broken; no text has it once it is printable.
_KEPT_SPACE = "\0"

Row = Sequence[object]
F = TypeVar("F", bound=Callable[..., Any])


#: What a record has in a column: its key in the record, or what makes it of the record.
Value = Union[str, int, Callable[[Any], object]]


class Column(NamedTuple):
    """A column of a table, and what happens to it if the terminal is too narrow; `wide` ones need `-o wide`.

    Cells are cut, the longest first, but not below `least`; without that, they are never cut. If that is not
    enough, `short` makes the cells instead of `value`, and then the columns with `drop` are left out, the
    highest first, as long as that is necessary.
    """

    header: str
    value: Value
    numeric: bool = False
    least: int = 0
    drop: int = 0
    wide: bool = False
    short: Value | None = None


def output_option(function: F, formats: Sequence[str] = FORMATS) -> F:
    """Give a command the option `--output`."""
    option = click.option(
        "-o", "--output", type=click.Choice(formats), default="table", metavar="FORMAT",
        help=f"Output format: {', '.join(formats)}. Default: table.",
    )  # fmt: skip
    return option(function)


def wide_output_option(function: F) -> F:
    """Give a command the option `--output`, with the format `wide`: a table with all columns."""
    return output_option(function, (FORMATS[0], "wide", *FORMATS[1:]))


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


def show_pairs(value: Mapping[str, object], output: str, table: Callable[[], str]) -> None:
    """As `show`, for an answer that is one thing and no list."""
    show(value, output, ("field", "value"), pairs(value), table)


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
    """The value without control characters: nothing if unknown, texts with commas, other parts as JSON."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return printable(",".join(value))
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


def table(
    columns: Iterable[Column],
    records: Sequence[Any],
    *,
    none: str = "",
    wide: bool = False,
    boxed: bool = False,
) -> str:
    """The records below the columns' headers; the text `none` if there are no records.

    What is not known is a dash; `boxed`, which has borders, leaves it empty. A `wide` table has all columns
    whole, whatever the terminal's width.
    """
    if none and not records:
        return wrapped(none)
    unknown, between, around = ("", 3, 4) if boxed else ("-", 2, 0)
    width = 0 if wide else terminal_size()[0]
    cells = {
        one: [_of(one.value, record) or unknown for record in records]
        for one in columns
        if wide or not one.wide
    }
    if width and _taken(_least(_widths(cells)), between) + around > width:
        for one in cells:
            if one.short is not None:
                cells[one] = [_of(one.short, record) or unknown for record in records]
    widths = _widths(cells)
    if width:
        _narrow(widths, width - around, between)
    header = [fit(one.header, widths[one], right_aligned=one.numeric) for one in widths]
    rows = (
        [fit(cells[one][i], widths[one], right_aligned=one.numeric) for one in widths]
        for i in range(len(records))
    )
    if boxed:
        border = "+" + "+".join("-" * (taken + 2) for taken in widths.values()) + "+"
        lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
        lines = [border, lines[0], border, *lines[1:], border]
    else:
        lines = ["  ".join(row).rstrip() for row in (header, *rows)]
    hidden = [one.header for one in cells if one not in widths]
    if hidden:
        names = f"(no room for {', '.join(hidden)}: use -o csv)"
        few = f"(no room for {len(hidden)} columns: use -o csv)"
        lines.append(names if len(names) <= width else few)
    return "\n".join(lines) + "\n"


def _of(value: Value, record: Any) -> str:
    found = value(record) if callable(value) else record[value]
    return ("yes" if found else "no") if isinstance(found, bool) else cell(found)


def _widths(cells: Mapping[Column, Sequence[str]]) -> dict[Column, int]:
    return {one: max(map(display_width, (one.header, *texts))) for one, texts in cells.items()}


def _taken(widths: Mapping[Column, int], between: int) -> int:
    return sum(widths.values()) + between * (len(widths) - 1)


def _least(widths: Mapping[Column, int]) -> dict[Column, int]:
    """The widths down to which the columns can be cut."""
    return {
        one: min(taken, max(one.least, display_width(one.header))) if one.least else taken
        for one, taken in widths.items()
    }


def _narrow(widths: dict[Column, int], room: int, between: int) -> None:
    """Leave columns out and make others narrower until they fit, or none can give way any more."""
    least = _least(widths)
    for one in sorted(widths, key=lambda one: -one.drop):
        if not one.drop or _taken(least, between) <= room:
            break
        del widths[one], least[one]
    while _taken(widths, between) > room:
        able = [one for one in widths if widths[one] > least[one]]
        if not able:
            break
        widths[max(able, key=lambda one: widths[one])] -= 1


def notes(entries: Iterable[tuple[str, str]]) -> str:
    """What is said of rows below their table, where it can be read whole: `name: text` lines."""
    return "".join(wrapped(f"{name}: {text}") for name, text in entries if text)


def wrapped(text: str, indent: int = 4, narrowest: int = 0) -> str:
    """One line; on too narrow a terminal several, broken between words, the later ones indented."""
    return _wrapped(cell(text), indent, narrowest)


def hint_text(hint: str, begin: str = "Hint: ", indent: int = 4) -> str:
    """As `wrapped`, but no command is broken, so that it can be copied; nothing if there is no hint."""
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _KEPT_SPACE), cell(hint))
    return _wrapped(f"{begin}{whole}", indent).replace(_KEPT_SPACE, " ") if hint else ""


def _wrapped(line: str, indent: int, narrowest: int = 0) -> str:
    width = terminal_size()[0]
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


def display_width(text: str) -> int:
    """The columns that the text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_character_width, text))


def _character_width(character: str) -> int:
    """Two for what is wide in East Asia, none for what combines with the one before (UAX #11)."""
    if character < "\u0300":
        return 1
    import unicodedata

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, *, utf8: bool | None = None, right_aligned: bool = False) -> str:
    """The text, cut or filled to so many columns; `utf8` is that of the locale if it is not given."""
    text = cell(text)
    taken = display_width(text)
    if taken <= width:
        space = " " * (width - taken)
        return space + text if right_aligned else text + space
    kept, taken = "", 0
    for one in text:
        taken += _character_width(one)
        if taken > width - 1:
            break
        kept += one
    mark = "…" if (is_utf8() if utf8 is None else utf8) else "~"
    return kept + mark + " " * (width - 1 - display_width(kept)) if width > 0 else ""


def age(duration_s: float) -> str:
    """How long: `42s`, `5m`, `2h10m`, `4d2h`; from ten days on without hours."""
    whole = max(0, int(duration_s))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    (first, unit), (second, smaller) = (
        ((whole // 3600, "h"), (whole // 60 % 60, "m"))
        if whole < 86400
        else ((whole // 86400, "d"), (whole // 3600 % 24, "h"))
    )
    return f"{first}{unit}" + (f"{second}{smaller}" if second and (unit == "h" or first < 10) else "")


def age_of(moment: str | None) -> str | None:
    """How long ago a time of the API was; None if it is not known."""
    return None if moment is None else age(time.time() - seconds(moment))


def mib(number: float | None) -> str | None:
    """`5760 MiB`; None if it is not known."""
    return None if number is None else f"{number} MiB"


def date_and_time(moment: str) -> str:
    """A time of the API as people read it, in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds(moment)))


def print_notice(text: str) -> None:
    """Tell a person how it goes, beside the output."""
    if sys.stderr is not None:  # print would take standard output instead
        print(f"yunion-mps: {printable(text)}", file=sys.stderr, flush=True)


def refuse_closed_output() -> None:
    """Raise YunionError if nothing can be printed."""
    if sys.stdout is None:
        raise unwritable("standard output is closed")


def unwritable(why: str | None) -> YunionError:
    """The error for output that cannot be written."""
    return YunionError(f"the output cannot be written: {why}", "check its destination: df")
