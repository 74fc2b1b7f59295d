"""The event loop: drives the supervisor, serves the socket, looks at the GPUs, and says that it is alive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from yunion_mps.api.routes import Router
from yunion_mps.api.server import Server
from yunion_mps.daemon.run import StopSignals
from yunion_mps.errors import DriverError
from yunion_mps.examination import Examination
from yunion_mps.inventory import Nvml, scan
from yunion_mps.models import Inventory
from yunion_mps.paths import Paths
from yunion_mps.service import Service, one_line
from yunion_mps.supervisor import Supervisor
from yunion_mps.systemd import Notifier, watchdog_interval_s

log = logging.getLogger(__name__)

#: How often the GPUs are looked at; one look takes about a millisecond a GPU.
RESCAN_S = 10.0


def serve(
    examination: Examination,
    paths: Paths,
    listener: socket.socket,
    supervisor: Supervisor,
    service: Service,
    notifier: Notifier,
    stop: StopSignals,
) -> None:
    """Run until the domains have stopped after a signal."""
    gc.freeze()  # what was imported stays for good; the collector need not look at it
    gc.enable()
    asyncio.run(_Loop(paths, supervisor, service, notifier).run(listener, examination.nvml, stop))


class _Loop:
    def __init__(self, paths: Paths, supervisor: Supervisor, service: Service, notifier: Notifier) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._service = service
        self._notifier = notifier
        self._watched: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._end: asyncio.Future[None] | None = None

    async def run(self, listener: socket.socket, nvml: Nvml | None, stop: StopSignals) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_report)
        self._end = loop.create_future()
        # Not loop.add_signal_handler: its end would leave the winding up to a second signal's mercy.
        loop.add_reader(stop.fileno(), self._guarded, lambda: self._stop(stop))
        server = Server(Router(self._service))
        await server.open(listener)
        tasks = [asyncio.create_task(self._watchdog())]
        if nvml:
            tasks.append(asyncio.create_task(self._rescan(nvml)))
        for task in tasks:
            task.add_done_callback(self._task_ended)
        self._guarded(self._tick)
        try:
            await self._end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._unwatch()
            await server.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do `work`; a fault of ours ends the loop, and the daemon, which systemd then starts anew.

        The control daemons live on and are taken over; going on without supervision would be worse.
        """
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is raised again where the loop is awaited
            self._fail(error)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception():
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error and self._end and not self._end.done():
            self._end.set_exception(error)

    def _stop(self, stop: StopSignals) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(stop.fileno())
        self._stopping = True
        log.info("stopping, for %s came", stop.requested)
        self._notifier.stopping("waiting for the control daemons' clients to end")
        self._supervisor.stop(loop.time())
        self._tick()

    def _tick(self) -> None:
        """Let the supervisor do what is due, then watch for whatever it waits for now."""
        loop = asyncio.get_running_loop()
        self._unwatch()
        due_s = self._supervisor.tick(loop.time())
        if self._end and self._stopping and self._supervisor.stopped:
            if not self._end.done():
                self._end.set_result(None)
            return
        self._watched = self._supervisor.descriptors()
        for descriptor in self._watched:
            loop.add_reader(descriptor, self._guarded, self._tick)
        if due_s is not None:
            self._timer = loop.call_at(due_s, self._guarded, self._tick)
        if not self._stopping:
            self._notifier.status(one_line(self._service.status()))

    def _unwatch(self) -> None:
        """Forget every descriptor: the supervisor may close one, and the next of its number be another's."""
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._watched = []
        if self._timer:
            self._timer.cancel()
            self._timer = None

    async def _rescan(self, nvml: Nvml) -> None:
        """Look at the GPUs now and then."""
        trouble = ""
        while True:
            await asyncio.sleep(RESCAN_S)
            try:
                self._supervisor.rescan(await _on_thread(lambda: scan(nvml, self._paths)))
                trouble = ""
            except DriverError as error:
                if error.message != trouble:
                    log.error("the GPUs cannot be looked at: %s. %s", error.message, error.hint)
                trouble = error.message
                self._supervisor.lose_driver(error)
            self._notifier.status(one_line(self._service.status()))

    async def _watchdog(self) -> None:
        interval_s = watchdog_interval_s()
        while interval_s:
            self._notifier.alive()
            await asyncio.sleep(interval_s)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio could not hand to anybody: in one line where the system refused something."""
    del loop
    error = context.get("exception")
    trace = None if isinstance(error, OSError) else error
    log.error("%s: %s", context.get("message"), error, exc_info=trace)


async def _on_thread(work: Callable[[], Inventory]) -> Inventory:
    """Call `work` on a thread that nobody waits for at the end: a call of the driver may hang for good."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Inventory] = loop.create_future()

    def deliver(outcome: Inventory | Exception) -> None:
        if result.cancelled():
            return
        if isinstance(outcome, Exception):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)

    def run() -> None:
        try:
            outcome: Inventory | Exception = work()
        except Exception as error:  # noqa: BLE001 - it is raised again where the result is awaited
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, name="rescan", daemon=True).start()
    return await result
