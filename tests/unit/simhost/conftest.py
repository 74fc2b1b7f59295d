"""Hosts for these tests, and what nvidia-smi and pynvml say on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from integration.conftest import MakeHost, make_host
from simhost import SimHost

__all__ = ["MakeHost", "make_host", "nvml", "rows", "smi"]


@contextmanager
def nvml(host: SimHost) -> Iterator[tuple[Any, Any]]:
    """Yield pynvml and the handle of the host's first GPU."""
    with host.pynvml() as n:
        n.nvmlInit()
        try:
            yield n, n.nvmlDeviceGetHandleByIndex(0)
        finally:
            n.nvmlShutdown()


def smi(host: SimHost, *words: object) -> str:
    return host.run(["nvidia-smi", *words]).stdout


def rows(table: str) -> list[str]:
    """Return the rows of a table of nvidia-smi; what it breaks into two lines is one row."""
    found: list[str] = []
    for line in re.findall(r"^\|(.*)\|$", table, re.MULTILINE):
        if match := re.match(r" {2,3}\d+ +(.*)", line):
            found.append(match[1])
        elif found:
            found[-1] += line
    return [" ".join(row.replace("MIG ", "").split()) for row in found]
