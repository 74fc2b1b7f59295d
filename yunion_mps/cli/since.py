"""Moments as people write them: `10m`, `yesterday`, `2026-11-20 13:45`."""

from __future__ import annotations

import re
import time

import click

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_FORMS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S")
_RIGHT = (
    "write 10m, 2h or 3d for so long ago, today, yesterday, a date as 2026-11-20, a time as "
    "'2026-11-20 13:45', or seconds since 1970"
)
#: The largest that the daemon takes.
LATEST_S = 99_999_999_999


def moment(text: str, now_s: float) -> int:
    """The moment in s since 1970, by the local time zone; raises ValueError where it is none."""
    ago = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if ago:
        return max(0, int(now_s) - int(ago[1]) * _UNITS_S[ago[2]])
    if re.fullmatch(r"[0-9]{9,11}", text):  # fewer digits are no date that anybody means
        return int(text)
    if text in ("today", "yesterday"):
        now = time.localtime(now_s)
        day = now.tm_mday - (text == "yesterday")
        return int(time.mktime((now.tm_year, now.tm_mon, day, 0, 0, 0, 0, 0, -1)))
    for form in _FORMS:
        try:
            return _in_seconds(time.strptime(text.replace("T", " ", 1), form))
        except ValueError:
            continue
    raise ValueError(text)


def _in_seconds(date: time.struct_time) -> int:
    """As mktime(3), which knows by the date whether summer time was in force; raises ValueError."""
    try:
        return min(max(0, int(time.mktime((*date[:8], -1)))), LATEST_S)
    except OverflowError:
        raise ValueError from None


class Moment(click.ParamType):
    """An option's value that is a moment."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The moment in s since 1970; wrong usage where it is none."""
        if isinstance(value, int):
            return value
        try:
            return moment(str(value), time.time())
        except ValueError:
            self.fail(f"{value!r} is no time: {_RIGHT}.", param, ctx)
