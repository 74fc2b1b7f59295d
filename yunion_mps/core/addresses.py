"""Addresses: a GPU's PCI address, and what is appended to it for its MIG instances and devices.

A PCI address is spelt as in sysfs: `0000:00:06.0`, or `10003:00:00.0`, because a domain can have up to eight
digits. Outputs omit domain 0000, as Cloudpods does. `00:06.0-g1` is a MIG instance, `00:06.0-3` and
`00:06.0-g1-3` are devices, and `00:06.0-m3` is a device of a pool.

Source: Linux, Documentation/PCI/sysfs-pci.rst; for what NVML writes, NVML API Reference, nvmlPciInfo_t.
"""

from __future__ import annotations

import functools
import re

#: Domain (not always given), bus, device and function.
_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([01]?[0-9a-f])\.([0-7])")
#: The domain that outputs omit.
_DOMAIN_0 = "0000:"
#: A regular expression for the address of a GPU as outputs show it.
SHOWN_ADDRESS = r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"


@functools.lru_cache(maxsize=256)
def normalise_address(text: str) -> str | None:
    """Return `text` in sysfs' spelling of PCI addresses (`0000:00:06.0`); None if it is not an address.

    NVML writes eight domain digits, people often none, and both sometimes in capitals.
    """
    match = _ADDRESS.fullmatch(text.strip().lower())
    if not match:
        return None
    domain, bus, device = (int(part or "0", 16) for part in match.groups()[:3])
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4]}"


def short_address(address: str) -> str:
    """Return an address in sysfs' spelling, of a GPU, MIG instance or device, as outputs show it."""
    return address.removeprefix(_DOMAIN_0)


def full_address(address: str) -> str:
    """Return the address of a GPU with its domain, as nvidia-smi requires it; other text is not changed."""
    return normalise_address(address) or address


def shown_address(text: str) -> str:
    """Return what a user wrote for a GPU, MIG instance or device as outputs show it.

    An address may have any spelling of its PCI address. Other text, such as a UUID or the beginning of an
    address, is not changed except that domain 0000 is omitted.
    """
    gpu, dash, part = text.strip().partition("-")
    return short_address(f"{full_address(gpu)}{dash}{part}")


def sort_key(address: str) -> tuple[int, str, int]:
    """Order addresses of GPUs in sysfs' spelling as the bus does, by the number of their domain first.

    A GPU's MIG instances follow it.
    """
    gpu, _, instance = address.partition("-g")
    return len(gpu), gpu, int(instance or -1)


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
    """Return whether the address is that of a MIG instance or of a device on one."""
    return "-g" in address


def is_part(address: str, gpu: str) -> bool:
    """Return whether `address` is that of `gpu`, or of a device of it or of its MIG instances."""
    return address == gpu or address.startswith(f"{gpu}-")
