"""A client of the daemon for programs in Python, and for the command line: devices, leases and events.

    with Client().lease(wait=60) as lease:
        subprocess.run(["./simulate"], env=lease.environ(), check=True)

Every failure is a YunionError with a `message`, a `hint` of what to do, and the `exit_code` of a command
that meets it; docs/python-client.md has them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from yunion_mps.client.lease import MAX_S, Lease, Patience, Say, refuse_unreachable, take
from yunion_mps.errors import (
    InfeasibleError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    UnreachableError,
    YunionError,
)
from yunion_mps.http.operations import (
    GET_DEVICE,
    GET_DEVICES,
    GET_EVENTS,
    GET_LEASES,
    LATEST_S,
    MAX_EVENTS,
    MAX_WAIT_S,
)
from yunion_mps.paths import Paths
from yunion_mps.times import rfc3339

if TYPE_CHECKING:
    from yunion_mps.answers import Device, DeviceDetails, Event, LeaseRecord, PcieLink

__all__ = [
    "Client",
    "Device",
    "DeviceDetails",
    "Event",
    "InfeasibleError",
    "Lease",
    "LeaseRecord",
    "NotAllowedError",
    "NotFoundError",
    "NothingFreeError",
    "PcieLink",
    "UnreachableError",
    "YunionError",
]

#: The types of answers, which are imported only if a program uses them: that takes 3 ms.
_ANSWERS = ("Device", "DeviceDetails", "Event", "LeaseRecord", "PcieLink")

#: How long a lease with a name lives without renewal if nothing else is asked for, in s.
TTL_S = 60
#: How long a question waits for the next event, in s.
EVENT_WAIT_S = 10


def __getattr__(name: str) -> Any:
    if name in _ANSWERS:
        from yunion_mps import answers

        return getattr(answers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _silent(text: str) -> None:
    del text


class Client:
    """Asks the daemon of this host. It may be used by several threads, and holds nothing open."""

    def __init__(self, say: Say = _silent) -> None:
        """`say` is given a line for people now and then: what is waited for, and that it has come."""
        from yunion_mps.http.client import DaemonClient

        self._daemon = DaemonClient(Paths.from_environment())
        self._say = say

    def devices(self, *, unused: bool = False) -> list[Device]:
        """All devices, or those that are served and free; raises YunionError."""
        return self._daemon.call(GET_DEVICES, limit=0, unused=unused)["isolated_devices"]

    def device(self, name: str) -> DeviceDetails:
        """One device by id, address or a unique beginning of either; raises NotFoundError and others."""
        return self._daemon.call(GET_DEVICE, id=name)

    def leases(self) -> list[LeaseRecord]:
        """All leases; raises YunionError."""
        return self._daemon.call(GET_LEASES)["leases"]

    def lease(
        self,
        *,
        device: str | None = None,
        gpu: str | None = None,
        count: int = 1,
        gpu_memory: int | None = None,
        across: bool = False,
        spread: bool = False,
        allow_unlimited: bool = False,
        wait: float = 0,
        name: str | None = None,
        ttl: int | None = None,
    ) -> Lease:
        """Take devices, and give them back at the end of a `with` block, or of this process at the latest.

        `device` (id or address) and `gpu` (UUID or address) bound the choice. `count` devices are of one GPU
        or, with `across`, of one each; `gpu_memory` (MiB) is a device of that size, on a GPU that is open for
        it. `spread` takes from the GPU with the most free, not the fewest. Only what holds a process to its
        budget is taken, which no GPU older than Volta does; `allow_unlimited` takes those as well. `wait` is
        how long to wait, in s, `math.inf` for good: first come, first served.

        With a `name` the lease is bound to that and not to this process: it is renewed for as long as this
        process lives, and ends `ttl` seconds (60) after that.

        Raises NothingFreeError if there are none within that time, and YunionError of other kinds if the
        request is infeasible, or a process of this user could not use the devices.
        """
        ttl_s = None if name is None else TTL_S if ttl is None else ttl
        wanted = {
            "device": device,
            "gpu": gpu,
            "count": count if count != 1 else None,
            "memory": gpu_memory,
            "across": across or None,
            "placement": "spread" if spread else None,
            "enforced": None if allow_unlimited else True,
            "name": name,
            "ttl": ttl if name is None else ttl_s,
        }
        record = take(self._daemon, wanted, whole_seconds(wait), self._say)
        lease = Lease(self._daemon, record, ttl_s, self._say)
        try:
            refuse_unreachable(lease.environment)
        except YunionError:
            lease.release()
            raise
        return lease

    def events(
        self, *, since: float | None = None, kind: str | None = None, follow: bool = False
    ) -> Iterator[Event]:
        """Yield what has happened since then (s since 1970), the oldest first, at most the newest 1000.

        `kind` is one of domain, limit, gpu, compute_mode, configuration, client, lease and daemon. With
        `follow` it goes on for good with what comes, also past a restart of the daemon; raises
        UnreachableError if the daemon stays away.
        """
        since_s = 0.0 if since is None else since
        if not _is_number(since_s):
            raise YunionError(f"since is {since!r}", "write seconds since 1970, as time.time() has them")
        first = rfc3339(min(max(0.0, since_s), LATEST_S))
        answer = self._daemon.call(GET_EVENTS, limit=MAX_EVENTS, since=first, kind=kind)
        yield from answer["events"]
        if follow:
            for events in self.follow(answer["last"], kind):
                yield from events

    def follow(self, last: int, kind: str | None = None) -> Iterator[list[Event]]:
        """Yield what comes after the event with the id `last`, for good, and now and then an empty list.

        With the empty lists a caller can look whether its own reader is still there. Raises UnreachableError
        if the daemon stays away.
        """
        patience = Patience(MAX_S, self._say)
        while True:
            try:
                answer = self._daemon.call(
                    GET_EVENTS, after=last, limit=MAX_EVENTS, kind=kind, wait=EVENT_WAIT_S
                )
            except UnreachableError as error:
                patience.lost(error)
                yield []
                continue
            patience.found()
            if answer["last"] < last:
                self._say("the event log was started again")
                last = 0
                continue
            last = answer["last"]
            yield answer["events"]


def whole_seconds(wait: float) -> int:
    """A time to wait as the daemon takes it, rounded up; raises YunionError if it is none."""
    if not _is_number(wait):
        raise YunionError(f"wait is {wait!r}", "write a number of seconds, or math.inf")
    return MAX_WAIT_S if wait >= MAX_WAIT_S else max(0, math.ceil(wait))


def _is_number(value: object) -> bool:
    """Whether it is a number, which a caller without a type checker may not know."""
    return isinstance(value, (int, float)) and not math.isnan(value)
