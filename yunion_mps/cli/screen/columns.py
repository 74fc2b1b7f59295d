"""The columns of the GPUs' and the devices' rows: which there is room for, and how wide they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from yunion_mps.cli.screen.scene import DeviceRow, GpuRow
from yunion_mps.cli.screen.text import bar, duration, fit

Line = list[tuple[str, str]]

_USED, _OF = "USED MiB", "OF MiB"
_WIDTHS = {"bar": 10, "used": 8, "of": 7, "threads": 5, "user": 8, "pid": 7, "since": 6, "command": 8}
#: What a narrow terminal can do without, the least useful first.
_DROP = ("threads", "since", "pid", "command", "user", "bar")
_WIDEST_BAR, _WIDEST_USER = 24, 14
#: From this share of a budget on, a bar warns.
_NEARLY = 0.9


class Layout(NamedTuple):
    """The width of the first column, the address with its mark, and of the others that there is room for."""

    address: int
    widths: dict[str, int]


def layout(gpus: Sequence[GpuRow], devices: Sequence[DeviceRow], columns: int) -> Layout:
    """What has room in so many columns; the same for both tables, so that their bars begin alike."""
    addresses = [*(row.address for row in gpus), *(row.address for row in devices)]
    longest = max([len("DEVICE"), *map(len, addresses)]) + 1
    widths = dict(_WIDTHS)
    for name in _DROP:
        if _taken(longest, widths) <= columns:
            break
        del widths[name]
    spare = columns - _taken(longest, widths)
    for name, widest, part in (("bar", _WIDEST_BAR, 2), ("user", _WIDEST_USER, 3)):
        if name in widths and spare > 0:
            more = min(widest - widths[name], spare // part)
            widths[name] += more
            spare -= more
    if "command" in widths:
        widths["command"] += max(spare, 0)
    return Layout(longest, widths)


def headings(shape: Layout, name: str, words: str, *, utf8: bool) -> str:
    """The heading of a table; `words` say how much of it is to be seen."""
    widths = shape.widths
    named = {"used": _USED, "of": _OF}
    if name == "DEVICE":
        named.update(threads="SM %", user="USER", pid="PID", since="SINCE", command="COMMAND")
    else:
        named.update(threads="", user="IN USE", pid="PROCS", since="", command="NAME")
    right = ("used", "of", "threads", "pid", "since")
    begin = name + words
    room = shape.address + (1 + widths["bar"] if "bar" in widths else 0)
    cells = [
        fit(named[one], width, utf8=utf8, to_the_right=one in right)
        for one, width in widths.items()
        if one != "bar"
    ]
    return " ".join([fit(begin, room, utf8=utf8), *cells])


def device_line(row: DeviceRow, shape: Layout, now_s: float, *, utf8: bool) -> Line:
    """A device's row."""
    since = duration(now_s - row.since_s, 1) if row.since_s is not None else ""
    threads = "" if row.threads is None else f"{row.threads:g}"
    texts = {
        "used": str(row.used_mib) if row.in_use else "",
        "of": "" if row.budget_mib is None else str(row.budget_mib),
        "threads": threads,
        "user": row.user,
        "pid": "" if row.pid is None else str(row.pid),
        "since": since,
        "command": row.command,
    }
    address = row.address + row.mark
    dim = "" if row.in_use else "dim"
    return _line(address, "bad" if row.mark == "!" else dim, row.share, texts, shape, utf8=utf8)


def gpu_line(row: GpuRow, shape: Layout, *, utf8: bool) -> Line:
    """A GPU's row."""
    texts = {
        "used": str(row.used_mib),
        "of": "" if row.total_mib is None else str(row.total_mib),
        "threads": "",
        "user": f"{row.in_use} of {row.devices}",
        "pid": str(row.processes),
        "since": "",
        "command": row.reason or row.name,
    }
    return _line(row.address, "bad" if row.reason else "", row.share, texts, shape, utf8=utf8)


def _line(
    address: str, style: str, share: float, texts: dict[str, str], shape: Layout, *, utf8: bool
) -> Line:
    line: Line = [(fit(address, shape.address, utf8=utf8), style)]
    for name, width in shape.widths.items():
        if name == "bar":
            full = "bad" if share > 1 else "warn" if share >= _NEARLY else "good"
            line += [(" ", ""), (bar(share, width, utf8=utf8), full)]
        else:
            right = name in ("used", "of", "threads", "pid", "since")
            shown = fit(texts[name], width, utf8=utf8, to_the_right=right)
            line.append((f" {shown}", "bad" if name == "used" and share > 1 else ""))
    return line


def _taken(address: int, widths: dict[str, int]) -> int:
    return address + sum(width + 1 for width in widths.values())
