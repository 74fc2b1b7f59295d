"""UUIDs and fingerprints.

They are those of `uuid` and `hashlib`, without importing `platform` and OpenSSL for SHA-1:
4 ms of the daemon's start, and 4 MiB of its memory.
"""

from __future__ import annotations

import os
import re

try:
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:  # Python was built without it
    from hashlib import sha1

#: uuid5(NAMESPACE_DNS, "yunion-mps")
NAMESPACE = "9f730301-df5c-5d50-ba8a-1c8a10bd4344"


_GPU_UUID = re.compile(r"\b(?:GPU|MIG)-[0-9A-Za-z-]+")


def gpu_uuids_in(text: str) -> list[str]:
    """Return the UUIDs of GPUs and MIG devices that a text names, each once."""
    return list(dict.fromkeys(_GPU_UUID.findall(text)))


def uuid5(namespace: str, name: str) -> str:
    """Return the UUID of a name in a namespace (RFC 9562, version 5)."""
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
