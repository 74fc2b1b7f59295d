"""Work that a test does as another user than root."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


def as_user(work: Callable[[], list[str]]) -> list[str]:
    """What `work` returns as the user nobody, in a child process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(write, "\n".join(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    return lines


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which needs root")
