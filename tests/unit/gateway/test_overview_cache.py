"""The overview that all open pages share."""

from __future__ import annotations

import asyncio
import os
from asyncio import StreamReader, StreamWriter
from pathlib import Path

import pytest
from yunion_mps.core.errors import UnreachableError
from yunion_mps.core.paths import Paths
from yunion_mps.gateway.client import OverviewCache

from clocks import SkippingLoop

pytestmark = pytest.mark.processes

_PAGES = 5


def test_a_hanging_daemon_is_reported_to_all_pages_at_the_same_time(tmp_path: Path) -> None:
    """A page that asked the daemon by itself after the first is told would be answered later."""
    paths = Paths(str(tmp_path))
    os.makedirs(os.path.dirname(paths.socket))
    connections = []

    async def hang(reader: StreamReader, writer: StreamWriter) -> None:
        connections.append(writer)
        await reader.read()
        writer.close()

    async def ask() -> list[object]:
        async with await asyncio.start_unix_server(hang, paths.socket):
            cache = OverviewCache(paths)
            pages = [cache.overview(event=99999) for _ in range(_PAGES)]
            return [*await asyncio.gather(*pages, return_exceptions=True)]

    loop = SkippingLoop()
    answers = loop.run_until_complete(ask())
    loop.close()
    assert [type(answer) for answer in answers] == [UnreachableError] * _PAGES
    assert {str(answer) for answer in answers} == {"the daemon did not answer within 10 s"}
    assert len(connections) == 1, "one question for all"
