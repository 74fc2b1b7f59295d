"""Leases whose processes are ended first, and what may happen to the lease meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from yunion_mps.errors import BusyError
from yunion_mps.models import Owner
from yunion_mps.service.lease_ends import LeaseEnds

from unit.service.test_leases import ROOT, LeaseHost, host, run

__all__ = ["host"]


class FakeTerminator:
    """Notes whose processes it ends; what `meanwhile` does happens just then."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, str]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def end_lease(self, lease: Any, uid: int, cause: str = "", **_: Any) -> list[Any]:
        self.done.append((lease["name"], uid, cause))
        await asyncio.sleep(0)
        self.meanwhile()
        return []


def ends(leases: LeaseHost) -> tuple[LeaseEnds, FakeTerminator]:
    fake = FakeTerminator()
    terminator: Any = fake
    return LeaseEnds(leases.leases, terminator), fake


def test_a_lease_that_ends_with_its_process_was_released(host: LeaseHost) -> None:
    async def work() -> None:
        end, terminator = ends(host)
        lease = await host.take("job")
        terminator.meanwhile = lambda: host.leases.end(lease["id"], "its process ended")
        assert (await end.release("job", Owner(ROOT)))["id"] == lease["id"]

    run(work())


def test_a_lease_ends_even_if_its_processes_cannot_be_ended(host: LeaseHost) -> None:
    async def work() -> None:
        end, terminator = ends(host)

        def fail() -> None:
            raise BusyError("the daemon is stopping")

        terminator.meanwhile = fail
        await host.take("job")
        await end.release("job", Owner(ROOT))
        assert host.held == []

    run(work())
