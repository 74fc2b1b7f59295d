"""How long those wait who ask for the metrics while the driver hangs."""

from __future__ import annotations

import asyncio
import selectors
import threading
from types import SimpleNamespace
from typing import Any

from yunion_mps.leases.ledger import Ledger
from yunion_mps.service.metrics import DRIVER_TIMEOUT_S, Metrics
from yunion_mps.service.usage import ProcessDevices

from unit.leases.shares import device


class Clock(selectors.DefaultSelector):
    """A selector that waits for nothing: its clock is set to when the wait would have ended."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0 if timeout is not None else None)
        if not found:
            self.now_s += timeout or 0.0
        return found


def test_several_who_scrape_wait_for_a_hanging_driver_no_longer_than_one() -> None:
    """More than the gateway's patience, and the daemon would be told to be down."""
    gate = threading.Event()
    nvml = SimpleNamespace(processes=gate.wait, mps_clients=dict)
    plan = SimpleNamespace(devices=[device(0, 0)])
    supervisor: Any = SimpleNamespace(nvml=nvml, domains=(), snapshot=lambda: SimpleNamespace(plan=plan))
    nothing: Any = None
    ledger = Ledger()
    devices = ProcessDevices(supervisor, ledger)
    metrics = Metrics(supervisor, nothing, ledger, nothing, devices, nothing)
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]

    async def scrapes() -> None:
        for _ in range(8):
            await metrics.observe()

    try:
        loop.run_until_complete(scrapes())
        assert clock.now_s < 2 * DRIVER_TIMEOUT_S
    finally:
        gate.set()
        loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(loop), return_exceptions=True))
        loop.close()
