"""One frame of the live view: lines of words and styles that fit a terminal. Time and size are given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.cli.output import cell
from yunion_mps.cli.screen.columns import Layout, device_line, gpu_line, headings, layout
from yunion_mps.cli.screen.scene import ORDERS, Scene, sorted_devices, sorted_gpus
from yunion_mps.cli.screen.text import columns_of, fit
from yunion_mps.overview.findings import NOTICE, PROBLEM, overall_state
from yunion_mps.overview.words import count

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


class Silence(NamedTuple):
    """Why nobody has answered since then (s since 1970), or where that is None, what is not known."""

    since_s: float | None
    why: str
    remedy: str = ""


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


def frame(scene: Scene, look: Look, silence: Silence | None, now_s: float, interval_s: int) -> Frame:
    """What there is to see; with `silence`, what there was to see."""
    whole = look.rows >= WHOLE
    top = _top(scene, silence, now_s)
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


def _top(scene: Scene, silence: Silence | None, now_s: float) -> list[Line]:
    status = scene.answers.status
    begin = f"yunion-mps {status['version']}  {clock(now_s)}  "
    if silence and silence.since_s is not None:
        old = f"no answer since {clock(silence.since_s)}; all below is from then"
        lines: list[Line] = [[(begin, "bold"), (old, "bad")], *_silence(silence)]
        return [*lines, _counts(scene)]
    state = overall_state(status, scene.findings)
    driver = status["driver"]["version"]
    about = f"  driver {driver}" if driver else ""
    style = {"ready": "good", "degraded": "warn", "failed": "bad"}.get(state, "")
    first: Line = [(begin, "bold"), (state, style), (about, "")]
    return [first, _counts(scene), *(_silence(silence) if silence else [])]


def _silence(silence: Silence) -> list[Line]:
    label = "Not known: " if silence.since_s is None else "Problem: "
    lines: list[Line] = [[(label, "bad"), (silence.why, "")]]
    return [*lines, [(f"  do: {silence.remedy}", "")]] if silence.remedy else lines


def clock(moment_s: float) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(moment_s))


def _counts(scene: Scene) -> Line:
    """What there is, in one line."""
    status = scene.answers.status
    devices, leases, waiting = status["devices"], scene.answers.leases, len(scene.answers.waiting)
    total = sum(row.devices for row in scene.gpus)
    parts = [
        count(len(scene.gpus), "GPU"),
        f"{count(total, 'device')}: {scene.in_use} used, {scene.free} free"
        + (f", {devices['unavailable']} unavailable" if devices["unavailable"] else ""),
        *([f"{scene.free_mib} MiB free in units"] if scene.free_mib is not None else []),
        count(len(leases), "lease") + (f", {waiting} waiting" if waiting else ""),
        count(scene.processes, "process", "processes"),
    ]
    return [("; ".join(parts), "")]


def _findings(scene: Scene, most: int) -> list[Line]:
    """What is wrong, and below problems that are mended alike what to do about them, in so many lines."""
    told: list[list[Line]] = []
    for one, after in zip(scene.findings, [*scene.findings[1:], None]):
        style = "bad" if one.kind == PROBLEM else "warn"
        told.append([[(f"{one.kind}: ", style), (one.what, "")]])
        if one.kind in (NOTICE, PROBLEM) and (after is None or after.remedy != one.remedy):
            told[-1].append([(f"  do: {one.remedy}", "")])
    if sum(map(len, told)) <= most:
        return [line for lines in told for line in lines]
    shown: list[Line] = []
    left = sum(one.number for one in scene.findings)
    for one, lines in zip(scene.findings, told):
        if len(shown) < most - 1:
            shown += lines
            left -= one.number
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
