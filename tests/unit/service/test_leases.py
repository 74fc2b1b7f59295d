"""Leases over the state file: the queue, what a full disk and the next daemon make of them, and quotas."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from yunion_mps.answers import LeaseRecordJson
from yunion_mps.containers.lookup import Containers
from yunion_mps.core.errors import HostError, InfeasibleError, LockedError, NotAllowedError, NothingFreeError
from yunion_mps.core.models import ALL, Event, Holder, Owner
from yunion_mps.core.paths import Paths
from yunion_mps.core.units import seconds
from yunion_mps.host import store
from yunion_mps.host.proc import started_ticks
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.request import LeaseRequest, QueuedRequest
from yunion_mps.leases.storage import LeaseStorage
from yunion_mps.service import leases
from yunion_mps.service.instances import InstanceCheck
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.queries import Queries
from yunion_mps.service.server_users import ServerUsers

from unit import builders
from unit.described_supervisor import DescribedSupervisor
from unit.http.snapshots import snapshot

ONE, TWO = builders.gpu(1), builders.gpu(2)
ROOT, ALICE, BOB = 0, 1000, 1001
FIRST, SECOND = "a" * 32, "b" * 32
ONESELF = Holder("container", ROOT, os.getpid(), started_ticks(os.getpid()))


class LeaseHost:
    """The leases of one daemon after another on a host with two GPUs, each divided by four."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.supervisor = DescribedSupervisor(snapshot(ONE, TWO, multiuser=True), paths=paths)
        self.store = self.supervisor.store()
        self.leases = self._daemon()

    def _daemon(self) -> LeaseService:
        ledger = Ledger()
        queries = Queries(self.supervisor.snapshot, 0.0, 1, ledger=ledger)
        publisher = CdiPublisher(self.paths, self.supervisor)
        users = ServerUsers(self.supervisor, queries, asyncio.Lock(), lambda: None)
        instances = InstanceCheck(self.supervisor, queries, poll=lambda: asyncio.sleep(0))
        return LeaseService(
            self.supervisor,
            queries,
            ledger=ledger,
            containers=Containers(self.paths),
            cdi=publisher,
            users=users,
            instances=instances,
        )

    @property
    def events(self) -> list[tuple[str, str]]:
        newest = self.supervisor.event_log.newest(0.0, 100, "lease")
        return [(one.event.subject, one.event.what) for one in newest]

    async def restart(self) -> None:
        """Go on with the leases of the next daemon."""
        self.leases.cancel_queued()
        for _ in range(5):  # what waits hears of it
            await asyncio.sleep(0)
        self.leases.close()
        self.leases = self._daemon()
        self.leases.restore()

    async def take(
        self,
        name: str,
        uid: int = ROOT,
        *,
        request: LeaseRequest = LeaseRequest(),  # noqa: B008 - it is frozen
        wait_s: float = 0.0,
        key: str = "",
        ttl_s: float = 600.0,
    ) -> LeaseRecordJson:
        queued = QueuedRequest(request, Holder("name", uid, name=name, ttl_s=ttl_s), key)
        lease, _ = await self.leases.take(queued, lambda _: None, wait_s)
        return lease

    async def queue(self, name: str, uid: int = ROOT, **more: Any) -> asyncio.Task[LeaseRecordJson]:
        task = asyncio.ensure_future(self.take(name, uid, **{"wait_s": 60.0, **more}))
        await asyncio.sleep(0)
        assert not task.done()
        return task

    async def fill(self, number: int = 8) -> list[LeaseRecordJson]:
        return [await self.take(f"held-{place}") for place in range(number)]

    def release(self, name: str, uid: int = ROOT) -> None:
        self.leases.release(name, Owner(uid))

    @property
    def waiting(self) -> list[str | None]:
        return [one["name"] for one in self.leases.waiting()]

    @property
    def held(self) -> list[str | None]:
        return [one["name"] for one in self.leases.leases()]

    def refuse(self, change: str, table: str) -> None:
        """Let the state file refuse such changes, as a full disk makes it."""
        full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        self.store.write(f"CREATE TRIGGER no_{change} BEFORE {change} ON {table} {full}", [()])

    @property
    def positions(self) -> int:
        return len(self.store.read("SELECT 1 FROM queued_request"))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LeaseHost]:
    paths = Paths(str(tmp_path))
    host = LeaseHost(paths)
    yield host
    host.supervisor.release()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_a_reservation_ends_at_once_when_its_request_times_out(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill(7)
        wants_two = await host.queue("two", request=LeaseRequest(2, across=True), wait_s=0.05)
        wants_one = await host.queue("one")
        with pytest.raises(NothingFreeError):
            await wants_two
        assert host.waiting == []
        assert (await wants_one)["name"] == "one"

    run(work())


def test_queued_requests_that_become_infeasible_are_refused(host: LeaseHost) -> None:
    async def work() -> None:
        (first, *_) = await host.fill()
        refused = [
            await host.queue("named", request=LeaseRequest(devices=("02:00.0-3",))),
            await host.queue("across", request=LeaseRequest(2, across=True)),
        ]
        anyone = await host.queue("anyone")
        host.supervisor.described = snapshot(ONE)._replace(version=2)
        host.leases.serve()
        for task in refused:
            with pytest.raises(InfeasibleError, match="can never be allocated"):
                await task
        assert host.waiting == ["anyone"]
        host.release(first["id"])
        assert (await anyone)["devices"] == first["devices"]

    run(work())


def test_a_lease_whose_end_was_not_stored_takes_no_device_after_a_crash(host: LeaseHost) -> None:
    async def work() -> None:
        await host.take("ended")
        host.refuse("DELETE", "lease")
        host.release("ended")
        assert host.held == []
        with pytest.raises(HostError):
            await host.take("new")
        host.store.write("DROP TRIGGER no_DELETE", [()])  # there is room again
        new = await host.take("new")
        await host.restart()
        assert [one["id"] for one in host.leases.leases()] == [new["id"]]

    run(work())


@contextmanager
def locked(host: LeaseHost) -> Iterator[None]:
    """Another process locks the state file, and this thread is that of the event loop."""
    other = sqlite3.connect(host.paths.store, isolation_level=None)
    with host.store.without_waiting(), closing(other):
        other.execute("BEGIN IMMEDIATE")
        yield


def test_what_cannot_be_stored_during_a_lock_is_stored_after_it(
    host: LeaseHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RETRY_S", 0.01)

    def stored() -> dict[str, float]:
        kept = LeaseStorage(host.store).read()
        return {lease.holder.name: lease.ends_s or 0.0 for lease in kept}

    async def work() -> None:
        await host.take("renewed")
        await host.take("released")
        before_s = stored()["renewed"]
        with locked(host):
            host.leases.renew("renewed", Owner(ROOT))
            host.release("released")
            await asyncio.sleep(0.05)  # some retries fail
            assert stored().keys() == {"renewed", "released"}
        while stored().keys() != {"renewed"} or stored()["renewed"] <= before_s:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)

    run(work())


def test_a_queued_request_is_granted_after_a_lock(host: LeaseHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RETRY_S", 0.01)

    async def work() -> None:
        await host.fill()
        waits = await host.queue("waits")
        with locked(host):
            host.release("held-0")
            await asyncio.sleep(0.05)
            assert not waits.done()
        assert (await waits)["name"] == "waits"

    run(work())


def test_a_request_during_a_lock_is_refused_as_busy(host: LeaseHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients try that again. A lock that ends soon only delays the answer."""

    async def work() -> None:
        with locked(host):
            soon = asyncio.ensure_future(host.take("soon"))
            await asyncio.sleep(0)
            assert not soon.done()
        assert (await soon)["name"] == "soon"
        monkeypatch.setattr(store, "LOCK_WAIT_S", 0.0)
        with locked(host), pytest.raises(LockedError):
            await host.take("now")

    run(work())


def test_a_request_whose_position_cannot_be_stored_is_served_in_its_turn(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill()
        for change in ("INSERT", "DELETE"):
            host.refuse(change, "queued_request")
        waiting = [await host.queue("first", key=FIRST), await host.queue("second", key=SECOND)]
        for place, task in enumerate(waiting):
            host.release(f"held-{place}")
            assert (await task)["devices"] == [f"01:00.0-{place}"]

    run(work())


def test_a_lease_knows_when_its_request_began_to_wait(host: LeaseHost) -> None:
    """By this, requests that still wait know which leases are of later ones."""

    async def work() -> None:
        await host.fill()
        task = await host.queue("job")
        (queued,) = host.leases.queue.requests
        host.release("held-0")
        lease = host.leases.ledger.leases[(await task)["id"]]
        assert lease.requested_s == queued.since_s > 0

    run(work())


def test_a_repeated_request_keeps_its_position_if_the_first_ends(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill()
        lost = await host.queue("job", key=FIRST)
        again = await host.queue("job", key=FIRST)
        for task, left in ((lost, 1), (again, 0)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert host.positions == left

    run(work())


@pytest.mark.parametrize("key", ["", FIRST])
def test_equal_requests_that_wait_get_the_same_lease_at_once(host: LeaseHost, key: str) -> None:
    async def work() -> None:
        await host.fill()
        first, other = await host.queue("job", key=key), await host.queue("job", ttl_s=601)
        again = [await host.queue("job", key=key) for _ in range(2)]
        host.release("held-0")
        assert {(await one)["id"] for one in again} == {(await first)["id"]}
        assert host.held.count("job") == 1
        assert host.waiting == ["job"], "another request of the same name waits"
        host.release("held-1")
        with pytest.raises(
            HostError, match="a lease with this name already exists, from a different request"
        ):
            await other

    run(work())


def test_a_lease_of_equal_requests_stays_if_one_client_leaves(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill()
        lost, again = await host.queue("job"), await host.queue("job")
        host.release("held-0")
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert host.held.count((await again)["name"]) == 1

    run(work())


def test_only_the_first_of_equal_requests_has_a_new_lease(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill()
        queued = QueuedRequest(LeaseRequest(), Holder("name", ROOT, name="job", ttl_s=600.0))
        takes = [asyncio.ensure_future(host.leases.take(queued, lambda _: None, 60.0)) for _ in range(3)]
        await asyncio.sleep(0)
        host.release("held-0")
        assert [(await one)[1] for one in takes] == [True, False, False]

    run(work())


def test_another_holder_cannot_have_the_lease_of_a_request(host: LeaseHost) -> None:
    async def work() -> None:
        lease = await host.take("first", key=FIRST)
        assert (await host.take("first", key=FIRST))["id"] == lease["id"]
        with pytest.raises(HostError, match="this idempotency key already belongs to a lease"):
            await host.take("second", key=FIRST)
        assert host.held == ["first"]

    run(work())


def test_a_stored_grant_without_its_event_is_recorded_at_the_next_start(host: LeaseHost) -> None:
    """A daemon may be killed between the two."""

    async def work() -> None:
        await host.take("first")
        storage = LeaseStorage(host.store)
        (first,) = host.leases.ledger.leases.values()
        host.leases.release("first", Owner(ROOT))
        storage.write(first._replace(since_s=time.time()))
        before = host.events
        await host.restart()
        assert host.events == [*before, before[0]]
        await host.restart()
        assert host.events == [*before, before[0]]
        host.store.write("DELETE FROM event", [()])  # as when they are too many or too old
        host.supervisor.event_log.record(Event("info", "daemon", "something", "later"))
        await host.restart()
        assert host.events == []

    run(work())


def test_a_restart_extends_an_expired_lease_only_once(host: LeaseHost) -> None:
    """Nor does a daemon that was killed soon after its start."""

    async def work() -> None:
        await host.take("job")
        storage = LeaseStorage(host.store)
        (lease,) = host.leases.ledger.leases.values()
        storage.write(lease._replace(ends_s=time.monotonic() - 1))
        await host.restart()
        (lease,) = host.leases.ledger.leases.values()
        assert lease.is_extended
        assert storage.read() == [lease]

    run(work())


def test_a_client_that_leaves_as_its_lease_is_granted_has_none(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill()
        gone, next_ = await host.queue("gone"), await host.queue("next")
        host.release("held-0")
        gone.cancel()
        assert (await next_)["devices"] == ["01:00.0-0"]
        assert "gone" not in host.held

    run(work())


def test_a_client_that_leaves_as_it_is_refused_is_only_cancelled(host: LeaseHost) -> None:
    async def work() -> None:
        await host.fill()
        gone = await host.queue("gone", request=LeaseRequest(2, across=True))
        host.supervisor.described = snapshot(ONE)._replace(version=2)
        host.leases.serve()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(work())


def test_a_connections_lease_that_a_container_got_outlives_it(host: LeaseHost) -> None:
    async def work() -> None:
        closed: list[Callable[[], None]] = []
        queued = QueuedRequest(LeaseRequest(), ONESELF._replace(binding="connection"))
        lease, _ = await host.leases.take(queued, closed.append, 0.0)
        await host.leases.bind(lease["id"], Owner(ROOT), ONESELF)
        for close in closed:
            close()
        assert [one["id"] for one in host.leases.leases()] == [lease["id"]]

    run(work())


@pytest.mark.parametrize(("owner", "binder", "is_attested"), [(ALICE, ROOT, True), (ALICE, ALICE, False)])
def test_root_attests_a_container_by_binding_a_users_lease_to_it(
    host: LeaseHost, owner: int, binder: int, is_attested: bool
) -> None:
    async def work() -> None:
        queued = QueuedRequest(LeaseRequest(), ONESELF._replace(binding="process", uid=owner))
        lease, _ = await host.leases.take(queued, lambda _: None, 0.0)
        for _ in range(2):  # a hook whose answer was lost asks again
            await host.leases.bind(lease["id"], Owner(binder), ONESELF._replace(uid=binder))
        await host.restart()
        (bound,) = host.leases.ledger.leases.values()
        assert (bound.holder.uid, bound.holder.is_attested) == (owner, is_attested)
        await host.leases.bind(lease["id"], Owner(owner), ONESELF._replace(uid=owner))
        assert list(host.leases.ledger.leases.values()) == [bound], "its owner does not change that"

    run(work())


def test_a_renewal_obeys_a_limit_that_was_lowered_since(host: LeaseHost) -> None:
    async def work() -> None:
        taken = await host.take("job", ttl_s=600.0)
        host.supervisor.settings_read = builders.config(max_lease_ttl_s=60)
        renewed = host.leases.renew("job", Owner(ROOT))
        assert seconds(renewed["expires"] or "") < seconds(taken["expires"] or "")
        (lease,) = host.leases.ledger.leases.values()
        assert lease.holder.ttl_s == 60.0

    run(work())


def test_a_user_has_no_more_devices_than_allowed(host: LeaseHost) -> None:
    async def work() -> None:
        host.supervisor.settings_read = builders.config(max_devices_per_user=3)
        two = LeaseRequest(2, across=True)
        await host.take("a", ALICE, request=two)
        what = "already has 2 devices, leased or requested, and requests 2 more; max_devices_per_user is 3"
        for request in (two, LeaseRequest(devices=("02:00.0-2", "02:00.0-3"))):
            with pytest.raises(NotAllowedError, match=what):
                await host.take("b", ALICE, request=request)
        with pytest.raises(
            NotAllowedError, match=r"a request for 8 devices exceeds max_devices_per_user \(3\)"
        ):
            await host.take("b", ALICE, request=LeaseRequest(devices=(ALL,)))
        await host.take("b", ALICE)
        await host.take("c", ROOT, request=two)

    run(work())


def test_a_user_has_no_more_leases_and_queued_requests_than_allowed(host: LeaseHost) -> None:
    async def work() -> None:
        host.supervisor.settings_read = builders.config(max_leases_per_user=2)
        await host.fill(6)
        first = await host.take("a", ALICE, key=FIRST)
        await host.take("b", ALICE)
        assert (await host.take("a", ALICE, key=FIRST))["id"] == first["id"]
        again = QueuedRequest(LeaseRequest(), Holder("name", ALICE, name="a", ttl_s=600.0), FIRST)
        assert (await host.leases.preview(again))["id"] == first["id"]
        for wait_s in (0.0, 60.0):
            with pytest.raises(
                NotAllowedError, match="2 leases and queued requests; max_leases_per_user is 2"
            ):
                await host.take("c", ALICE, wait_s=wait_s)
        with pytest.raises(NotAllowedError):
            await host.leases.preview(
                again._replace(holder=again.holder._replace(name="c"), idempotency_key=SECOND)
            )
        waiting = [await host.queue("a", BOB, key=FIRST), await host.queue("b", BOB)]
        (await host.queue("a", BOB, key=FIRST)).cancel()  # one that is repeated is no third
        with pytest.raises(NotAllowedError):
            await host.take("c", BOB, wait_s=60.0)
        host.release("held-0")
        host.release("held-1")
        assert [(await task)["name"] for task in waiting] == ["a", "b"], "what was let in is served"
        host.release("b", ALICE)
        assert (await host.take("c", ALICE))["name"] == "c"
        with pytest.raises(NothingFreeError):
            await host.take("root has as many as there are")

    run(work())
