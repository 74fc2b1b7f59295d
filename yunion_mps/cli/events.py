"""`events`: what happened on this host, and why."""

from __future__ import annotations

import contextlib
import re
import select
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from yunion_mps.cli.calls import blocking_transport, newest_events
from yunion_mps.cli.options import Number
from yunion_mps.cli.output import as_json, csv_rows, date_and_time, output_option, print_notice, show, wrapped
from yunion_mps.core.enums import EVENT_KINDS
from yunion_mps.core.text import count
from yunion_mps.core.units import duration_s, rfc3339, seconds
from yunion_mps.http.operations import MAX_EVENTS
from yunion_mps.http.parameters import LATEST_S
from yunion_mps.http.transport import follow_events, iterate_blocking

if TYPE_CHECKING:
    from yunion_mps.answers import EventJson, EventListJson

FIELDS = ("time", "severity", "kind", "subject", "what", "cause", "consequence", "code", "count", "last_time")

_NEWEST = 100
_NEWEST_TO_FOLLOW = 10
_INDENT = 8
_NARROWEST = 40


#: The `tm_isdst` with which mktime(3) determines from the date whether daylight saving time applies.
_ZONE_OF_DATE = -1
_FORMS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S")
_MOMENT_HINT = (
    "use an age (10m, 2h, 3d), today, yesterday, a date (2026-11-20), a local time "
    "('2026-11-20 13:45'), or 2026-11-20T13:45:00Z"
)


def moment(text: str, now_s: float) -> int:
    """Parse a time, in the local time zone, into s since 1970; raises ValueError."""
    if re.fullmatch(r"[0-9]{9,11}", text):  # fewer digits are no plausible time
        return int(text)
    with contextlib.suppress(ValueError):
        return min(max(0, int(seconds(text))), LATEST_S)
    ago_s = duration_s(text)
    if ago_s is not None:
        return max(0, int(now_s) - ago_s)
    if text in ("today", "yesterday"):
        local = time.localtime(now_s)
        day = local.tm_mday - 1 if text == "yesterday" else local.tm_mday
        midnight = (local.tm_year, local.tm_mon, day, 0, 0, 0, 0, 0, _ZONE_OF_DATE)
        return int(time.mktime(midnight))
    for form in _FORMS:
        try:
            date = time.strptime(text.replace("T", " ", 1), form)
            return min(max(0, int(time.mktime((*date[:8], _ZONE_OF_DATE)))), LATEST_S)
        except (ValueError, OverflowError):
            continue
    raise ValueError(text)


class PointInTime(click.ParamType):
    """A time as people write it; its value is in s since 1970."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return moment(str(value), time.time())
        except ValueError:
            self.fail(f"{value!r} is not a time: {_MOMENT_HINT}.", param, ctx)


@click.command("events", short_help="Show what happened on this host, and why.")
@click.option("-f", "--follow", is_flag=True, help="Keep running, and print new events as they happen.")
@click.option(
    "--since", type=PointInTime(), metavar="TIME",
    help="Show only events since this time, e.g. 10m, 2h, yesterday.",
)  # fmt: skip
@click.option(
    "--kind", type=click.Choice(EVENT_KINDS), metavar="KIND",
    help=f"Show only events of this kind: {', '.join(EVENT_KINDS)}.",
)  # fmt: skip
@click.option(
    "--limit", type=Number(1, MAX_EVENTS), metavar="N",
    help=f"Show at most N events, the newest ones. Default: {_NEWEST}; with --follow {_NEWEST_TO_FOLLOW}, "
    f"with --since {MAX_EVENTS}.",
)  # fmt: skip
@output_option
def show_events(follow: bool, since: int | None, kind: str | None, limit: int | None, output: str) -> None:
    """Show what happened on this host, with cause and consequence, oldest first.

    If there are more than N events, errors of the last day (with --since, of all that time) are shown first,
    then warnings, then those that users can cause, and then others. With --kind or --follow, only the newest
    are shown.

    TIME is an age (90, 90s, 10m, 2h, 1d), today, yesterday, a date (2026-11-20), a local time
    ("2026-11-20 13:45"), or 2026-11-20T13:45:00Z.

    \b
    Examples:
      yunion-mps events
      yunion-mps events --since 2h
      yunion-mps events --follow --kind gpu
      yunion-mps events --since yesterday --output csv
    """
    default = _NEWEST_TO_FOLLOW if follow else _NEWEST
    if since is not None:
        default = MAX_EVENTS
    begin = None if since is None else rfc3339(since)
    severe_first = not (kind or follow)
    answer = newest_events(limit or default, since=begin, kind=kind, severe_first=severe_first)
    if follow:
        _follow(answer, kind, output)
    rows = [_row(event) for event in answer["events"]]
    show(answer, output, FIELDS, rows, lambda: _whole_text(answer, limit or default))


def _whole_text(answer: EventListJson, limit: int) -> str:
    events = answer["events"]
    omitted = answer.get("omitted", 0)  # an earlier daemon, which an upgrade has not replaced yet, omits none
    if not events:
        return "No events.\n"
    text = ""
    if len(events) == limit:
        text = f"(showing the newest {limit} events; for older ones, use --limit or --since)\n"
    if omitted:
        text += f"(warnings and errors first: {count(omitted, 'other event')} of this time not shown; "
        text += f"for those of a kind: yunion-mps events --kind KIND --limit {MAX_EVENTS})\n"
    return text + _text(events)


def _text(events: list[EventJson]) -> str:
    """Format events for people: what happened, then cause and consequence. No word is broken."""
    lines: list[str] = []
    for event in events:
        severity = event["severity"] if event["severity"] == "info" else event["severity"].upper()
        subject = f"{event['kind']} {event['subject']}".rstrip()
        often = ""
        if event["count"] > 1:
            often = f" ({event['count']} times until {date_and_time(event['last_time'])})"
        lines.append(f"{date_and_time(event['time'])}  {severity:7}  {subject}: {event['what']}{often}")
        for name, text in (("cause", event["cause"]), ("consequence", event["consequence"])):
            label = f"{name}: "  # only before the first line
            for line in text.splitlines():
                lines.append(f"    {label}{line}")
                label = ""
    return "".join(wrapped(line, _INDENT, _NARROWEST) for line in lines)


def _row(event: EventJson) -> list[object]:
    values: Mapping[str, object] = event
    row: list[object] = []
    for name in FIELDS:
        row.append("; ".join(str(values[name]).splitlines()))
    return row


def _follow(answer: EventListJson, kind: str | None, output: str) -> None:
    """Print existing and new events until interrupted."""
    _print(answer["events"], output, begin=True)
    _refuse_without_reader()
    for events in iterate_blocking(follow_events(blocking_transport(), answer["last"], kind, print_notice)):
        _print(events, output)
        _refuse_without_reader()


def _print(events: list[EventJson], output: str, *, begin: bool = False) -> None:
    """Print the events and flush the output; each event is complete by itself."""
    if output == "json":
        for event in events:
            sys.stdout.write(as_json(event) + "\n")
    elif output == "yaml" and not events:
        pass  # an empty list would break the following output
    elif output == "csv" and not begin:
        sys.stdout.write(csv_rows([_row(event) for event in events]))
    else:
        show(events, output, FIELDS, [_row(event) for event in events], lambda: _text(events))
    sys.stdout.flush()


def _refuse_without_reader() -> None:
    """Raise BrokenPipeError if the reader of our output is gone, even if there is nothing to write."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        raise BrokenPipeError
