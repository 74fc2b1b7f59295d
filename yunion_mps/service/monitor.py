"""The monitor: polls the GPUs, immediately if the driver reports an event, and reconciles.

Polls do not wait for the steps that follow from them: a step may take long, for example because a program
hangs, and which GPUs answer is noticed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, NamedTuple, Optional

from yunion_mps.core.conditions import Condition
from yunion_mps.core.enums import ABOUT_DRIVER, IMPAIRED
from yunion_mps.core.errors import DriverError, ShortageError, YunionError
from yunion_mps.core.models import Inventory
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import DRIVER_HUNG, DRIVER_MISMATCH, Reason
from yunion_mps.host.log import Failures
from yunion_mps.host.threads import on_thread
from yunion_mps.inventory.driver import Deadline, replaced_library
from yunion_mps.inventory.gpu_events import EventWatch
from yunion_mps.inventory.nvml import Load, Nvml
from yunion_mps.inventory.scan import Scanner, not_found
from yunion_mps.observe.clients import XidAnalyzer
from yunion_mps.service.job_warnings import JobWarnings
from yunion_mps.service.reload import LoopControl
from yunion_mps.service.services import Services
from yunion_mps.supervisor.fleet import Processes

log = logging.getLogger(__name__)

#: How often the GPUs are polled; a poll takes about 0.1 ms a GPU.
POLL_S = 10.0
#: How often while a GPU is unavailable, because the driver reports that a GPU is lost, but not its return;
#: while a change waits for leases or MPS servers to end; while another program uses a MIG instance that could
#: be leased; while a request may wait for another user's jobs; and while a job exceeds its budget on a GPU
#: with `over_budget: terminate`.
FAST_POLL_S = 1.0
#: How often the list of GPUs in sysfs is compared, which costs no driver call.
SYSFS_POLL_S = 2.0
#: The first and the longest pause before NVML is initialised again for a GPU that it still does not report;
#: the pause doubles.
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 600.0
#: How long the watch for events may take to end before NVML is initialised again.
_EVENTS_END_S = 10.0
#: How long a poll waits for the steps that follow from it; most take a few milliseconds.
STEPS_WITHIN_S = 1.0
#: How often time slices are compared: nvidia-smi reads them, one GPU after the other.
COMPARE_S = 300.0


class _Polled(NamedTuple):
    """What a poll reads from the driver."""

    inventory: Inventory
    #: The processes on each GPU (UUID).
    processes: Processes
    load: Load


class Monitor:
    """Polls the GPUs while the daemon runs, hands on what has changed, and requests a tick each time."""

    def __init__(self, paths: Paths, services: Services, control: LoopControl) -> None:
        self._scanner = Scanner(paths, services.supervisor.snapshot().inventory.gpus)
        self._supervisor = services.supervisor
        self._reloader = services.reloader
        self._xids = XidAnalyzer(paths, services.supervisor, services.clients)
        self._budgets = services.budgets
        self._job_warnings = JobWarnings(services.supervisor, services.status)
        self._usage = services.usage
        self._poll_now = control.poll_now
        self._tick = control.tick
        self._tasks: set[asyncio.Task[None]] = set()
        #: Brings settings and MIG layouts into effect; None if nothing is at work.
        self._steps: asyncio.Task[None] | None = None
        self._failures = Failures(log, level=logging.ERROR)
        self._answering = frozenset[Optional[str]]()
        self._compare_s = time.monotonic() + COMPARE_S
        self._instances = services.leases.instances
        self._leases = services.leases
        self._users = services.users
        self._queries = services.queries
        self._events: EventWatch | None = None
        #: Shared by all attempts to open NVML, so that none begins while an earlier one hangs.
        self._opening_deadline = Deadline()
        #: The GPUs that the last initialisation of NVML did not find, and when to try again.
        self._not_found = frozenset[str]()
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        #: Whether NVML is initialised again before the next poll.
        self._must_initialise = False
        #: The driver's new library for which a re-exec was requested.
        self._requested_library = ""

    async def run(self) -> None:
        """Poll until this is cancelled."""
        await self._measure()
        try:
            while True:
                self._watch_events()
                await self._wait_for_next_poll(FAST_POLL_S if self._is_urgent() else POLL_S)
                self._poll_now.clear()
                await self.poll()
                if excess := await self._budgets.sample():
                    self._begin(self._budgets.enforce(excess))
                await self._job_warnings.look()
        finally:
            if self._events:
                self._events.stop()
            for task in self._tasks:
                task.cancel()
            if self._steps:
                self._steps.cancel()

    def _is_urgent(self) -> bool:
        if self._supervisor.is_urgent or self._budgets.is_watching:
            return True
        return bool(self._queries.used_by_others) or self._leases.waits_for_jobs

    async def _wait_for_next_poll(self, wait_s: float) -> None:
        """Wait until a poll is requested, a GPU has come or gone in sysfs, or `wait_s` have passed."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_s
        while (left_s := end_s - loop.time()) > 0:
            try:
                await asyncio.wait_for(self._poll_now.wait(), min(left_s, SYSFS_POLL_S))
            except asyncio.TimeoutError:
                pass
            else:
                return
            known = self._supervisor.snapshot().inventory.controllers
            if self._supervisor.nvml and self._scanner.controllers() != known:
                return

    async def poll(self) -> None:
        """Poll the GPUs, apply what has changed, and begin the steps that follow from it."""
        async with self._reloader.scan_lock:
            can_continue = await self._poll()
        if can_continue:
            await self._make_steps()
        await self._users.ask()
        self._tick()

    async def _make_steps(self) -> None:
        """Begin what is due, unless earlier steps are still at work, and wait for it for a moment."""
        if self._steps and self._steps.done():  # since the last poll, which did not wait any longer
            ended, self._steps = self._steps, None
            ended.result()
        steps = self._steps or asyncio.ensure_future(self._bring_about())
        self._steps = steps
        await asyncio.wait({steps}, timeout=STEPS_WITHIN_S)
        if not steps.done():
            return
        if self._steps is steps:
            self._steps = None
        steps.result()

    async def _bring_about(self) -> None:
        """Bring what is due into effect once no reload is in progress."""
        async with self._reloader.lock:
            if time.monotonic() >= self._compare_s:
                self._compare_s = time.monotonic() + COMPARE_S
                self._supervisor.settings.reconciler.compare()
            await self._reloader.bring_about()
        self._tick()

    async def poll_processes(self) -> None:
        """Poll only which processes use the GPUs, so that a stop can name new ones."""
        await self._users.poll()

    async def _poll(self) -> bool:
        """Read the GPUs and apply what has changed; return whether steps can follow."""
        supervisor = self._supervisor
        loop = asyncio.get_running_loop()
        nvml = supervisor.nvml or await self._open_driver()
        if nvml:
            began_s = loop.time()
            ended_runs = supervisor.reconciliation.ended_runs
            try:
                if self._must_initialise:
                    await self._initialise_again(nvml)
                polled = await on_thread(lambda: self._read_gpus(nvml))
                if self._may_find_more(polled.inventory) and await self._initialise_again(nvml):
                    polled = await on_thread(lambda: self._read_gpus(nvml))
                    self._note_not_found(polled.inventory)
                self._not_found &= not_found(polled.inventory)
            except ShortageError as error:  # which says nothing about the GPUs
                self._note_shortage(error)
                return False
            except DriverError as error:
                self._failures.report(f"cannot poll the GPUs: {error.message}", consequence=error.hint)
                self._answering = frozenset()
                self._usage.forget()
                self._must_initialise = error.code != DRIVER_HUNG
                if error.code == DRIVER_MISMATCH:
                    self._use_new_library()
                supervisor.driver_failed(error, loop.time())
                return False
            self._must_initialise = False
            self._failures.clear()
            supervisor.end_condition(ABOUT_DRIVER)
            supervisor.check_pipe_directories()
            supervisor.jobs.update(polled.processes, began_s)
            supervisor.settings.note_processes(polled.processes)
            during_steps = supervisor.reconciliation.has_run_since(ended_runs)
            supervisor.update_gpus(
                polled.inventory,
                loop.time(),
                during_steps=during_steps,
                changing_mig=supervisor.reconciliation.gpus_changing_mig_since(ended_runs),
            )
            self._usage.record(polled.processes, polled.load, began_s)
            self._instances.note(polled.processes)
            self._renew_events(polled.inventory)
        return True

    async def _measure(self) -> None:
        """Record the load of the GPUs before the first poll, so that idle ones show 0 % at once."""
        nvml = self._supervisor.nvml
        began_s = asyncio.get_running_loop().time()
        if nvml is None:
            return
        async with self._reloader.scan_lock:
            with contextlib.suppress(DriverError, ShortageError):  # which the next poll reports
                polled = await on_thread(lambda: self._read_gpus(nvml))
                self._usage.record(polled.processes, polled.load, began_s)

    def _read_gpus(self, nvml: Nvml) -> _Polled:
        """Return everything that a poll reads from the driver; thread-safe."""
        inventory = self._scanner.scan(nvml)
        processes = nvml.processes()
        busy = [uuid for uuid, pids in processes.items() if pids]
        load = nvml.load(busy, time.time() - POLL_S).with_idle(processes)
        return _Polled(inventory, processes, load)

    async def _open_driver(self) -> Nvml | None:
        """Open NVML if the daemon waits for the driver, as after a boot; None if it does not work yet."""
        if not self._supervisor.waits_for_driver:
            return None
        try:
            nvml = await on_thread(lambda: Nvml(deadline=self._opening_deadline))
        except ShortageError as error:
            self._note_shortage(error)
            return None
        except DriverError as error:
            self._supervisor.driver_still_fails(error)
            if error.code == DRIVER_MISMATCH:
                self._use_new_library()
            return None
        self._supervisor.driver_found(nvml)
        return nvml

    def _use_new_library(self) -> None:
        """Re-execute the program if the driver was updated, because only a new process loads its library."""
        library = replaced_library()
        if library and library != self._requested_library:
            self._requested_library = library
            log.warning("the NVIDIA driver was updated: its library is now %s", library)
            self._begin(self._reexec())

    async def _reexec(self) -> None:
        try:
            await self._reloader.reexec(requires_driver=True)
        except YunionError as error:
            log.error("the new library of the NVIDIA driver is not used: %s; %s", error.message, error.hint)

    def _may_find_more(self, inventory: Inventory) -> bool:
        """Return whether NVML might report more GPUs if it were initialised again now."""
        unreported = not_found(inventory)
        if not unreported:
            return False
        has_new = not unreported <= self._not_found
        return has_new or time.monotonic() >= self._retry_at_s

    def _note_not_found(self, inventory: Inventory) -> None:
        """Note which GPUs NVML does not report although it has just been initialised."""
        unreported = not_found(inventory)
        self._retry_s = min(self._retry_s * 2, LAST_RETRY_S)
        if unreported != self._not_found:
            self._retry_s = FIRST_RETRY_S
        self._retry_at_s = time.monotonic() + self._retry_s
        self._not_found = unreported

    async def _initialise_again(self, nvml: Nvml) -> bool:
        """Initialise NVML again once the watch for events has ended; return whether that was possible."""
        events = self._events
        if events:
            events.stop()
            if not await on_thread(lambda: events.join(_EVENTS_END_S)):
                return False
            self._events = None  # a new one is started before the next poll
        return await on_thread(nvml.initialise_again)

    def _watch_events(self) -> None:
        """Register for the driver's events once the driver is available."""
        if self._events or not self._supervisor.nvml:
            return
        loop = asyncio.get_running_loop()

        def on_event(event: tuple[str, int] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._handle_event, event)

        events = EventWatch(self._supervisor.nvml, on_event)
        try:
            events.start()
        except ShortageError as error:
            self._note_shortage(error)
        else:
            self._events = events

    def _renew_events(self, inventory: Inventory) -> None:
        """Register for the driver's events again if the set of responding GPUs has changed."""
        answering = frozenset(gpu.uuid for gpu in inventory.gpus if not gpu.reason)
        if self._events and answering != self._answering:
            self._events.renew()
        self._answering = answering

    def _note_shortage(self, error: ShortageError) -> None:
        """Warn that the GPUs cannot be polled now; the next poll retries."""
        text = f"cannot poll the GPUs, so their state may be out of date: {error.message}"
        self._failures.report(text, consequence=error.hint)
        self._supervisor.set_condition(Condition(ABOUT_DRIVER, "", IMPAIRED, Reason(text, error.code)))

    def _handle_event(self, event: tuple[str, int] | None) -> None:
        if event:
            self._begin(self._xids.analyze(*event))
        self._poll_now.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
