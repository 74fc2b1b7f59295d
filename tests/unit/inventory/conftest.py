"""Simulated hosts with NVML open on them, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from yunion_mps.inventory import Nvml

from simhost import Description, SimHost
from unit.inventory.opened import OpenedHost, OpenHost


@pytest.fixture
def open_host() -> Iterator[OpenHost]:
    with ExitStack() as stack:

        def opened(description: Description | None = None) -> OpenedHost:
            host = stack.enter_context(SimHost.create(description))
            stack.enter_context(host.pynvml())
            return OpenedHost(host, stack.enter_context(Nvml()))

        yield opened
