"""Times, numbers and amounts of memory: as text, and distributed over devices.

The API writes times as RFC 3339 strings in UTC with milliseconds, which also sort as text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence

_FORM = r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([Zz]|[+-]\d\d:\d\d)"


def rfc3339(moment_s: float) -> str:
    """Format a time in s since 1970 as `2026-11-20T13:45:00.123Z`, truncated to milliseconds."""
    whole_s, ms = divmod(round(moment_s * 1_000_000) // 1000, 1000)  # 0.123 is slightly less than 0.123
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole_s)) + f".{ms:03}Z"


def seconds(text: str) -> float:
    """Parse an RFC 3339 time into s since 1970; raises ValueError."""
    found = re.fullmatch(_FORM, text, re.ASCII)
    if not found:
        raise ValueError(f"{text!r} is not an RFC 3339 time")
    from datetime import datetime  # 2 ms, which commands that show no times need not pay

    date, clock, fraction, zone = found.groups()
    zone = "+00:00" if zone in "Zz" else zone
    return datetime.fromisoformat(f"{date}T{clock}{zone}").timestamp() + float(f"0.{fraction or 0}")


def count(number: int, name: str, names: str = "") -> str:
    """Return `1 GPU`, `2 GPUs`; `names` is the plural if it does not end in s."""
    return f"{number} {name if number == 1 else names or name + 's'}"


def filled(
    addresses: Sequence[str], used_mib: int, budgets_mib: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Distribute the MiB used over the devices, filling one after the other; the last gets the rest."""
    for address in addresses:
        part_mib = used_mib if address == addresses[-1] else min(used_mib, budgets_mib.get(address, 0))
        yield address, part_mib
        used_mib -= part_mib


def mebibytes(amount: str) -> int | None:
    """Convert `8GiB` or `512MiB` to MiB; None if it is not such an amount."""
    found = re.fullmatch(r"([0-9]{1,9})(MiB|GiB)", amount)
    return int(found[1]) * (1024 if found[2] == "GiB" else 1) if found else None
