"""Looking at the GPUs: now and then, at once when the driver reports something, and putting modes right."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, Optional

from yunion_mps.errors import DriverError, HostError, ShortageError
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory import Nvml, scan
from yunion_mps.inventory.events import EventWatch
from yunion_mps.models import Inventory
from yunion_mps.paths import Paths
from yunion_mps.service.faults import Faults
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

Processes = Mapping[str, Mapping[int, Optional[int]]]

#: How often the GPUs are looked at; one look takes about a millisecond a GPU.
RESCAN_S = 10.0
#: How often while one that should serve cannot: the driver reports that a GPU is lost, not that it is back.
RETURN_S = 1.0


class _Seen(NamedTuple):
    inventory: Inventory
    processes: Processes


class Looking:
    """The task that looks, and what wakes it."""

    def __init__(
        self,
        paths: Paths,
        supervisor: Supervisor,
        changing: asyncio.Lock,
        faults: Faults,
        did: Callable[[], None],
        used: Callable[[Processes, float], None],
    ) -> None:
        """`changing` is held while the plan or a mode changes; `did` is called after each look.

        `used` is told who uses the GPUs (by UUID: PID and MiB), and when that was (monotonic).
        """
        self._paths = paths
        self._supervisor = supervisor
        self._changing = changing
        self._faults = faults
        self._did = did
        self._used = used
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._trouble = ""
        self._answering = frozenset[Optional[str]]()
        self._events: EventWatch | None = None

    def soon(self) -> None:
        """Look at once."""
        self._wake.set()

    async def run(self) -> None:
        """Look for good."""
        try:
            while True:
                self._listen()
                wait_s = RETURN_S if self._supervisor.has_unavailable_gpus else RESCAN_S
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), wait_s)
                self._wake.clear()
                async with self._changing:
                    await self.look()
                self._did()
        finally:
            if self._events:
                self._events.stop()
            for task in self._tasks:
                task.cancel()

    async def look(self) -> None:
        """Look once, and do to the compute modes what is to be done."""
        supervisor, loop = self._supervisor, asyncio.get_running_loop()
        nvml = supervisor.nvml
        if nvml:
            began_s = loop.time()
            try:
                seen = await on_thread(lambda: _look(nvml, self._paths))
            except ShortageError as error:  # which says nothing of the GPUs
                self._note_shortage(error)
                return
            except DriverError as error:
                if error.message != self._trouble:
                    log.error("the GPUs cannot be looked at: %s. %s", error.message, error.hint)
                self._trouble = error.message
                self._answering = frozenset()
                supervisor.lose_driver(error, loop.time())
                return
            self._trouble = ""
            supervisor.remark("looking", "")
            supervisor.note_processes(seen.processes, began_s)
            supervisor.update_gpus(seen.inventory, loop.time())
            self._used(seen.processes, began_s)
            self._renew_events(seen.inventory)
        await self.set_modes()

    async def see_jobs(self) -> None:
        """Look only at who uses the GPUs: a stop is to name those that came since the last look."""
        nvml, began_s = self._supervisor.nvml, asyncio.get_running_loop().time()
        if nvml:
            with contextlib.suppress(DriverError, ShortageError):
                self._supervisor.note_processes(await on_thread(nvml.processes), began_s)

    async def set_modes(self) -> None:
        """Set and put back what is due; the caller holds the lock."""
        try:
            work = self._supervisor.mode_work()
            if any(work):
                self._supervisor.note_modes(await on_thread(lambda: self._supervisor.set_modes(work)))
        except HostError as error:
            log.error("compute modes cannot be set: %s. %s", error.message, error.hint)

    def _listen(self) -> None:
        """Have the driver tell us what happens, once there is one."""
        if self._events is None and self._supervisor.nvml:
            loop = asyncio.get_running_loop()

            def tell(event: tuple[str, int] | None) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(self._heard, event)

            events = EventWatch(self._supervisor.nvml, tell)
            try:
                events.start()
            except ShortageError as error:
                self._note_shortage(error)
            else:
                self._events = events

    def _renew_events(self, inventory: Inventory) -> None:
        """Register for the driver's events again if other GPUs answer than before."""
        answering = frozenset(gpu.uuid for gpu in inventory.gpus if not gpu.reason)
        if self._events and answering != self._answering:
            self._events.renew()
        self._answering = answering

    def _note_shortage(self, error: ShortageError) -> None:
        """Say that the GPUs cannot be looked at now; it is tried again with the next look."""
        what = f"the GPUs cannot be looked at, so their state may be out of date: {error.message}"
        if self._trouble != what:
            log.error("%s. %s", what, error.hint)
        self._trouble = what
        self._supervisor.remark("looking", what)

    def _heard(self, event: tuple[str, int] | None) -> None:
        if event:
            task = asyncio.ensure_future(self._faults.after_xid(*event))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.soon()


def _look(nvml: Nvml, paths: Paths) -> _Seen:
    return _Seen(scan(nvml, paths), nvml.processes())
