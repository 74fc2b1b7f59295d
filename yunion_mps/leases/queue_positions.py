"""The queue's positions in the state file, so that requests that wait keep their turn across restarts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from yunion_mps.core.errors import HostError
from yunion_mps.host.store import Store
from yunion_mps.leases.request import QueuedRequest

#: How long after the daemon's start a repeated request still gets its earlier position, in s.
REPEAT_TIMEOUT_S = 60.0
#: How long later requests wait for that: clients repeat a request every 0.2 s while the daemon is away.
PROMPT_REPEAT_TIMEOUT_S = 10.0
_INSERT_QUEUED = """INSERT OR IGNORE INTO queued_request
    (position, uid, idempotency_key, since_s, boot_id) VALUES (?, ?, ?, ?, ?)"""
_SELECT_QUEUED = "SELECT uid, idempotency_key, position, since_s, boot_id FROM queued_request"


class _Place(NamedTuple):
    """The place of a queued request: the lowest position is the first."""

    position: int
    #: When the request began to wait, in s since 1970.
    since_s: float


class QueuePositions:
    """The queue's positions across restarts: a row for each queued request that has an idempotency key.

    A request that is repeated after a restart gets the position of its row, so no client can claim an earlier
    one. A request waits even if its row cannot be written or deleted.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last = 0
        #: The places of requests that an earlier daemon had queued, by their keys, until they are repeated.
        self._restored: dict[tuple[int, str], _Place] = {}
        self._repeat_deadline_s = 0.0
        self._prompt_repeat_deadline_s = 0.0

    def restore(self, now_s: float) -> None:
        """Read the positions that an earlier daemon stored since the boot; `now_s` is monotonic."""
        self._repeat_deadline_s = now_s + REPEAT_TIMEOUT_S
        self._prompt_repeat_deadline_s = now_s + PROMPT_REPEAT_TIMEOUT_S
        boot_id = self._store.boot_id
        with contextlib.suppress(HostError):
            self._restored.clear()
            for uid, idempotency_key, position, since_s, row_boot_id in self._store.read(_SELECT_QUEUED):
                self._last = max(self._last, position)
                if row_boot_id == boot_id:
                    self._restored[uid, idempotency_key] = _Place(position, since_s)
            self._store.write("DELETE FROM queued_request WHERE boot_id != ?", [(boot_id,)])

    def place(self, queued: QueuedRequest, wall_s: float, now_s: float) -> QueuedRequest:
        """Return the request with a position: the last, or its earlier one if it is repeated after a restart.

        wall_s: when it begins to wait, in s since 1970.
        now_s: the monotonic time.
        """
        if now_s > self._repeat_deadline_s and self._restored:
            self._delete(list(self._restored))
            self._restored.clear()
        place = self._restored.pop(queued.key, None) if queued.key else None
        if place is None:
            self._last += 1
            place = _Place(self._last, wall_s)
        return queued._replace(position=place.position, since_s=place.since_s)

    def has_to_wait(self, queued: QueuedRequest, now_s: float) -> bool:
        """Return whether an earlier request is still to be repeated after a restart, before this one's turn.

        Clients repeat theirs within a moment; those that have ended meanwhile do not.
        """
        if now_s >= self._prompt_repeat_deadline_s:
            return False
        return any(place.position < queued.position for place in self._restored.values())

    def store(self, queued: QueuedRequest) -> None:
        """Write the request's row, if it has an idempotency key."""
        if queued.key:
            uid, idempotency_key = queued.key
            row = (queued.position, uid, idempotency_key, queued.since_s, self._store.boot_id)
            with contextlib.suppress(HostError):  # the row of a repeated request is kept
                self._store.write(_INSERT_QUEUED, [row])

    def delete(self, queued: QueuedRequest) -> None:
        """Delete the request's row, if it has one."""
        if queued.key:
            self._delete([queued.key])

    def _delete(self, keys: Iterable[tuple[int, str]]) -> None:
        statement = "DELETE FROM queued_request WHERE uid = ? AND idempotency_key = ?"
        with contextlib.suppress(HostError):
            self._store.write(statement, list(keys))
