"""Leases, queue positions and peaks in the state file: what one daemon wrote, the next one knows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from yunion_mps.core.models import Holder, Lease
from yunion_mps.core.paths import Paths
from yunion_mps.gpus.originals import Originals
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.store import MIG, Store
from yunion_mps.leases.ledger import Ledger
from yunion_mps.leases.memory_peaks import MemoryPeaks
from yunion_mps.leases.queue_positions import PROMPT_REPEAT_TIMEOUT_S, REPEAT_TIMEOUT_S, QueuePositions
from yunion_mps.leases.request import LeaseRequest, QueuedRequest, request_by_name
from yunion_mps.leases.storage import LeaseStorage, recorded_ledger

from unit.leases.lease_builders import HOLDER, device, lease

A = lease("a", device(0, 0), device(0, 1))._replace(
    environment={"CUDA_VISIBLE_DEVICES": "GPU-0"}, requested_s=1.25
)
B = lease("b", device(1, 0))._replace(holder=Holder("name", 0, name="job-17", ttl_s=60.0))


@pytest.fixture
def store(paths: Paths) -> Iterator[Store]:
    with closing(Store(paths)) as store:
        yield store


@pytest.fixture
def storage(store: Store, paths: Paths) -> LeaseStorage:
    """Of a daemon that has the leases A and B, and had another."""
    found = LeaseStorage(store)
    for one in (A, B, lease("c", device(1, 1))):
        found.write(one)
    found.delete("c")
    return found


def known_next(paths: Paths) -> list[Lease]:
    with closing(Store(paths)) as store:
        return LeaseStorage(store).read()


@pytest.mark.usefixtures("storage")
def test_leases_survive_for_the_next_daemon(store: Store, paths: Paths) -> None:
    store.close()
    assert known_next(paths) == [A, B]


def test_a_lease_of_unknown_memory_survives(storage: LeaseStorage) -> None:
    unknown = lease("d", device(2, 0)._replace(memory_limit_mib=None, memory_total_mib=None))
    storage.write(unknown)
    assert storage.read() == [A, B, unknown]


@pytest.mark.parametrize(
    "value",
    ["", "{}", "[1]", '{"devices":[{"other":1}]}', '{"devices":{"a":1}}', "[" * 9999, '{"devices":[]}'],
)
def test_a_row_whose_devices_are_not_known_is_reported_and_kept(
    store: Store, storage: LeaseStorage, value: str
) -> None:
    store.write("INSERT INTO lease VALUES (?, ?)", [("d", value)])
    assert storage.read() == [A, B]
    assert [*storage.unreadable] == ["d"]
    storage.write(lease("d"))
    assert store.read("SELECT value FROM lease WHERE id = 'd'") == [(value,)], "for the version that wrote it"
    storage.delete("d")
    assert (storage.unreadable, storage.read()) == ({}, [A, B])


def change_row(store: Store, of: str, name: str, value: object) -> None:
    """Change a member of the row of B as another version might write it."""
    ((text,),) = store.read("SELECT value FROM lease WHERE id = 'b'")
    row = json.loads(text)
    members = {"lease": row, "holder": row["holder"], "device": row["devices"][0]}[of]
    members[name] = value
    store.write("UPDATE lease SET value = ? WHERE id = 'b'", [(json.dumps(row),)])


@pytest.mark.parametrize("of", ["lease", "holder", "device"])
def test_members_of_a_newer_version_are_ignored(store: Store, storage: LeaseStorage, of: str) -> None:
    change_row(store, of, "of_a_newer_version", {"a": [1]})
    assert (storage.read(), storage.unreadable) == ([A, B], {})


def test_a_lease_of_an_earlier_version_is_read(store: Store, storage: LeaseStorage) -> None:
    """It had fewer members."""
    ((text,),) = store.read("SELECT value FROM lease WHERE id = 'b'")
    row = json.loads(text)
    for name in ("idempotency_key", "cdi", "ends_s", "is_extended", "request", "requested_s"):
        del row[name]
    for name in ("unit", "command"):
        del row["holder"][name]
    for name in ("priority", "reserve_mib", "sharing"):
        del row["devices"][0][name]
    store.write("UPDATE lease SET value = ? WHERE id = 'b'", [(json.dumps(row),)])
    assert (storage.read(), storage.unreadable) == ([A, B], {})


def test_columns_of_a_newer_version_are_left_alone(paths: Paths, store: Store, storage: LeaseStorage) -> None:
    tables = [
        row[0]
        for row in store.read(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        )
    ]
    for table in tables:
        store.write(f"ALTER TABLE {table} ADD COLUMN of_a_newer_version TEXT", [()])
    assert {"lease", "event", "mig", "limits_in_effect", "former_compute_mode"} <= {*tables}
    storage.write(B._replace(since_s=7.0))
    assert storage.read() == [A, B._replace(since_s=7.0)]
    Originals(store).remember("compute_mode", {"GPU-1": "Default"})
    store.record_limits("/pipe", {})
    store.record(MIG, {"GPU-1": "{}"})
    stored(store, "a")
    peaks = MemoryPeaks(Ledger([TWO]), store)
    peaks.note({ONE: 10})
    peaks.restore()
    assert peaks_of(peaks, TWO) == [10, None]
    store.close()
    Path(paths.store).write_bytes(b"torn" * 1024)
    assert known_next(paths) == [A, B._replace(since_s=7.0)]


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        ("holder", "binding", []),
        ("holder", "uid", None),
        ("holder", "pid", "4260"),
        ("holder", "started", {}),
        ("holder", "ttl_s", None),
        ("holder", "unit", None),
        ("device", "memory_limit_mib", "4G"),
        ("device", "reserve_mib", None),
        ("lease", "since_s", "now"),
        ("lease", "environment", {"A": 1}),
        ("lease", "ends_s", "soon"),
        ("holder", "started", True),
        ("holder", "pid", 10**30),
        ("holder", "pid", -1),
        ("device", "thread_percentage", float("inf")),
        ("device", "thread_percentage", float("nan")),
        ("device", "memory_limit_mib", -1),
        ("lease", "since_s", 1e300),
    ],
)
def test_a_row_with_a_value_of_the_wrong_type_keeps_its_device(
    store: Store, storage: LeaseStorage, of: str, name: str, value: object
) -> None:
    """Each of these would have ended the daemon at its start, and the next one."""
    change_row(store, of, name, value)
    ((before,),) = store.read("SELECT value FROM lease WHERE id = 'b'")
    first, kept = storage.read()
    assert (first, [*storage.unreadable]) == (A, ["b"])
    assert name in storage.unreadable["b"]
    assert [device.id for device in kept.devices] == [B.devices[0].id]
    assert (kept.holder.binding, kept.holder.ttl_s, kept.ends_s) == ("name", 0.0, None), "until its release"
    storage.write(kept)
    assert store.read("SELECT value FROM lease WHERE id = 'b'") == [(before,)], (
        "for the version that wrote it"
    )


def test_an_unreadable_lease_of_a_known_process_ends_with_it(store: Store, storage: LeaseStorage) -> None:
    for name, value in (("binding", "process"), ("pid", 4260), ("started", 77), ("unit", 1)):
        change_row(store, "holder", name, value)
    kept = storage.read()[1]
    assert (kept.holder.binding, kept.holder.pid, kept.holder.started) == ("process", 4260, 77)
    change_row(store, "lease", "boot", "another")
    assert (storage.read(), storage.unreadable) == ([A], {}), "it has ended with its boot"


@pytest.mark.parametrize(
    ("of", "name"), [("holder", "binding"), ("device", "sharing"), ("device", "memory_limit_mib")]
)
def test_a_word_of_a_newer_version_keeps_the_device(
    store: Store, storage: LeaseStorage, of: str, name: str
) -> None:
    change_row(store, of, name, "new")
    assert [lease.devices[0].id for lease in storage.read()] == [A.devices[0].id, B.devices[0].id]
    assert "new" in storage.unreadable["b"] or name in storage.unreadable["b"]


@pytest.mark.usefixtures("storage")
def test_a_new_file_in_place_of_a_damaged_one_has_the_leases_of_the_copies(
    store: Store, paths: Paths
) -> None:
    store.close()
    Path(paths.lease_copies, "no text").write_bytes(b"\xff\xfe")
    Path(paths.store).write_bytes(b"torn" * 1024)
    assert known_next(paths) == [A, B]
    with closing(Store(paths)) as another:
        assert LeaseStorage(another).read() == [A, B], "they are in the file again"


def test_a_lease_is_stored_even_if_it_cannot_be_copied(store: Store, paths: Paths) -> None:
    Path(paths.lease_copies).write_text("")
    storage = LeaseStorage(store)
    storage.write(A)
    assert storage.read() == [A]
    store.close()
    assert known_next(paths) == [A], "the file is newer than the copies, which are incomplete"
    with closing(Store(paths)) as another:
        LeaseStorage(another).delete("a")
        assert LeaseStorage(another).read() == []


def test_only_leases_taken_by_name_survive_a_reboot(store: Store, storage: LeaseStorage) -> None:
    """A process of the same number may have started at the same tick: some machines boot alike."""
    storage.write(B._replace(holder=B.holder._replace(pid=4260, started=77)))
    store.write("UPDATE lease SET value = replace(value, ?, 'another')", [(store.boot_id,)])
    assert storage.read() == [B]


def test_a_lease_by_name_is_recorded_although_its_container_has_ended(
    store: Store, storage: LeaseStorage, paths: Paths
) -> None:
    for stored in (A, B):
        storage.write(stored._replace(holder=stored.holder._replace(pid=os.getpid(), started=0)))
    assert [*recorded_ledger(store).leases] == ["b"]


def test_a_running_process_of_another_boot_id_keeps_its_lease(store: Store, storage: LeaseStorage) -> None:
    """A daemon in a container can have another boot id than the shell in which --restore is run."""
    started = started_ticks(os.getpid())
    storage.write(A._replace(holder=A.holder._replace(pid=os.getpid(), started=started)))
    ((text,),) = store.read("SELECT value FROM lease WHERE id = 'a'")
    moved = json.dumps({**json.loads(text), "boot": "another"})
    store.write("UPDATE lease SET value = ? WHERE id = 'a'", [(moved,)])
    assert "a" in recorded_ledger(store).leases
    assert "a" not in [known.id for known in storage.read()]


def test_a_lease_that_shares_a_device_with_another_keeps_its_others(
    store: Store, storage: LeaseStorage
) -> None:
    storage.write(lease("d", device(1, 0), device(2, 0))._replace(holder=B.holder._replace(name="other")))
    ledger = recorded_ledger(store)
    assert "d" not in ledger.leases
    assert {hold.gpu_uuid for hold in ledger.holds()} >= {"GPU-1", "GPU-2"}


@pytest.mark.usefixtures("storage")
def test_a_file_that_is_damaged_while_others_write_has_the_leases_too(store: Store, paths: Paths) -> None:
    """The daemon may be killed before it writes the next lease."""
    store.read("PRAGMA wal_checkpoint(TRUNCATE)")
    for end in ("", "-wal", "-shm"):
        Path(paths.store + end).write_bytes(b"torn" * 1024)
    positions = QueuePositions(store)
    positions.store(positions.place(queued("a"), 1000.0, 0.0))
    store.close()
    with closing(Store(paths)) as another:
        assert another.rebuilt == []
        assert LeaseStorage(another).read() == [A, B]


def queued(key: str) -> QueuedRequest:
    return QueuedRequest(LeaseRequest(), HOLDER, key)


def stored(store: Store, *keys: str) -> QueuePositions:
    """A daemon with these requests in its queue, since 1000 s."""
    positions = QueuePositions(store)
    for key in keys:
        positions.store(positions.place(queued(key), 1000.0, 0.0))
    return positions


def next_positions(store: Store) -> QueuePositions:
    """The next daemon, which starts at 0 s."""
    positions = QueuePositions(store)
    positions.restore(0.0)
    return positions


def placed_at(positions: QueuePositions, key: str, now_s: float = 1.0) -> tuple[int, float]:
    placed = positions.place(queued(key), 500.0, now_s)  # the wall clock was set back
    return placed.position, placed.since_s


def keys(store: Store) -> list[str]:
    return [row[0] for row in store.read("SELECT idempotency_key FROM queued_request ORDER BY position")]


def test_a_repeated_request_keeps_its_position_before_new_ones(store: Store) -> None:
    stored(store, "a", "b")
    positions = next_positions(store)
    assert placed_at(positions, "new") == (3, 500.0)
    assert placed_at(positions, "b") == (2, 1000.0)
    assert placed_at(positions, "a") == (1, 1000.0)
    assert placed_at(positions, "a") == (4, 500.0), "a position is given once"


def test_a_position_belongs_to_one_user(store: Store) -> None:
    stored(store, "a")
    other = queued("a")._replace(holder=HOLDER._replace(uid=HOLDER.uid + 1))
    assert next_positions(store).place(other, 500.0, 1.0).position == 2


def test_a_request_that_is_not_repeated_in_time_loses_its_position(store: Store) -> None:
    stored(store, "a")
    assert placed_at(next_positions(store), "a", REPEAT_TIMEOUT_S + 1) == (2, 500.0)
    assert keys(store) == []


def test_a_request_that_has_stopped_waiting_has_no_position(store: Store) -> None:
    stored(store, "a", "b").delete(queued("a"))
    assert keys(store) == ["b"]


def test_the_row_of_a_request_that_waits_twice_is_the_first_one(store: Store) -> None:
    stored(store, "a", "b", "a")
    assert placed_at(next_positions(store), "a") == (1, 1000.0)


def test_a_request_without_an_idempotency_key_has_no_row(store: Store) -> None:
    stored(store, "").delete(queued(""))
    assert keys(store) == []


def test_a_later_request_waits_until_an_earlier_one_is_repeated(store: Store) -> None:
    stored(store, "a", "b")
    positions = next_positions(store)
    second = positions.place(queued("b"), 500.0, 1.0)
    later = positions.place(queued("new"), 500.0, 1.0)
    assert (positions.has_to_wait(second, 1.0), positions.has_to_wait(later, 1.0)) == (True, True)
    first = positions.place(queued("a"), 500.0, 1.0)
    assert not any(positions.has_to_wait(one, 1.0) for one in (first, second, later))


def test_a_later_request_waits_only_a_moment_for_clients_that_have_ended(store: Store) -> None:
    stored(store, "a")
    positions = next_positions(store)
    later = positions.place(queued("new"), 500.0, 1.0)
    assert positions.has_to_wait(later, PROMPT_REPEAT_TIMEOUT_S - 0.1)
    assert not positions.has_to_wait(later, PROMPT_REPEAT_TIMEOUT_S)
    assert placed_at(positions, "a", PROMPT_REPEAT_TIMEOUT_S) == (1, 1000.0), "it still gets its position"


def test_positions_end_with_the_boot(store: Store) -> None:
    stored(store, "a")
    store.write("UPDATE queued_request SET boot_id = 'another'", [()])
    assert placed_at(next_positions(store), "a") == (2, 500.0)
    assert keys(store) == []


def test_a_request_waits_even_if_its_position_cannot_be_stored(store: Store) -> None:
    """The state file refuses it, as a full disk makes it."""
    full = "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    for change in ("INSERT", "DELETE"):
        store.write(f"CREATE TRIGGER no_{change} BEFORE {change} ON queued_request {full}", [()])
    positions = stored(store, "a", "b")
    positions.delete(queued("a"))
    assert placed_at(positions, "c") == (3, 500.0)
    store.close()
    assert placed_at(next_positions(store), "a") == (1, 500.0)


TWO = lease("a", device(0, 0), device(0, 1))
ONE, OTHER = (one.addr for one in TWO.devices)


def peaks_of(peaks: MemoryPeaks, of: Lease) -> list[int | None]:
    return [peaks.of(of.id, device.addr) for device in of.devices]


def test_the_peak_of_each_device_is_kept(store: Store) -> None:
    peaks = MemoryPeaks(Ledger([TWO]), store)
    assert peaks_of(peaks, TWO) == [None, None]
    for used in ({ONE: 10}, {ONE: 300, OTHER: 5}, {ONE: 20}, {}):
        peaks.note(used)
    assert peaks_of(peaks, TWO) == [300, 5]
    assert peaks.by_device() == {ONE: 300, OTHER: 5}


def test_the_next_daemon_continues_with_the_peaks(store: Store) -> None:
    ledger = Ledger([TWO])
    MemoryPeaks(ledger, store).note({ONE: 300})
    after = MemoryPeaks(ledger, store)
    after.restore()
    after.note({ONE: 20, OTHER: 7})
    assert peaks_of(after, TWO) == [300, 7]


def test_the_next_lease_of_a_device_has_a_peak_of_its_own(store: Store) -> None:
    ledger = Ledger([TWO])
    peaks = MemoryPeaks(ledger, store)
    peaks.note({ONE: 300})
    ledger.remove("a")
    later = lease("b", device(0, 0))
    ledger.add(later)
    assert peaks.by_device() == {}
    peaks.note({ONE: 40})
    assert peaks_of(peaks, later) == [40]
    assert store.read("SELECT lease, mib FROM memory_peak") == [("b", 40)]


def test_a_state_file_that_fails_costs_no_peak_now(store: Store) -> None:
    peaks = MemoryPeaks(Ledger([TWO]), store)
    store.close()
    peaks.restore()
    peaks.note({ONE: 300})
    assert peaks_of(peaks, TWO) == [300, None]


#: What earlier versions stored of a request, and the members that say the same.
EARLIER_REQUESTS = [
    ('[1,[],"",false,"binpack",0,false,false,0.0]', {}),
    ('[2,["00:06.0-0"],"GPU-0",true,"spread",2048,true,true,60.0]', {
        "number": 2, "devices": ["00:06.0-0"], "gpu": "GPU-0", "across": True, "placement": "spread",
        "memory_mib": 2048, "allow_unlimited": True, "cdi": True, "ttl_s": 60.0,
    }),
    ('[1,[],"",false,"binpack",0,false,false,0.0,"slurm"]', {"reserved_for": "slurm"}),
    ('[1,[],"",false,"binpack",0,false,false,0.0,"",25]', {"thread_percentage": 25}),
    ('[1,[],"",false,"binpack",0,false,false,0.0,{"uid":1000}]', {"job_uid": 1000}),
    ('[1,[],"",false,"binpack",0,false,false,0.0,"slurm",25,{"uid":0}]', {
        "reserved_for": "slurm", "thread_percentage": 25, "job_uid": 0,
    }),
]  # fmt: skip


@pytest.mark.parametrize(("text", "members"), EARLIER_REQUESTS)
def test_a_request_that_an_earlier_version_stored_by_position_is_the_same(
    text: str, members: dict[str, object]
) -> None:
    assert json.loads(request_by_name(text)) == members
    request = {name: value for name, value in members.items() if name in LeaseRequest._fields}
    if "devices" in request:
        request["devices"] = tuple(members["devices"])  # type: ignore[arg-type]
    holder = HOLDER._replace(ttl_s=members.get("ttl_s", 0.0), job_uid=members.get("job_uid"))  # type: ignore[arg-type]
    queued = QueuedRequest(LeaseRequest(**request), holder, cdi=bool(members.get("cdi")))  # type: ignore[arg-type]
    assert queued.as_text == request_by_name(text)


def test_a_request_of_a_newer_version_is_kept_as_it_is() -> None:
    for text in ('{"number":2,"of_a_newer_version":[1]}', "", "{", "[" * 100_000):
        assert request_by_name(text) == text


def test_a_retry_gets_the_lease_whose_request_an_earlier_version_stored(
    store: Store, storage: LeaseStorage
) -> None:
    storage.write(A._replace(request=EARLIER_REQUESTS[1][0]))
    read = {lease.id: lease for lease in storage.read()}
    assert read["a"].request == request_by_name(EARLIER_REQUESTS[1][0])
