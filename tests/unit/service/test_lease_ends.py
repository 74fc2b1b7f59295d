"""Leases whose processes are ended first, and what may happen to the lease meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from yunion_mps.errors import BusyError
from yunion_mps.models import Owner
from yunion_mps.service.lease_ends import LeaseEnds

from unit.service.test_leases import ALICE, ROOT, LeaseHost, host, run

__all__ = ["host"]


class FakeTerminator:
    """Notes whose processes it ends; what `meanwhile` does happens just then."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, str]] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.done_once = asyncio.Event()

    async def end_lease(self, lease: Any, uid: int, cause: str = "", **_: Any) -> list[Any]:
        self.done.append((lease["name"], uid, cause))
        await asyncio.sleep(0)
        self.meanwhile()
        self.done_once.set()
        return []


def ends(leases: LeaseHost) -> tuple[LeaseEnds, FakeTerminator]:
    fake = FakeTerminator()
    terminator: Any = fake
    return LeaseEnds(leases.leases, terminator), fake


async def expiry(terminator: FakeTerminator) -> None:
    """Wait until the processes of a lease have been ended, and what follows from that."""
    await terminator.done_once.wait()
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_processes_of_an_expired_lease_are_ended_before_it(host: LeaseHost) -> None:
    async def work() -> None:
        _, terminator = ends(host)
        held: list[Any] = []
        terminator.meanwhile = lambda: held.extend(host.held)
        await host.take("job", ALICE, ttl_s=0.05)
        await expiry(terminator)
        assert terminator.done == [("job", ALICE, "its lease ended: it was not renewed in time")]
        assert (held, host.held) == (["job"], [])

    run(work())


def test_a_lease_that_is_renewed_meanwhile_continues(host: LeaseHost) -> None:
    async def work() -> None:
        _, terminator = ends(host)
        lease = await host.take("job", ALICE, ttl_s=0.5)
        terminator.meanwhile = lambda: host.leases.renew(lease["id"], Owner(ALICE))
        await expiry(terminator)
        assert (len(terminator.done), host.held) == (1, ["job"])

    run(work())


def test_a_lease_that_is_released_meanwhile_has_ended(host: LeaseHost) -> None:
    async def work() -> None:
        _, terminator = ends(host)
        terminator.meanwhile = lambda: host.release("job", ALICE)
        await host.take("job", ALICE, ttl_s=0.05)
        await expiry(terminator)
        assert host.held == []

    run(work())


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


def test_a_lease_of_the_previous_daemon_expires_in_the_next(host: LeaseHost) -> None:
    async def work() -> None:
        ends(host)
        await host.take("job", ALICE, ttl_s=0.05)
        await host.restart()
        _, terminator = ends(host)
        await expiry(terminator)
        assert (len(terminator.done), host.held) == (1, [])

    run(work())
