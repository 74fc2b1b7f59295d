"""A frame of `top`: styled lines of text that fit the terminal. Time and size are parameters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from yunion_mps.cli.output import age, cell, display_width, fit, hidden_columns
from yunion_mps.cli.top.rows import ORDERS, Row, Scene, sort_devices, sort_gpus
from yunion_mps.core.enums import NOTICE, PROBLEM
from yunion_mps.core.text import count
from yunion_mps.core.units import seconds
from yunion_mps.views.overview import with_hints

#: Text with a style; "" is the terminal's own style.
Line = list[tuple[str, str]]

#: The beginning of a line with a hint.
HINT = "  Hint: "
VIEWS = ("all", "GPUs", "devices")
#: As many rows as there are lines, to print a complete frame.
WHOLE = 1_000_000

#: The codes of styles (ECMA-48, SGR).
_SGR = {"bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "31", "head": "7"}
_STATE_STYLES = {"ready": "good", "degraded": "warn", "failed": "bad"}
_SEVERITY_STYLES = {"warning": "warn", "error": "bad"}
#: Each column's heading in both tables; what only GPUs have shares a column with what only devices have.
_HEADINGS = {
    "GPU": {
        "used": "USED GiB", "of": "TOTAL", "peak": "POWER W", "threads": "TEMP C", "busy": "UTIL %",
        "user": "IN USE", "pid": "PROCS", "command": "NAME",
    },
    "DEVICE": {
        "used": "USED GiB", "of": "BUDGET", "peak": "PEAK", "threads": "SM %", "busy": "UTIL %",
        "user": "USER", "pid": "PID", "since": "AGE", "command": "COMMAND",
    },
}  # fmt: skip
_WIDTHS = {
    "bar": 10,
    "used": 8,
    "of": 6,
    "peak": 7,
    "threads": 6,
    "busy": 6,
    "user": 8,
    "pid": 7,
    "since": 6,
    "command": 9,
}
#: Columns that a narrow terminal omits, the least useful first.
_DROP = ("since", "threads", "pid", "bar", "command", "busy", "user", "peak")
_RIGHT_ALIGNED = ("used", "of", "peak", "threads", "busy", "pid", "since")
_WIDEST_BAR = 24
_WIDEST_USER = 14
#: With fewer rows below the problems, hidden columns are not named.
_LEAST_ROWS = 5
#: A bar warns from this share of the budget.
_WARNING_SHARE = 0.9
_EIGHTHS = " ▏▎▍▌▋▊▉"


class ViewState(NamedTuple):
    """What the user sees: the terminal's size, and what the keys have chosen."""

    columns: int
    rows: int
    utf8: bool = True
    #: One of ORDERS.
    order: str = ORDERS[0]
    #: One of VIEWS.
    view: str = VIEWS[0]
    #: How many rows are scrolled past.
    offset: int = 0


class Outage(NamedTuple):
    """Why there is no answer, or only an incomplete one."""

    #: Since when there has been no answer (s since 1970); None if the answer is only incomplete.
    since_s: float | None
    why: str
    hint: str = ""


class Frame(NamedTuple):
    """What is drawn, and how far it can be scrolled."""

    lines: list[Line]
    #: The offset at which the last row is shown.
    last_offset: int
    #: How many rows the keys PgUp and PgDn scroll.
    page: int


class _Layout(NamedTuple):
    """How many lines each part of the frame has, with its heading."""

    gpus: int
    devices: int
    events: int


