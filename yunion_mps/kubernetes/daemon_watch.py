"""The daemon as the device plugin and the DRA driver follow it: its changes, its devices, and its outages."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from yunion_mps.errors import YunionError
from yunion_mps.http.client import AsyncDaemonClient, NoAnswerError
from yunion_mps.http.operations import GET_DEVICES, GET_HEALTH, GET_POOLS, Operation
from yunion_mps.http.parameters import Value
from yunion_mps.kubernetes.metrics import DAEMON, Counts
from yunion_mps.kubernetes.resources import KnownDevice
from yunion_mps.tasks import first_of

#: How long each request for a change waits, in s.
_CHANGE_WAIT_S = 60
#: The pause between two requests, in s: many changes at once cause few of them, and failures are retried.
_PAUSE_S = 0.2
#: How often the daemon is asked whether it is alive, and how long it has to answer, in s. One that hangs
#: answers no other request either, but their timeouts are long: reading all devices takes its time.
_PROBE_S = 2.0
HANG_S = 5.0
#: How many devices are read at once: all of a large host would take 10 MiB for a moment.
_PAGE = 256

DeviceT = TypeVar("DeviceT", bound=KnownDevice)


class DaemonWatch:
    """Calls `read` when the daemon's devices or pools have changed, and `lose` while it is away.

    It is away if it hangs, or if each `read` has failed for `outage_s`. What else is read is read again every
    `reread_s`.
    """

    def __init__(
        self,
        daemon: AsyncDaemonClient,
        counts: Counts,
        read: Callable[[], Awaitable[None]],
        lose: Callable[[YunionError], None],
        outage_s: float,
        reread_s: float = math.inf,
    ) -> None:
        self._daemon = daemon
        self._counts = counts
        self._read = read
        self._lose = lose
        self._outage_s = outage_s
        self._reread_s = reread_s
        self._stale = asyncio.Event()
        self._failing_since_s: float | None = None

    async def run(self) -> None:
        """Follow the daemon, without end."""
        watches = self._watch(GET_DEVICES, limit=0), self._watch(GET_POOLS)
        await first_of(*watches, self._follow(), self._probe())

    async def _follow(self) -> None:
        while True:
            await first_of(self._stale.wait(), asyncio.sleep(self._reread_s))
            self._stale.clear()
            try:
                await self._read()
                self._failing_since_s = None
            except YunionError as error:
                self._note_failure(error)
            await asyncio.sleep(_PAUSE_S)

    async def _probe(self) -> None:
        """Notice within `HANG_S` plus one interval that the daemon hangs."""
        while True:
            await asyncio.sleep(_PROBE_S)
            try:
                await self._daemon.call(GET_HEALTH, HANG_S)
            except YunionError as error:
                self._note_failure(error)

    async def _watch(self, operation: Operation[Any], **arguments: Value) -> None:
        condition: dict[str, Value] = {}
        while True:
            try:
                etag = await self._daemon.wait_for_change(operation, **arguments, **condition)
                if etag != condition.get("if_none_match"):
                    self._stale.set()
                condition = {"if_none_match": etag, "wait_s": _CHANGE_WAIT_S}
            except YunionError:
                condition = {}
                self._stale.set()  # the attempt to read everything reports it
            await asyncio.sleep(_PAUSE_S)

    def _note_failure(self, error: YunionError) -> None:
        self._counts.errors[DAEMON] += 1
        now_s = asyncio.get_running_loop().time()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if isinstance(error, NoAnswerError) or now_s - self._failing_since_s >= self._outage_s:
            self._lose(error)
        self._stale.set()  # everything is read once it answers again


async def read_devices(daemon: AsyncDaemonClient, kind: type[DeviceT]) -> list[DeviceT]:
    """All devices, each with the members that `kind` declares; raises YunionError.

    If their number has changed between two pages, they are read again.
    """
    members = tuple(kind.__annotations__)
    while True:
        devices: list[DeviceT] = []
        totals: set[int] = set()
        while len(devices) < max(totals, default=1):
            page = await daemon.call(GET_DEVICES, limit=_PAGE, offset=len(devices))
            every = cast("list[Mapping[str, object]]", page["isolated_devices"])
            devices += (
                cast("DeviceT", {name: _shared(device[name]) for name in members}) for device in every
            )
            totals.add(page["total"])
            if not every:
                break
        if totals == {len(devices)}:
            return devices


def _shared(value: object) -> object:
    """The value; of equal strings, such as the UUID of a GPU's devices, only one is kept."""
    return sys.intern(value) if isinstance(value, str) else value
