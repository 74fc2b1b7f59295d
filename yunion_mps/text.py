"""Text: made safe to show, and the forms in which times, numbers, amounts of memory and ids are written.

Text from other processes, files and drivers is escaped once, where it is read. Outputs escape all text again,
which does not change what is escaped already. The API writes times as RFC 3339 strings in UTC with
milliseconds, which also sort as text. Ids are those of `uuid` and `hashlib`, without importing `platform` and
OpenSSL for SHA-1: 4 ms of the daemon's start and 4 MiB of its memory.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence

try:
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:  # Python was built without it
    from hashlib import sha1


def printable(text: str) -> str:
    """Return the text on one line, with line breaks, control characters, bidirectional marks etc. escaped.

    Letters of all languages are kept; printable text is not changed.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def command_line(words: Sequence[str]) -> str:
    """Join a command's words; one that contains spaces is quoted, unless it is a process's title."""
    if len(words) > 1:
        words = [f"'{word}'" if " " in word else word for word in words]
    return printable(" ".join(words))


def decoded(raw: bytes) -> str:
    """Decode bytes that should be UTF-8, onto one line."""
    return printable(raw.decode(errors="replace"))


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


#: uuid5(NAMESPACE_DNS, "yunion-mps")
NAMESPACE = "9f730301-df5c-5d50-ba8a-1c8a10bd4344"


def uuid5(namespace: str, name: str) -> str:
    data = bytes.fromhex(namespace.replace("-", "")) + name.encode()
    return _uuid(sha1(data).digest(), 5)  # noqa: S324 - prescribed by the standard, and no secret


def random_uuid() -> str:
    """Return a new UUID that cannot be guessed."""
    return _uuid(os.urandom(16), 4)


def fingerprint(data: bytes) -> str:
    """Return 32 hexadecimal digits that are equal for equal data; not for secrets."""
    digits: str = sha1(data).hexdigest()[:32]  # noqa: S324 - see above
    return digits


def _uuid(data: bytes, version: int) -> str:
    digest = bytearray(data[:16])
    digest[6] = digest[6] & 0x0F | version << 4
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
