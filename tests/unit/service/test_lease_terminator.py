"""Leases that are released after their processes are terminated, and what may happen meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from yunion_mps.core.errors import BusyError
from yunion_mps.core.models import Owner
from yunion_mps.service.lease_terminator import LeaseTerminator

from unit.service.test_leases import ROOT, LeaseHost, host, run

__all__ = ["host"]


class FakeTerminator:
    """Records whose processes it terminates, and calls `meanwhile` while it does."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, str]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def terminate_lease(self, lease: Any, uid: int, cause: str = "", **_: Any) -> list[Any]:
        self.done.append((lease["name"], uid, cause))
        await asyncio.sleep(0)
        self.meanwhile()
        return []


def lease_terminator(leases: LeaseHost) -> tuple[LeaseTerminator, FakeTerminator]:
    fake = FakeTerminator()
    terminator: Any = fake
    return LeaseTerminator(leases.leases, terminator), fake


def test_a_lease_that_ends_with_its_process_counts_as_released(host: LeaseHost) -> None:
    async def work() -> None:
        releaser, terminator = lease_terminator(host)
        lease = await host.take("job")
        terminator.meanwhile = lambda: host.leases.end(lease["id"], "its process ended")
        assert (await releaser.release("job", Owner(ROOT)))["id"] == lease["id"]

    run(work())


def test_a_releaser_even_if_its_processes_cannot_be_terminated(host: LeaseHost) -> None:
    async def work() -> None:
        releaser, terminator = lease_terminator(host)

        def fail() -> None:
            raise BusyError("the daemon is stopping")

        terminator.meanwhile = fail
        await host.take("job")
        await releaser.release("job", Owner(ROOT))
        assert host.held == []

    run(work())
