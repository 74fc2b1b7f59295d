"""A simulated host and NVML on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from yunion_mps.core.models import Gpu, Inventory
from yunion_mps.core.paths import Paths
from yunion_mps.inventory.nvml import Nvml
from yunion_mps.inventory.scan import Scanner

from simhost import Description, SimHost


class OpenedHost(NamedTuple):
    """The host, and NVML as a program holds it open."""

    sim: SimHost
    nvml: Nvml

    @property
    def paths(self) -> Paths:
        return Paths(str(self.sim.root))

    def scan(self) -> Inventory:
        return Scanner(self.paths).scan(self.nvml)

    def gpus(self) -> tuple[Gpu, ...]:
        return self.scan().gpus


OpenHost = Callable[..., OpenedHost]


@pytest.fixture
def open_host() -> Iterator[OpenHost]:
    with ExitStack() as stack:

        def opened(description: Description | None = None) -> OpenedHost:
            host = stack.enter_context(SimHost.create(description))
            stack.enter_context(host.pynvml())
            return OpenedHost(host, stack.enter_context(Nvml()))

        yield opened
