"""The daemon as the device plugin and the DRA driver call and follow it: its changes, devices and outages."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from yunion_mps.core.errors import YunionError
from yunion_mps.core.tasks import first_of
from yunion_mps.http.client import AsyncDaemonClient, NoAnswerError
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_DEVICES, GET_HEALTH, GET_POOLS
from yunion_mps.http.parameters import Value
from yunion_mps.http.transport import Retrier
from yunion_mps.kubernetes.metrics import DAEMON, Counts
from yunion_mps.kubernetes.offered import DeviceT

if TYPE_CHECKING:
    from yunion_mps.answers import PoolJson

log = logging.getLogger(__name__)

T = TypeVar("T")
#: How long a container's start waits for a daemon that restarts, in s.
RESTART_S = 10.0
#: How long each request for a change waits, in s.
_CHANGE_WAIT_S = 60
#: The pause between two requests, in s: many changes at once cause few of them, and failures are retried.
_PAUSE_S = 0.2
#: How often the daemon is asked whether it is alive, and how long it has to answer, in s. One that hangs
#: answers no other request either, but their timeouts are long: reading all devices takes its time.
PROBE_S = 2.0
HANG_S = 5.0
#: How many devices are read at once: all of a large host would take 10 MiB for a moment.
_PAGE = 256


class DaemonWatch:
    """Calls `read` when the daemon's devices or pools have changed, and `lose` while it is away.

    `read` reads the devices and pools from here: a change is one from what it has read, so it notices even a
    change that has been undone meanwhile. The daemon is away if it hangs, or if `read` keeps failing.

    outage_s: how long `read` has to fail until the daemon counts as away
    reread_s: how often `read` is called without a change, for what else it reads
    probe_s: how often the daemon is asked whether it is alive
    hang_s: how long it has to answer that
    """

    def __init__(
        self,
        daemon: AsyncDaemonClient,
        counts: Counts,
        read: Callable[[], Awaitable[None]],
        lose: Callable[[YunionError], None],
        outage_s: float,
        reread_s: float = math.inf,
        probe_s: float = PROBE_S,
        hang_s: float = HANG_S,
    ) -> None:
        self._daemon = daemon
        self._counts = counts
        self._read = read
        self._lose = lose
        self._outage_s = outage_s
        self._reread_s = reread_s
        self._probe_s = probe_s
        self._hang_s = hang_s
        #: The requests whose answers were read last, each with its ETag as a condition.
        self._seen: list[tuple[Operation[Any], Mapping[str, Value]]] = []
        self._has_failed = asyncio.Event()
        self._failing_since_s: float | None = None

    async def run(self) -> None:
        """Follow the daemon, without end."""
        await first_of(self._follow(), self._probe())

    async def pools(self) -> Sequence[PoolJson]:
        """Return all pools; raises YunionError."""
        return (await self._get(GET_POOLS))["pools"]

    async def devices(self, kind: type[DeviceT]) -> list[DeviceT]:
        """Return all devices, each with the members that `kind` declares; raises YunionError.

        If their number has changed between two pages, they are read again.
        """
        members = tuple(kind.__annotations__)
        read_before = len(self._seen)
        while True:
            devices: list[DeviceT] = []
            totals: set[int] = set()
            while len(devices) < max(totals, default=1):
                page = await self._get(GET_DEVICES, limit=_PAGE, offset=len(devices))
                listed = cast("list[Mapping[str, object]]", page["isolated_devices"])
                devices += [cast("DeviceT", _summarized(device, members)) for device in listed]
                totals.add(page["total"])
                if not listed:
                    break
            if totals == {len(devices)}:
                return devices
            del self._seen[read_before:]

    async def _get(self, operation: Operation[T], **arguments: Value) -> T:
        answer, etag = await self._daemon.call_if_changed(cast("Operation[Any]", operation), **arguments)
        self._seen.append((operation, {**arguments, "if_none_match": etag}))
        return cast("T", answer)  # never None, because the request was not conditional

    async def _follow(self) -> None:
        while True:
            self._seen.clear()
            self._has_failed.clear()
            try:
                await self._read()
                self._failing_since_s = None
                await asyncio.sleep(_PAUSE_S)
                ends: list[Awaitable[object]] = [self._has_failed.wait(), asyncio.sleep(self._reread_s)]
                for operation, request in self._seen:
                    ends.append(self._change(operation, request))
                await first_of(*ends)
            except YunionError as error:
                self._note_failure(error)
                await asyncio.sleep(_PAUSE_S)

    async def _change(self, operation: Operation[Any], request: Mapping[str, Value]) -> None:
        """Return once the answer differs from the one that was read."""
        etag = request["if_none_match"]
        while await self._daemon.wait_for_change(operation, **request, wait_s=_CHANGE_WAIT_S) == etag:
            pass

    async def _probe(self) -> None:
        """Notice within `hang_s` plus one interval that the daemon hangs."""
        while True:
            await asyncio.sleep(self._probe_s)
            try:
                await self._daemon.call(GET_HEALTH, self._hang_s)
            except YunionError as error:
                self._note_failure(error)
                self._has_failed.set()  # everything is read once it answers again

    def _note_failure(self, error: YunionError) -> None:
        self._counts.errors[DAEMON] += 1
        now_s = asyncio.get_running_loop().time()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if isinstance(error, NoAnswerError) or now_s - self._failing_since_s >= self._outage_s:
            self._lose(error)


def _summarized(device: Mapping[str, object], members: Sequence[str]) -> dict[str, object]:
    """Return these members of the device; strings are interned, because thousands of devices repeat them."""
    summary: dict[str, object] = {}
    for name in members:
        value = device[name]
        summary[name] = sys.intern(value) if isinstance(value, str) else value
    return summary


async def call_patiently(
    daemon: AsyncDaemonClient, operation: Operation[T], timeout_s: float, **arguments: Value
) -> T:
    """Call the daemon, and retry for `timeout_s` while it restarts; raises YunionError after twice that."""
    return await Retrier(daemon, timeout_s, log.info).call(operation, timeout_s, **arguments)
