"""Hosts with their daemon, for the doctor to look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from unit.doctor.scene import Scene


@pytest.fixture
def ready() -> Iterator[Scene]:
    """A healthy host whose daemon serves."""
    with ExitStack() as stack:
        yield Scene(stack).start()
