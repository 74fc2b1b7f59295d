"""A short root: the path of a control daemon's socket below it has at most 107 bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="doctor.", dir="/tmp") as root:
        yield Path(root)
