"""What the host does over time: `events`, `metrics`, `web`, and the internal command `gateway`."""

from __future__ import annotations

import contextlib
import re
import select
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from yunion_mps.cli.options import Number, call, daemon
from yunion_mps.cli.output import (
    as_json,
    csv_rows,
    date_and_time,
    output_option,
    print_notice,
    show,
    wrapped,
)
from yunion_mps.client.transport import BlockingTransport, follow_events, iterate_blocking
from yunion_mps.enums import EVENT_KINDS
from yunion_mps.errors import YunionError
from yunion_mps.http.operation import LATEST_S
from yunion_mps.http.operations import GET_EVENTS, GET_METRICS, GET_STATUS, MAX_EVENTS
from yunion_mps.paths import Paths
from yunion_mps.text import printable
from yunion_mps.units import duration_s, rfc3339, seconds

if TYPE_CHECKING:
    from yunion_mps.answers import Event, EventList

FIELDS = ("time", "severity", "kind", "subject", "what", "cause", "consequence", "code")

_NEWEST = 100
_NEWEST_TO_FOLLOW = 10
_INDENT, _NARROWEST = 8, 40


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
        now = time.localtime(now_s)
        day = now.tm_mday - (text == "yesterday")
        return int(time.mktime((now.tm_year, now.tm_mon, day, 0, 0, 0, 0, 0, -1)))
    for form in _FORMS:
        try:
            date = time.strptime(text.replace("T", " ", 1), form)
            # -1: mktime(3) determines from the date whether daylight saving time applies.
            return min(max(0, int(time.mktime((*date[:8], -1)))), LATEST_S)
        except (ValueError, OverflowError):
            continue
    raise ValueError(text)


class PointInTime(click.ParamType):
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
    "--since",
    type=PointInTime(),
    metavar="TIME",
    help="Show only events since this time, e.g. 10m, 2h, yesterday.",
)
@click.option(
    "--kind",
    type=click.Choice(EVENT_KINDS),
    metavar="KIND",
    help=f"Show only events of this kind: {', '.join(EVENT_KINDS)}.",
)
@click.option(
    "--limit",
    type=Number(1, MAX_EVENTS),
    metavar="N",
    help=f"Show at most the N newest events. Default: {_NEWEST}; with --follow {_NEWEST_TO_FOLLOW}, "
    f"with --since {MAX_EVENTS}.",
)
@output_option
def show_events(follow: bool, since: int | None, kind: str | None, limit: int | None, output: str) -> None:
    """Show what happened on this host, with cause and consequence, oldest first.

    TIME is an age (90, 90s, 10m, 2h, 1d), today, yesterday, a date (2026-11-20), a local time
    ("2026-11-20 13:45"), or 2026-11-20T13:45:00Z.

    \b
    Examples:
      yunion-mps events
      yunion-mps events --since 2h
      yunion-mps events --follow --kind gpu
      yunion-mps events --since yesterday --output csv
    """
    default = MAX_EVENTS if since is not None else _NEWEST_TO_FOLLOW if follow else _NEWEST
    begin = None if since is None else rfc3339(since)
    answer = call(GET_EVENTS, limit=limit or default, since=begin, kind=kind)
    if follow:
        _follow(answer, kind, output)
    rows = [_row(event) for event in answer["events"]]
    show(answer, output, FIELDS, rows, lambda: _whole_text(answer["events"], limit or default))


def _whole_text(events: list[Event], limit: int) -> str:
    if not events:
        return "No events.\n"
    cut = f"(showing the newest {limit} events; for older ones, use --limit or --since)\n"
    return (cut if len(events) == limit else "") + _text(events)


def _text(events: list[Event]) -> str:
    """Format events for people: what happened, then cause and consequence. No word is broken."""
    lines: list[str] = []
    for event in events:
        severity = event["severity"] if event["severity"] == "info" else event["severity"].upper()
        subject = f"{event['kind']} {event['subject']}".rstrip()
        lines.append(f"{date_and_time(event['time'])}  {severity:7}  {subject}: {event['what']}")
        for name, text in (("cause", event["cause"]), ("consequence", event["consequence"])):
            for number, line in enumerate(text.splitlines()):
                lines.append("    " + (f"{name}: " if not number else "") + line)
    return "".join(wrapped(line, _INDENT, _NARROWEST) for line in lines)


