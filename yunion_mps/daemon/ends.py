"""What ends a lease: its process, or a time without renewal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from yunion_mps.errors import ShortageError
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.processes import Process
from yunion_mps.models import Holder, Lease


class Ends:
    """Watches for the end of each lease's holder."""

    def __init__(self, end: Callable[[str, str], None]) -> None:
        """`end` is called with a lease's id and why it has ended."""
        self._end = end
        self._processes: dict[str, Process] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, lease: Lease) -> bool:
        """Notice what ends it, and nothing else that did before; returns whether it has not ended already.

        Where it has, and where this raises ShortageError, what was watched before still is.
        """
        loop, holder = asyncio.get_running_loop(), lease.holder
        if holder.binding == "name":
            self.forget(lease.id)
            late = "it was not renewed in time"
            self._timers[lease.id] = loop.call_at(lease.ends_s or 0.0, self._end, lease.id, late)
            return True
        process = Process.adopt(holder.pid or 0)
        if process is None:
            return False
        try:
            is_other = _is_other(process, holder)
        except ShortageError:
            process.close()
            raise
        if is_other:
            process.close()
            return False
        self.forget(lease.id)
        self._processes[lease.id] = process
        loop.add_reader(process.fileno(), self._end, lease.id, "its process ended")
        return True

    def forget(self, lease_id: str) -> None:
        """Watch for its end no more."""
        timer = self._timers.pop(lease_id, None)
        if timer:
            timer.cancel()
        process = self._processes.pop(lease_id, None)
        if process:
            asyncio.get_running_loop().remove_reader(process.fileno())
            process.close()

    def expires_s(self, lease_id: str) -> float | None:
        """When a lease of a name ends where it is not renewed, in s since 1970."""
        timer = self._timers.get(lease_id)
        return time.time() + timer.when() - asyncio.get_running_loop().time() if timer else None


def _is_other(process: Process, holder: Holder) -> bool:
    """Whether the process has ended, or only its number is the holder's; raises ShortageError."""
    started = started_ticks(process.pid)
    if started is None and process.status() is None:  # it runs, and cannot be looked at
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            raise ShortageError(f"PID {process.pid} cannot be looked at: {error.strerror}") from None
        return False  # only its first thread has ended
    return started != holder.started
