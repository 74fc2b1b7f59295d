"""Times, durations and amounts of memory as text.

The API writes times as RFC 3339 strings in UTC with milliseconds, which also sort as text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

_FORM = r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)"


def rfc3339(moment_s: float) -> str:
    """Format a time in s since 1970 as `2026-11-20T13:45:00.123Z`, truncated to milliseconds."""
    whole_s, ms = divmod(round(moment_s * 1_000_000) // 1000, 1000)  # 0.123 is slightly less than 0.123
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole_s)) + f".{ms:03}Z"


def seconds(text: str) -> float:
    """Parse an RFC 3339 time into s since 1970; raises ValueError."""
    match = re.fullmatch(_FORM, text, re.ASCII)
    if not match:
        raise ValueError(f"{text!r} is not an RFC 3339 time")
    from datetime import datetime  # takes 2 ms, which commands that show no times save

    date, clock, fraction, zone = match.groups()
    zone = "+00:00" if zone in "Zz" else zone
    return datetime.fromisoformat(f"{date}T{clock}{zone}").timestamp() + float(f"0.{fraction or 0}")


def total_mib(amounts: Iterable[int | None]) -> int | None:
    """Return the sum of the amounts; None if one of them is unknown."""
    total = 0
    for mib in amounts:
        if mib is None:
            return None
        total += mib
    return total


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def duration_s(text: str) -> int | None:
    """Parse a duration such as `90`, `90s`, `10m` or `1d` into s; None if it is not a duration."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw]?)", text)
    return int(match[1]) * _UNITS_S[match[2] or "s"] if match else None


def duration_text(whole_s: int) -> str:
    """Format a duration in the largest unit up to days that divides it, as people type it: `1000d`, `90m`."""
    for unit in ("d", "h", "m"):
        if whole_s % _UNITS_S[unit] == 0:
            return f"{whole_s // _UNITS_S[unit]}{unit}"
    return f"{whole_s}s"


def mebibytes(amount: str) -> int | None:
    """Convert `8GiB` or `512MiB` to MiB; None if it is not such an amount."""
    match = re.fullmatch(r"([0-9]{1,9})(MiB|GiB)", amount)
    if not match:
        return None
    factor = 1024 if match[2] == "GiB" else 1
    return int(match[1]) * factor
