"""A host's two files, in a folder with a short path: the pipe directory's sockets must fit under it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.config.files import Files


@pytest.fixture
def files() -> Iterator[Files]:
    with tempfile.TemporaryDirectory(prefix="cfg.", dir="/tmp") as root:
        Path(root).chmod(0o755)
        yield Files(Path(root))
