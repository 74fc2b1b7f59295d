"""When a lease of a name ends, whatever becomes of the daemon meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.paths import Paths
from yunion_mps.host.store import Store
from yunion_mps.leases.holders import RENEWAL_GRACE_S, renew, with_time_left
from yunion_mps.leases.storage import LeaseStorage

from unit.leases.lease_builders import device, lease

TTL_S = 600.0
#: Taken at 1000 s of the monotonic clock, so it ends at 1600 s.
TAKEN = renew(lease("a", device(0, 0))._replace(holder=Holder("name", 0, name="job", ttl_s=TTL_S)), 1000.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(Paths(str(tmp_path)))) as store:
        yield store


def restored_leases(store: Store, *, ahead_s: float = 0.0) -> Lease:
    """What the next daemon reads, its wall clock being so far ahead of its monotonic one."""
    (found,) = LeaseStorage(store, lambda: ahead_s).read()
    return found


def test_a_restart_keeps_the_time_that_a_lease_has_left(store: Store) -> None:
    LeaseStorage(store, lambda: 0.0).write(TAKEN)
    clock_was_set = 1e9
    assert with_time_left(restored_leases(store, ahead_s=clock_was_set), 1300.0) == TAKEN


def test_after_a_boot_the_wall_clock_decides_what_a_lease_has_left(store: Store) -> None:
    LeaseStorage(store, lambda: 5000.0).write(TAKEN)  # it ends at 6600 s
    store.write("UPDATE lease SET value = replace(value, ?, 'another')", [(store.boot_id,)])
    assert with_time_left(restored_leases(store, ahead_s=6100.0), 20.0).ends_s == 500.0
    assert with_time_left(restored_leases(store, ahead_s=0.0), 20.0).ends_s == 20.0 + TTL_S, (
        "the clock is slow"
    )


def test_a_lease_of_an_older_version_restarts_its_time_to_live(store: Store) -> None:
    LeaseStorage(store).write(TAKEN._replace(ends_s=None))
    assert with_time_left(restored_leases(store), 1300.0).ends_s == 1300.0 + TTL_S


def test_after_an_outage_a_holder_has_time_to_renew() -> None:
    assert with_time_left(TAKEN, 9000.0).ends_s == 9000.0 + RENEWAL_GRACE_S
    brief = renew(TAKEN._replace(holder=TAKEN.holder._replace(ttl_s=2.0)), 1000.0)
    assert with_time_left(brief, 9000.0).ends_s == 9002.0, "and no more than its whole time"


@pytest.mark.parametrize("every_s", [0.1, 1.0, RENEWAL_GRACE_S / 2, RENEWAL_GRACE_S - 0.1])
def test_frequent_restarts_do_not_keep_an_unrenewed_lease_alive(every_s: float) -> None:
    one = TAKEN
    for number in itertools.count():
        now_s = 1000.0 + number * every_s
        if one.ends_s is None or one.ends_s <= now_s:
            break
        one = with_time_left(one, now_s)
    assert now_s <= 1600.0 + RENEWAL_GRACE_S + every_s
    assert with_time_left(renew(one, now_s), now_s + 2 * TTL_S).ends_s == now_s + 2 * TTL_S + RENEWAL_GRACE_S
