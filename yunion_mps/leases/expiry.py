"""Expiry: ends a lease when its holder's process ends, or when it is not renewed in time.

A lease taken by name expires one TTL after its last renewal, across restarts of the daemon. Times are
monotonic: that clock cannot be set, and stops while the host is suspended and no holder can renew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from yunion_mps.errors import ShortageError
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.processes import Process, refuse_if_no_file_can_be_opened
from yunion_mps.models import Holder, Lease

#: How long a holder has to renew its lease after the daemon could not be reached.
RENEWAL_GRACE_S = 10.0


def renewed(lease: Lease, now_s: float) -> Lease:
    """The lease with its full time to live from now; unchanged if it was not taken by name."""
    if lease.holder.binding != "name":
        return lease
    return lease._replace(ends_s=now_s + lease.holder.ttl_s, is_extended=False)


def restored(lease: Lease, now_s: float) -> Lease:
    """The lease after a restart of the daemon: with the time that it had left.

    A lease that expired while the daemon was unreachable, or is about to, is extended by `RENEWAL_GRACE_S` so
    that its holder can renew it; only once, so that frequent restarts do not preserve a dead job's lease.
    """
    if lease.ends_s is None:  # held by a process, or written by a version that did not store it
        return renewed(lease, now_s)
    soonest_s = now_s + min(lease.holder.ttl_s, RENEWAL_GRACE_S)
    if lease.ends_s < soonest_s and not lease.is_extended:
        return lease._replace(ends_s=soonest_s, is_extended=True)
    return lease._replace(ends_s=min(lease.ends_s, now_s + lease.holder.ttl_s))  # after a boot, a slow clock


class HolderWatch:
    def __init__(self, end: Callable[[str, str], None]) -> None:
        """`end` is called with a lease's id and why it has ended."""
        self._end = end
        self._processes: dict[str, Process] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, lease: Lease) -> bool:
        """Watch the holder's process or timer in place of the previous one; False if it has ended.

        In that case, and if this raises ShortageError, the previous one is still watched.
        """
        loop, holder = asyncio.get_running_loop(), lease.holder
        if holder.binding == "name":
            self.forget(lease.id)
            cause = "it was not renewed in time"
            self._timers[lease.id] = loop.call_at(lease.ends_s or 0.0, self._end, lease.id, cause)
            return True
        if holder.is_awaited:
            self.forget(lease.id)
            return True
        process = Process.adopt(holder.pid or 0)
        if process is None:
            return False
        try:
            has_ended = _has_ended(process, holder)
        except ShortageError:
            process.close()
            raise
        if has_ended:
            process.close()
            return False
        self.forget(lease.id)
        self._processes[lease.id] = process
        loop.add_reader(process.fileno(), self._end, lease.id, "its process ended")
        return True

    def forget(self, lease_id: str) -> None:
        timer = self._timers.pop(lease_id, None)
        if timer:
            timer.cancel()
        process = self._processes.pop(lease_id, None)
        if process:
            asyncio.get_running_loop().remove_reader(process.fileno())
            process.close()

    def expires_s(self, lease_id: str) -> float | None:
        """When a lease taken by name ends if it is not renewed, in s since 1970; None for others."""
        timer = self._timers.get(lease_id)
        return time.time() + timer.when() - asyncio.get_running_loop().time() if timer else None


def _has_ended(process: Process, holder: Holder) -> bool:
    """Whether the holder has ended, even if its PID was reused; raises ShortageError."""
    started = started_ticks(process.pid)
    if started is None and process.status() is None:  # it runs, but cannot be inspected
        refuse_if_no_file_can_be_opened(f"PID {process.pid} cannot be inspected")
        return False  # only its first thread has ended
    return started != holder.started
