"""Servers over snapshots made by hand. See server_host.py for what a ServerHost can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from yunion_mps.core.models import Snapshot
from yunion_mps.http.pool import Limits

from unit.http import snapshots
from unit.http.server_host import ServerHost

Serve = Callable[..., ServerHost]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Make a server: over the reference case, or another snapshot, and perhaps with other limits."""
    with ExitStack() as stack:

        def make(snapshot: Snapshot | None = None, **limits: float) -> ServerHost:
            shown = snapshots.reference() if snapshot is None else snapshot
            return stack.enter_context(ServerHost(shown, Limits()._replace(**limits)))  # type: ignore[arg-type]

        yield make


@pytest.fixture
def host(serve: Serve) -> ServerHost:
    return serve()
