"""One frame of the live view: lines of words and styles that fit a terminal. Time and size are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.cli.output import cell
from yunion_mps.cli.screen.columns import Layout, device_line, gpu_line, headings, layout
from yunion_mps.cli.screen.findings import PROBLEM
from yunion_mps.cli.screen.scene import ORDERS, Scene, sorted_devices, sorted_gpus
from yunion_mps.cli.screen.text import columns_of, count, fit

#: Words in one style: "" is the terminal's own.
Span = tuple[str, str]
Line = list[Span]

VIEWS = ("all", "GPUs", "devices")
#: Rows that there are always, for one who prints a frame whole.
WHOLE = 1_000_000


class Look(NamedTuple):
    """How it is looked at: the size, the order, the view, and how far it was scrolled."""

    columns: int
    rows: int
    utf8: bool = True
    order: str = ORDERS[0]
    view: str = VIEWS[0]
    offset: int = 0


class Frame(NamedTuple):
    """The lines, and by how many rows one can scroll at most and turns a page."""

    lines: list[Line]
    last_offset: int
    page: int


class _Room(NamedTuple):
    """How many lines each part gets, its heading with it."""

    gpus: int
    devices: int
    events: int


def frame(scene: Scene, look: Look, away: str, now_s: float, interval_s: int) -> Frame:
    """What there is to see. `away` says why it is old, where the daemon does not answer."""
    whole = look.rows >= WHOLE
    top = _top(scene, now_s) + ([[(away, "bad")]] if away else [])
    top += _findings(scene, len(scene.findings) * 2 if whole else look.rows // 6)
    foot = [] if whole else [_foot(look, interval_s)]
    room = _room(scene, look, look.rows - len(top) - len(foot))
    shape = layout(scene.gpus, scene.devices, look.columns)
    gpus, gpus_over = _gpu_lines(scene, look, shape, room.gpus)
    devices, devices_over = _device_lines(scene, look, shape, room.devices, now_s)
    events = _events(scene, look, room.events, now_s)
    lines = [*top, *gpus, *devices, *events]
    if not whole:
        lines = lines[: look.rows - 1] + [[]] * (look.rows - 1 - len(lines)) + foot
    scrolls_gpus = look.view == "GPUs"
    page = (room.gpus if scrolls_gpus else room.devices) - 1
    if whole:
        fitted = [[(cell(text), style) for text, style in line] for line in lines]
    else:
        fitted = [_fitted(line, look) for line in lines[: look.rows]]
    return Frame(fitted, gpus_over if scrolls_gpus else devices_over, max(page, 1))


def _top(scene: Scene, now_s: float) -> list[Line]:
    status = scene.answers.status
    state = status["state"]
    driver = status["driver"]["version"]
    clock = time.strftime("%H:%M:%S", time.localtime(now_s))
    about = f"  driver {driver}" if driver else ""
    style = {"ready": "good", "degraded": "warn", "failed": "bad"}.get(state, "")
    first: Line = [(f"yunion-mps {status['version']}  {clock}  ", "bold"), (state, style), (about, "")]
    devices, leases, waiting = status["devices"], scene.answers.leases, len(scene.answers.waiting)
    total = sum(row.devices for row in scene.gpus)
    parts = [
        count(len(scene.gpus), "GPU"),
        f"{count(total, 'device')}: {scene.in_use} used, {scene.free} free"
        + (f", {devices['unavailable']} unavailable" if devices["unavailable"] else ""),
        count(len(leases), "lease") + (f", {waiting} waiting" if waiting else ""),
        f"{scene.processes} processes" if scene.processes != 1 else "1 process",
    ]
    return [first, [("; ".join(parts), "")]]


def _findings(scene: Scene, most: int) -> list[Line]:
    """What is wrong, and below each problem what to do about it, in so many lines."""
    told: list[list[Line]] = []
    for one in scene.findings:
        wrong = one.kind == PROBLEM
        lines: list[Line] = [[(f"{one.kind}: ", "bad" if wrong else "warn"), (one.what, "")]]
        told.append([*lines, [(f"  do: {one.remedy}", "")]] if wrong else lines)
    if sum(map(len, told)) <= most:
        return [line for lines in told for line in lines]
    shown: list[Line] = []
    left = len(told)
    while left and len(shown) < most - 1:
        shown += told[-left]
        left -= 1
    more = f"{left} more; " if left else ""
    return [*shown[: max(most - 1, 0)], [(f"{more}all of it: yunion-mps status", "")]][:most]


def _room(scene: Scene, look: Look, rows: int) -> _Room:
    if look.rows >= WHOLE:
        return _Room(len(scene.gpus) + 1, len(scene.devices) + 1, len(scene.answers.events) + 1)
    events = min(len(scene.answers.events), 5 if rows >= 16 else 3 if rows >= 11 else 0)
    events += 1 if events else 0
    rest = max(rows - events, 0)
    if look.view == "GPUs":
        return _Room(rest, 0, events)
    if look.view == "devices" or rest < 5:
        return _Room(0, rest, events)
    gpus = min(len(scene.gpus), max(1, rest // 3 - 1)) + 1
    devices = rest - gpus
    if devices > len(scene.devices) + 1:  # the rest is the events'
        spare = devices - len(scene.devices) - 1
        gpus += min(spare, len(scene.gpus) + 1 - gpus)
        devices = min(rest - gpus, len(scene.devices) + 1)
        events = min(rows - gpus - devices, len(scene.answers.events) + 1) if events else 0
    return _Room(gpus, devices, events)


def _part(total: int, room: int, offset: int) -> tuple[int, int, str]:
    """From where to where to show, and in words how much of it that is, where it is not all."""
    shown = min(max(room - 1, 0), total)
    begin = min(offset, total - shown)
    return begin, begin + shown, f" {begin + 1}-{begin + shown}/{total}" if shown < total else ""


def _gpu_lines(scene: Scene, look: Look, shape: Layout, room: int) -> tuple[list[Line], int]:
    if not room:
        return [], 0
    rows = sorted_gpus(scene.gpus, look.order)
    begin, end, words = _part(len(rows), room, look.offset if look.view == "GPUs" else 0)
    lines: list[Line] = [_heading(headings(shape, "GPU", words, utf8=look.utf8), look)]
    lines += [gpu_line(row, shape, utf8=look.utf8) for row in rows[begin:end]]
    return lines, len(rows) - (end - begin)


def _device_lines(scene: Scene, look: Look, shape: Layout, room: int, now_s: float) -> tuple[list[Line], int]:
    if not room:
        return [], 0
    rows = sorted_devices(scene.devices, look.order)
    begin, end, words = _part(len(rows), room, look.offset)
    lines: list[Line] = [_heading(headings(shape, "DEVICE", words, utf8=look.utf8), look)]
    lines += [device_line(row, shape, now_s, utf8=look.utf8) for row in rows[begin:end]]
    return lines, len(rows) - (end - begin)


def _events(scene: Scene, look: Look, room: int, now_s: float) -> list[Line]:
    """The newest first."""
    newest = list(reversed(scene.answers.events))[: max(room - 1, 0)]
    if not newest:
        return []
    lines: list[Line] = [_heading("EVENTS", look)]
    for event in newest:
        form = "%H:%M:%S" if now_s - event["time"] < 86400 else "%d %b  "
        when = time.strftime(form, time.localtime(event["time"]))
        severity = event["severity"] if event["severity"] == "info" else event["severity"].upper()
        style = {"warning": "warn", "error": "bad"}.get(event["severity"], "")
        cause = f" ({event['cause'].splitlines()[0]})" if event["cause"] else ""
        what = f"{event['kind']} {event['subject']}".rstrip() + f": {event['what']}{cause}"
        lines.append([(f"{when} ", ""), (f"{severity:7} ", style), (what, "")])
    return lines


def _heading(text: str, look: Look) -> Line:
    return [(fit(text, look.columns, utf8=look.utf8), "head")]


def _foot(look: Look, interval_s: int) -> Line:
    arrows = "↑↓" if look.utf8 else "j k"
    keys = (("q", "quit"), ("s", f"sort: {look.order}"), ("v", f"view: {look.view}"), (arrows, "scroll"))
    line: Line = []
    for key, means in keys:
        line += [(f" {key} ", "head"), (f" {means} ", "")]
    return [*line, (f" every {interval_s} s", "dim")]


def _fitted(line: Line, look: Look) -> Line:
    """The line in the columns that there are."""
    left = look.columns
    fitted: Line = []
    for text, style in line:
        shown = fit(text, min(columns_of(text), left), utf8=look.utf8)
        fitted.append((shown, style))
        left -= columns_of(shown)
        if left <= 0:
            break
    return fitted


def plain(lines: Sequence[Line]) -> str:
    """The lines without styles."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