def _row(event: Event) -> list[object]:
    values: Mapping[str, object] = event
    texts = ("; ".join(str(values[name]).splitlines()) for name in FIELDS[1:])
    return [event["time"], *texts]


def _follow(answer: EventList, kind: str | None, output: str) -> None:
    """Print existing and new events until interrupted."""
    _print(answer["events"], output, begin=True)
    _refuse_without_reader()
    for events in iterate_blocking(
        follow_events(BlockingTransport(daemon()), answer["last"], kind, print_notice)
    ):
        _print(events, output)
        _refuse_without_reader()


def _print(events: list[Event], output: str, *, begin: bool = False) -> None:
    """Print the events and flush the output; each event is complete by itself."""
    if output == "json":
        sys.stdout.write("".join(as_json(event) + "\n" for event in events))
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


_DEFAULT = "127.0.0.1:9435"


@click.command("metrics", short_help="Print the metrics in the Prometheus text format.")
def metrics() -> None:
    """Print the metrics in the Prometheus text format.

    To let Prometheus scrape them, set metrics_listen in host.conf. For node_exporter's textfile collector,
    set metrics_textfile. docs/metrics.md describes each metric.

    \b
    Examples:
      yunion-mps metrics
      yunion-mps metrics | promtool check metrics
    """
    sys.stdout.write("\n".join(map(printable, call(GET_METRICS).split("\n"))))


@click.command("web", short_help="Serve the web page.")
@click.option(
    "--listen", "address", default=_DEFAULT, show_default=True, metavar="ADDRESS:PORT",
    help="Listen on this address.",
)  # fmt: skip
@click.option("--allow-public", is_flag=True, help="Allow an address that other hosts can reach.")
def web(address: str, allow_public: bool) -> None:
    """Serve a read-only web page with GPUs, devices, jobs and events until you press Ctrl-C.

    Anyone who can reach the address can read the page without a password; 127.0.0.1 is open to all users of
    this host. To serve the page permanently, set web_listen in host.conf.

    \b
    Examples:
      yunion-mps web
      yunion-mps web --listen 127.0.0.1:8080
      ssh -L 9435:127.0.0.1:9435 gpu-01 yunion-mps web
    """
    import asyncio

    from yunion_mps.host.log import set_up_log

    set_up_log("warning", plain=True)
    endpoint = _check_address(address, allow_public=allow_public)
    call(GET_STATUS)  # raises if the daemon does not answer this user
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(endpoint))


def _check_address(address: str, *, allow_public: bool) -> str:
    """Return the normalised address; raises BadParameter if other hosts can reach it."""
    from yunion_mps.config.values import ENDPOINT_EXAMPLE, is_public, normalise_endpoint

    try:
        endpoint = normalise_endpoint(address)
    except ValueError as error:
        raise click.BadParameter(
            f"{address!r} is {error}: write {ENDPOINT_EXAMPLE}", param_hint="'--listen'"
        ) from None
    if is_public(endpoint) and not allow_public:
        what = f"other hosts can reach {endpoint}, and the page is not protected by a password"
        hint = "use 127.0.0.1, or add --allow-public if this is intended"
        raise click.BadParameter(f"{what}: {hint}", param_hint="'--listen'")
    return endpoint


async def _serve(address: str) -> None:
    import asyncio

    from yunion_mps.gateway.server import LIMITS, WebPage, listen
    from yunion_mps.http.server import Server

    try:
        listener = listen(address)
    except OSError as error:
        hint = "choose another port: --listen 127.0.0.1:PORT"
        raise YunionError(f"cannot listen on {address}: {error.strerror}", hint) from None
    server: Any = Server(WebPage(Paths.from_environment()), LIMITS)
    await server.open(listener)
    click.echo(f"Serving at http://{address}/ (press Ctrl-C to stop)")
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()


@click.command("gateway", hidden=True)
def gateway() -> None:
    """Serve the metrics and the web page on the addresses set by metrics_listen and web_listen in host.conf.

    The service yunion-mps-gateway runs this command as an unprivileged user; run it yourself only on a host
    without systemd. It exits if host.conf sets neither key.

    \b
    Examples:
      yunion-mps gateway
    """
    import asyncio

    from yunion_mps.gateway.server import serve
    from yunion_mps.host.log import set_up_log

    set_up_log("info", plain=True)
    asyncio.run(serve(Paths.from_environment()))
