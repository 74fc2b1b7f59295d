"""`--output`: the same answer as a table for people, or as JSON, YAML or CSV for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from yunion_mps.errors import YunionError
from yunion_mps.escaping import printable

FORMATS = ("table", "json", "yaml", "csv")

Row = Sequence[object]
F = TypeVar("F", bound=Callable[..., Any])


def output_option(function: F) -> F:
    """Give a command the option `--output`."""
    option = click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="How to print it.",
    )
    return option(function)


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


def as_json(value: object, **layout: Any) -> str:
    """The value as JSON without characters that control a terminal; only then is non-ASCII text escaped."""
    import json

    text = json.dumps(value, ensure_ascii=False, **layout)
    return text if _is_printable(text) else json.dumps(value, **layout)


def _is_printable(text: str) -> bool:
    return text.replace("\n", "").isprintable()


def cell(value: object) -> str:
    """A value as a cell: nothing for what is unknown, JSON for what has parts, no control characters."""
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


def show_pairs(value: Mapping[str, object], output: str, table: Callable[[], str]) -> None:
    """As `show`, for an answer that is one thing and no list."""
    show(value, output, ("Field", "Value"), pairs(value), table)


def csv_rows(rows: Sequence[Row]) -> str:
    """The rows as CSV, without a header."""
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def refuse_closed_output() -> None:
    """Raise YunionError where nothing can be printed."""
    if sys.stdout is None:
        raise unwritable("standard output is closed")


def unwritable(why: str | None) -> YunionError:
    """What is wrong where the output cannot be written."""
    return YunionError(f"the output cannot be written: {why}", "look at where it goes: df")
