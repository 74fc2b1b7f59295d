"""UUIDs, fingerprints and addresses.

UUIDs and fingerprints are those of `uuid` and `hashlib`, without importing `platform` and OpenSSL for SHA-1:
4 ms of the daemon's start, and 4 MiB of its memory.
"""

from __future__ import annotations

import os

try:
    from _sha1 import sha1  # type: ignore[import-not-found]
except ImportError:  # Python was built without it
    from hashlib import sha1

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


def gpu_of(address: str) -> str:
    """Return the address of the device's GPU or MIG instance; empty if the address is a GPU's itself.

    A whole instance has the instance's address, `00:06.0-g1`; `00:06.0-g1-0` is a share of the instance.
    """
    gpu, _, slot = address.rpartition("-")
    return address if slot.startswith("g") else gpu


def physical_gpu(address: str) -> str:
    """Return the address of the GPU itself, given that of a device, MIG instance or GPU."""
    return address.partition("-")[0]


def is_on_instance(address: str) -> bool:
    """Whether the address is that of a MIG instance or of a device on one."""
    return "-g" in address


def is_part(address: str, gpu: str) -> bool:
    """Whether `address` is that of `gpu`, or of a device of it or of its MIG instances."""
    return address == gpu or address.startswith(f"{gpu}-")


def _uuid(data: bytes, version: int) -> str:
    digest = bytearray(data[:16])
    digest[6] = digest[6] & 0x0F | version << 4
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