def frame(scene: Scene, state: ViewState, *, outage: Outage | None, now_s: float, interval_s: int) -> Frame:
    """Draw the scene.

    outage: why the scene is out of date or incomplete, if it is.
    now_s: the time, in s since 1970.
    interval_s: the time between updates, which the footer shows.
    """
    whole = state.rows >= WHOLE
    top = _header(scene, outage, now_s)
    top += _problems(scene, len(scene.problems) * 2 if whole else state.rows // 6)
    footer = [] if whole else [_footer(state, interval_s)]
    widths = _widths([row.address for row in (*scene.gpus, *scene.devices)], state.columns)
    rows = state.rows - len(top) - len(footer)
    hidden = _hidden(widths, state.columns) if rows >= _LEAST_ROWS else []
    layout = _layout(scene, state, rows - len(hidden))
    view_gpus = state.view == "GPUs"
    gpus, gpus_over = _table(
        "GPU",
        sort_gpus(scene.gpus, state.order),
        room=layout.gpus,
        offset=state.offset if view_gpus else 0,
        widths=widths,
        state=state,
        now_s=now_s,
    )
    devices, devices_over = _table(
        "DEVICE",
        sort_devices(scene.devices, state.order),
        room=layout.devices,
        offset=state.offset,
        widths=widths,
        state=state,
        now_s=now_s,
    )
    lines = [*top, *gpus, *devices, *hidden, *_events(scene, state, layout.events, now_s)]
    if whole:
        fitted = [_printable(line) for line in lines]
    else:
        missing = state.rows - 1 - len(lines)
        empty: list[Line] = [[]] * missing
        lines = lines[: state.rows - 1] + empty + footer
        fitted = [_cut(line, state) for line in lines[: state.rows]]
    page = (layout.gpus if view_gpus else layout.devices) - 1
    return Frame(fitted, gpus_over if view_gpus else devices_over, max(page, 1))


def _header(scene: Scene, outage: Outage | None, now_s: float) -> list[Line]:
    status = scene.host.answers.status
    begin = (f"yunion-mps {status['version']}  {clock(now_s)}  ", "bold")
    why: list[Line] = []
    if outage:
        title = "Incomplete: " if outage.since_s is None else "Problem: "
        why.append([(title, "bad"), (outage.why, "")])
        if outage.hint:
            why.append([(f"{HINT}{outage.hint}", "")])
        if outage.since_s is not None:
            notice = f"no answer since {clock(outage.since_s)}; showing the last data"
            return [[begin, (notice, "bad")], *why, _counts(scene)]
    driver = status["driver"]["version"]
    style = _STATE_STYLES.get(status["state"], "")
    return [
        [begin, (status["state"], style), (f"  driver {driver}" if driver else "", "")],
        _counts(scene),
        *why,
    ]


def clock(moment_s: float) -> str:
    """Format a time in s since 1970 as `13:45:00`, in the local time zone."""
    return time.strftime("%H:%M:%S", time.localtime(moment_s))


def _counts(scene: Scene) -> Line:
    answers = scene.host.answers
    devices = answers.status["devices"]
    listed = {gpu["addr"] for gpu in answers.gpus}
    total = sum(len(holding.devices) for holding in scene.host.holdings if holding.gpu in listed)
    instances = sum(gpu["parent"] is not None for gpu in answers.gpus)
    gpus_text = count(len(scene.gpus) - instances, "GPU")
    if instances:
        gpus_text += f" with {count(instances, 'MIG instance')}"
    devices_text = f"{count(total, 'device')}: {devices['used']} used, {devices['free']} free"
    if devices["unavailable"]:
        devices_text += f", {devices['unavailable']} unavailable"
    parts = [gpus_text, devices_text]
    free_mib: int | None = None
    for gpu in answers.gpus:
        if gpu["memory_free_mib"] is not None:
            free_mib = free_mib or 0
            if not gpu["reserved_for"]:
                free_mib += gpu["memory_free_mib"]
    if free_mib is not None:
        parts.append(f"{_gib(free_mib)} GiB free in pools")
    leases_text = count(len(answers.leases), "lease")
    if answers.waiting:
        leases_text += f", {count(len(answers.waiting), 'request')} queued"
    parts.append(leases_text)
    parts.append(count(len(answers.clients["clients"]), "process", "processes"))
    return [("; ".join(parts), "")]


def _problems(scene: Scene, limit: int) -> list[Line]:
    """Format the problems in at most `limit` lines, with a hint after the last problem that shares it."""
    blocks: list[list[Line]] = []
    for problem, hint in with_hints(scene.problems):
        style = "bad" if problem.level == PROBLEM else "warn"
        blocks.append([[(f"{problem.title}: ", style), (problem.text, "")]])
        if hint and problem.level in (NOTICE, PROBLEM):
            blocks[-1].append([(f"{HINT}{hint}", "")])
    if sum(map(len, blocks)) <= limit:
        return list(chain.from_iterable(blocks))
    shown: list[Line] = []
    remaining = sum(problem.number for problem in scene.problems)
    for problem, block in zip(scene.problems, blocks):
        if len(shown) < limit - 1:
            shown += block
            remaining -= problem.number
    more = f"{remaining} more; " if remaining else ""
    return [*shown[: max(limit - 1, 0)], [(f"{more}show all: yunion-mps status", "")]][:limit]


def _layout(scene: Scene, state: ViewState, rows: int) -> _Layout:
    if state.rows >= WHOLE:
        return _Layout(len(scene.gpus) + 1, len(scene.devices) + 1, len(scene.events) + 1)
    events = 0
    if rows >= 16:
        events = min(len(scene.events), 5)
    elif rows >= 11:
        events = min(len(scene.events), 3)
    if events:
        events += 1  # the heading
    rows_left = max(rows - events, 0)
    if state.view == "GPUs":
        return _Layout(rows_left, 0, events)
    if state.view == "devices" or rows_left < 5:
        return _Layout(0, rows_left, events)
    gpus = min(len(scene.gpus), max(1, rows_left // 3 - 1)) + 1
    devices = rows_left - gpus
    if devices > len(scene.devices) + 1:  # the events get the rest
        spare = devices - len(scene.devices) - 1
        gpus += min(spare, len(scene.gpus) + 1 - gpus)
        devices = min(rows_left - gpus, len(scene.devices) + 1)
        events = min(rows - gpus - devices, len(scene.events) + 1) if events else 0
    return _Layout(gpus, devices, events)


def _widths(addresses: Iterable[str], columns: int) -> dict[str, int]:
    """Return the widths of the columns that fit, the same for both tables, so that their bars are aligned."""
    widths = {"address": max([len("DEVICE"), *map(len, addresses)]) + 1, **_WIDTHS}
    for name in _DROP:
        if _total_width(widths) <= columns:
            break
        del widths[name]
    spare = columns - _total_width(widths)
    for name, widest, part in (("bar", _WIDEST_BAR, 2), ("user", _WIDEST_USER, 3)):
        if name in widths and spare > 0:
            more = min(widest - widths[name], spare // part)
            widths[name] += more
            spare -= more
    if "command" in widths:
        widths["command"] += max(spare, 0)
    return widths


def _hidden(widths: dict[str, int], columns: int) -> list[Line]:
    """Name the columns that the terminal is too narrow for."""
    names: dict[str, None] = {}  # a set with an order
    for column in _WIDTHS:
        if column not in widths:
            for headings in _HEADINGS.values():
                if column in headings:
                    names[headings[column]] = None
    if not names:
        return []
    return [[(hidden_columns(list(names), "yunion-mps top --once | cat", columns), "")]]


def _total_width(widths: dict[str, int]) -> int:
    return sum(width + 1 for width in widths.values()) - 1


def _table(
    name: str,
    rows: Sequence[Row],
    *,
    room: int,
    offset: int,
    widths: dict[str, int],
    state: ViewState,
    now_s: float,
) -> tuple[list[Line], int]:
    """Return the heading and as many rows as fit, and the number of other rows."""
    if not room:
        return [], 0
    shown = min(room - 1, len(rows))
    begin = min(offset, len(rows) - shown)
    range_text = f" {begin + 1}-{begin + shown}/{len(rows)}" if shown < len(rows) else ""
    lines = [_heading(_headings(name, range_text, widths, state), state)]
    lines += [_line(row, widths, state, now_s) for row in rows[begin : begin + shown]]
    return lines, len(rows) - shown


def _headings(name: str, range_text: str, widths: dict[str, int], state: ViewState) -> str:
    """Format a table's headings; `range_text` says which rows are shown."""
    room = widths["address"]
    if "bar" in widths:
        room += 1 + widths["bar"]
    cells = [fit(name + range_text, room, utf8=state.utf8)]
    for column, width in widths.items():
        if column not in ("address", "bar"):
            heading = _HEADINGS[name].get(column, "")
            cells.append(fit(heading, width, utf8=state.utf8, right_aligned=column in _RIGHT_ALIGNED))
    return " ".join(cells)


def _line(row: Row, widths: dict[str, int], state: ViewState, now_s: float) -> Line:
    texts = {
        "address": row.address + row.mark,
        "used": _gib(row.used_mib) if row.in_use else "",
        "of": "" if row.of_mib is None else _gib(row.of_mib),
        "peak": _number(row.power_w, ".0f") if row.peak_mib is None else _gib(row.peak_mib),
        "threads": _number(row.temperature_c if row.threads is None else row.threads),
        "busy": _number(row.busy),
        "user": row.user,
        "pid": _number(row.pid),
        "since": "" if row.since_s is None else age(now_s - row.since_s),
        "command": row.command,
    }
    styles = {"used": "bad" if row.share > 1 else ""}
    if row.is_bad:
        styles["address"] = "bad"
    elif not row.in_use:
        styles["address"] = "dim"
    line: Line = []
    for name, width in widths.items():
        if line:
            line.append((" ", ""))
        if name == "bar":
            line.append((bar(row.share, width, utf8=state.utf8), _bar_style(row.share)))
        else:
            shown = fit(texts[name], width, utf8=state.utf8, right_aligned=name in _RIGHT_ALIGNED)
            line.append((shown, styles.get(name, "")))
    return line


def _bar_style(share: float) -> str:
    if share > 1:
        return "bad"
    return "warn" if share >= _WARNING_SHARE else "good"


def bar(share: float, width: int, *, utf8: bool) -> str:
    """Draw a bar of `width` columns for a share from 0 to 1; above 1 it is full, above 0 never empty."""
    share = min(max(share, 0.0), 1.0)
    if not utf8:
        inner = max(width - 2, 0)
        full = max(int(share * inner + 0.5), 1 if share else 0)
        return f"[{'#' * full}{'-' * (inner - full)}]"[:width]
    eighths = max(int(share * width * 8 + 0.5), 1 if share else 0)
    full, part = divmod(eighths, 8)
    drawn = "█" * full
    if part:
        drawn += _EIGHTHS[part]
    return drawn + "░" * (width - len(drawn))


def _number(number: float | None, form: str = "") -> str:
    return "" if number is None else f"{number:{form}}".removesuffix(".0")


def _gib(number_mib: int | None) -> str:
    """Format GiB, which are quicker to read; all other commands use MiB."""
    return "-" if number_mib is None else f"{number_mib / 1024:.1f}"


def _events(scene: Scene, state: ViewState, room: int, now_s: float) -> list[Line]:
    """Format the events, newest first; those that the daemon ranks first take the room before others."""
    # An earlier daemon, which an upgrade has not replaced yet, sends no rank.
    ranked = sorted(scene.events, key=lambda event: (event.get("rank", 0), -event["id"]))
    chosen = ranked[: max(room - 1, 0)]
    lines = [_heading("EVENTS", state)] if chosen else []
    for event in sorted(chosen, key=lambda event: event["id"], reverse=True):
        then_s = seconds(event["time"])
        form = "%H:%M:%S" if now_s - then_s < 86400 else "%d %b  "
        local_time = time.strftime(form, time.localtime(then_s))
        severity = event["severity"] if event["severity"] == "info" else event["severity"].upper()
        style = _SEVERITY_STYLES.get(event["severity"], "")
        cause = f" ({event['cause'].splitlines()[0]})" if event["cause"] else ""
        text = f"{event['kind']} {event['subject']}".rstrip() + f": {event['what']}{cause}"
        lines.append([(f"{local_time} ", ""), (f"{severity:7} ", style), (text, "")])
    return lines


def _heading(text: str, state: ViewState) -> Line:
    return [(fit(text, state.columns, utf8=state.utf8), "head")]


def _footer(state: ViewState, interval_s: int) -> Line:
    arrows = "↑↓" if state.utf8 else "j k"
    keys = (("q", "quit"), ("s", f"sort: {state.order}"), ("v", f"view: {state.view}"), (arrows, "scroll"))
    line: Line = []
    for key, action in keys:
        line += [(f" {key} ", "head"), (f" {action} ", "")]
    return [*line, (f" every {interval_s} s", "dim")]


def _printable(line: Line) -> Line:
    return [(cell(text), style) for text, style in line]


def _cut(line: Line, state: ViewState) -> Line:
    columns_left = state.columns
    fitted: Line = []
    for text, style in line:
        shown = fit(text, min(display_width(text), columns_left), utf8=state.utf8)
        fitted.append((shown, style))
        columns_left -= display_width(shown)
        if columns_left <= 0:
            break
    return fitted


def encode_line(line: Line, columns: int, *, utf8: bool, colour: bool) -> bytes:
    """Return the bytes that draw the line in a row of a terminal with this many columns."""
    width = 0
    pieces: list[str] = []
    for text, style in line:
        width += len(text)
        code = _SGR.get(style) if colour else None
        pieces.append(f"\x1b[{code}m{text}\x1b[0m" if code else text)
    # At the right margin, clearing the rest of the line would delete the last character.
    end = "" if width >= columns else "\x1b[K"
    return ("".join(pieces) + end).encode("utf-8" if utf8 else "ascii", "replace")
