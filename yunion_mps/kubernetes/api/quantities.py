"""Quantities, as Kubernetes writes amounts: 6Gi, 33300m.

Source: Kubernetes API, section "Quantity"; k8s.io/apimachinery, pkg/api/resource/quantity.go.
"""

from __future__ import annotations

import re

from yunion_mps.core.errors import InfeasibleError

_KIB = 1024
_BINARY_SUFFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_SUFFIXES = {"": 1, **_BINARY_SUFFIXES, **_DECIMAL_SUFFIXES}
#: Kubernetes' quantities are smaller.
_LIMIT = 1 << 63
#: How much of what is not a quantity is shown.
_MAX_SHOWN = 64


def memory_quantity(mib: int) -> str:
    """Return the amount as the API server writes it: with the largest unit of which it is a multiple."""
    for suffix in ("Mi", "Gi"):
        if mib % _KIB:
            return f"{mib}{suffix}"
        mib //= _KIB
    return f"{mib}Ti"


def percentage_quantity(percentage: float) -> str:
    """Return the percentage as the API server writes it: 33.3 as 33300m, and 25.0 as 25."""
    thousandths = round(percentage * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def quantity(text: str) -> float:
    """Return the value of a quantity.

    Raises InfeasibleError if it is none, or if no 64-bit integer can hold it.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+|[0-9]+\.)(?:[eE]([+-]?[0-9]{1,2})|(m|[KMGTPE]i|[kMGTPE])?)", text)
    if not match:
        raise _not_a_quantity(text)
    number, exponent, suffix = match.groups()
    if suffix == "m":
        value = float(number) / 1000
    else:
        value = float(number) * 10.0 ** int(exponent or 0) * _SUFFIXES[suffix or ""]
    if value >= _LIMIT:  # also infinite, as a float of more than 308 digits is
        raise _not_a_quantity(text)
    return value


def _not_a_quantity(text: str) -> InfeasibleError:
    return InfeasibleError(f"{text[:_MAX_SHOWN]!r} is not a quantity", "see the claim's consumedCapacity")
