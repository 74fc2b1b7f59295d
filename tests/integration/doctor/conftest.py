"""Hosts for the doctor to look at, with or without their daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from integration.doctor_host import Scene


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def scene(stack: ExitStack) -> Scene:
    """A healthy host, its daemon not started."""
    return Scene(stack)


@pytest.fixture
def ready(scene: Scene) -> Scene:
    return scene.start()
