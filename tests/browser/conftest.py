"""A browser for all tests, and hosts with the daemon on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser.chromium import Chromium
from integration.conftest import make_daemon, make_host

__all__ = ["make_daemon", "make_host"]


@pytest.fixture(scope="package")
def program() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture
def browser(program: Chromium) -> Iterator[Chromium]:
    yield program
    program.close_pages()
