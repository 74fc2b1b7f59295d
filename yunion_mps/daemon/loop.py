"""The event loop: ticks the supervisor, handles signals, and runs server, monitor and watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import select
from collections.abc import Callable, Mapping

from yunion_mps.core.errors import HostError, YunionError
from yunion_mps.core.tasks import cancel, within
from yunion_mps.daemon.process import DaemonParts, program
from yunion_mps.gateway import publish_addresses, remove_addresses
from yunion_mps.host.log import Failures
from yunion_mps.host.processes import Watchable
from yunion_mps.host.systemd import watchdog_interval_s
from yunion_mps.http.client import Exchange
from yunion_mps.http.handlers import Handlers
from yunion_mps.http.operations import GET_HEALTH
from yunion_mps.http.router import RequestCounter, Router
from yunion_mps.http.server import Server
from yunion_mps.metrics.exporter import Exporter, Textfile
from yunion_mps.service.facts import collect_facts
from yunion_mps.service.monitor import Monitor
from yunion_mps.service.publisher import CdiPublisher
from yunion_mps.service.reload import LoopControl
from yunion_mps.service.services import Services
from yunion_mps.slurm.recreated_instances import write_instances

log = logging.getLogger(__name__)

#: How overdue a tick may be before systemd's watchdog is no longer notified.
_LATE_S = 10.0
#: How often the daemon is checked if systemd's watchdog is not enabled.
_CHECK_INTERVAL_S = 15.0
#: How long the daemon's own answer may take.
_ANSWER_S = 5.0
#: A cancelled task of the loop that has not ended by then has lost its cancellation.
_CANCEL_RETRY_S = 0.1
#: A HEAD request, because only the status line is read.
_REQUEST = Exchange("HEAD", GET_HEALTH.encode({})).request


def serve_until_stop(parts: DaemonParts) -> bool:
    """Run until the domains have stopped, or a re-exec is requested; return whether it was."""

    async def work() -> bool:
        return await _Loop(parts).run()

    gc.freeze()  # imported modules are never freed, so the collector need not visit them
    return asyncio.run(work())


class _Loop:
    def __init__(self, parts: DaemonParts) -> None:
        self._paths = parts.paths
        self._listener = parts.listener
        self._supervisor = parts.supervisor
        self._notifier = parts.notifier
        self._signals = parts.signals
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[bool] = self._loop.create_future()
        self._background: list[asyncio.Future[None]] = []
        #: Watches the descriptors of all domains, at a fifth of the cost of the event loop's own readers.
        self._watch = select.epoll()
        self._watched: dict[Watchable, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None
        self._is_tick_scheduled = False
        self._published_config = self._supervisor.config
        #: The snapshot's version when Slurm's jobs were last told of their MIG instances.
        self._followed_version = -1
        #: The version of the status that was last sent to systemd.
        self._notified_version = -1
        control = LoopControl(
            program=program(),
            poll_now=asyncio.Event(),
            tick=self._schedule_tick,
            reexec=self._request_reexec,
            poll=self._poll,
        )
        self._poll_now = control.poll_now
        self._cdi = CdiPublisher(self._paths, self._supervisor)
        services = Services.of(self._paths, self._supervisor, self._cdi, control, started_s=parts.started_s)
        self._services = services
        self._queries = services.queries
        self._monitor = Monitor(self._paths, services, control)
        requests = RequestCounter()
        exporter = Exporter(lambda: collect_facts(services, requests.counts()))
        router = Router(Handlers(services, exporter.render), requests)
        self._textfile = Textfile(self._paths, self._supervisor, exporter)
        self._server = Server(router)
        self._watchdog = Watchdog(parts, self._server, self._overdue_text)

    async def run(self) -> bool:
        self._loop.set_exception_handler(_report)
        self._services.leases.restore()
        # Not loop.add_signal_handler: once the loop has ended, a second signal would interrupt the stop.
        self._loop.add_reader(self._signals.fileno(), self._guard, self._handle_signals)
        self._loop.add_reader(self._watch.fileno(), self._schedule_tick)
        await self._server.open(self._listener.socket)
        tasks = [asyncio.create_task(part.run()) for part in (self._watchdog, self._monitor, self._textfile)]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        is_reexec = False
        try:
            is_reexec = await self._until_end()
        finally:
            await cancel(tasks, _CANCEL_RETRY_S)
            if self._timer:
                self._timer.cancel()
            self._loop.remove_reader(self._watch.fileno())
            self._watch.close()
            self._loop.remove_reader(self._signals.fileno())
            self._services.leases.cancel_queued()
            if is_reexec:
                self._services.events.close()
                self._queries.changes.close()
            await (self._server.hand_over() if is_reexec else self._server.close())
            self._textfile.remove()
            if not is_reexec:
                remove_addresses(self._paths)
            self._services.leases.close()  # before the closed connections end their leases
            self._cdi.close()
        if not is_reexec:  # and not after a crash: then the next daemon takes the files as they are
            self._cdi.remove()
        return is_reexec

    async def _until_end(self) -> bool:
        """Tick and handle signals until the end; return whether a re-exec is requested."""
        store = self._supervisor.store()
        event_log = self._supervisor.event_log
        with store.without_waiting(), event_log.retried_by(self._schedule_tick):
            self._guard(self._tick)
            self._guard(self._handle_signals)
            return await self._end

    def _guard(self, work: Callable[[], None]) -> None:
        """Do `work`; an unexpected exception ends the loop and the daemon, which systemd restarts.

        The control daemons keep running and are adopted; continuing without supervision would be worse.
        """
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is raised again where the loop is awaited
            self._fail(error)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception():
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error and not self._end.done():
            self._end.set_exception(error)

    def _handle_signals(self) -> None:
        self._signals.clear()
        if self._supervisor.stopping:
            return
        if self._signals.stop:
            self._stop(self._signals.stop)
        elif self._signals.take_reload():
            task = asyncio.create_task(self._reload())
            task.add_done_callback(self._task_ended)
            self._background = [task]

    async def _reload(self) -> None:
        with contextlib.suppress(YunionError):  # it was logged
            await self._services.reloader.reload("SIGHUP")

    def _stop(self, signal_name: str) -> None:
        log.info("received %s, stopping", signal_name)
        status = "waiting for the control daemons' clients to end"
        self._notifier.stopping(status, self._supervisor.stop_within_s)
        self._supervisor.stop(self._loop.time())
        self._background.append(asyncio.ensure_future(self._monitor.poll_processes()))
        self._tick()

    def _request_reexec(self) -> None:
        if not self._end.done() and not self._supervisor.stopping:
            self._end.set_result(True)

    async def _poll(self) -> None:
        await self._monitor.poll()

    def _schedule_tick(self) -> None:
        """Schedule one tick for everything that happens until then: dozens of control daemons may answer."""
        if not self._is_tick_scheduled:
            self._is_tick_scheduled = True
            self._loop.call_soon(self._guard, self._tick)

    def _tick(self) -> None:
        """Tick the supervisor, then watch the descriptors and the time that it waits for."""
        self._is_tick_scheduled = False
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._end.done():
            return
        ready = {descriptor for descriptor, _ in self._watch.poll(0)}
        readable = {watchable for watchable, descriptor in self._watched.items() if descriptor in ready}
        due_s = self._supervisor.tick(self._loop.time(), readable)
        self._due_s = due_s
        if self._supervisor.fleet.take_poll_request():
            self._poll_now.set()
        if self._supervisor.stopping and self._supervisor.fleet.stopped:
            self._end.set_result(False)
            return
        self._update_watched()
        if due_s is not None:
            self._timer = self._loop.call_at(due_s, self._guard, self._tick)
        self._services.leases.follow_devices()
        self._publish_instances()
        self._services.leases.serve()  # the change may satisfy a queued request
        self._publish_config()
        self._cdi.refresh()
        self._queries.changes.notify()
        if not self._supervisor.stopping and self._queries.version != self._notified_version:
            self._notified_version = self._queries.version
            self._notifier.status(self._queries.summary)

    def _publish_config(self) -> None:
        if self._supervisor.config is not self._published_config:
            self._published_config = self._supervisor.config
            self._textfile.wake()
            publish_addresses(self._paths, self._published_config)

    def _publish_instances(self) -> None:
        """Tell the steps of Slurm's jobs what has become of their MIG instances."""
        version = self._supervisor.snapshot().version
        if version != self._followed_version and os.path.exists(self._paths.slurm_devices):
            write_instances(
                self._paths, self._services.leases.leases(brief=True), self._queries.all_devices()
            )
        self._followed_version = version

    def _overdue_text(self) -> str:
        """Return how overdue the next tick is, as text; empty if it is in time."""
        late_s = 0.0 if self._due_s is None else self._loop.time() - self._due_s
        return f"the supervision loop is {late_s:.0f} s overdue" if late_s > _LATE_S else ""

    def _update_watched(self) -> None:
        """Watch what the supervisor waits for now.

        The kernel forgets a descriptor that is closed, and its number may be used again. So what has a
        descriptor is compared, not its number, and the old ones are unregistered first.
        """
        watched = {watchable: watchable.fileno() for watchable in self._supervisor.watched()}
        for watchable in self._watched.keys() - watched.keys():
            with contextlib.suppress(OSError):  # it was closed
                self._watch.unregister(self._watched[watchable])
        for watchable in watched.keys() - self._watched.keys():
            self._watch.register(watched[watchable], select.EPOLLIN)
        self._watched = watched


class Watchdog:
    """Checks the daemon itself, and notifies systemd's watchdog while it is healthy (sd_notify(3)).

    late: returns how overdue ticks are, as text; empty if they are in time.
    """

    def __init__(self, parts: DaemonParts, server: Server, late: Callable[[], str]) -> None:
        self._path = parts.paths.socket
        self._listener = parts.listener
        self._server = server
        self._notifier = parts.notifier
        self._late = late
        self._failures = Failures(log, level=logging.ERROR)

    async def run(self) -> None:
        """Check until the task is cancelled, and notify systemd while the daemon is healthy."""
        interval_s = watchdog_interval_s()
        if interval_s:
            self._notifier.alive()
        while True:
            await asyncio.sleep(interval_s or _CHECK_INTERVAL_S)
            error_text = self._late() or await self._socket_error()
            if error_text:
                silence = "not notifying systemd's watchdog until this is resolved"
                self._failures.report(f"unhealthy: {error_text}", consequence=silence)
                continue
            self._failures.clear()
            if interval_s:
                self._notifier.alive()

    async def _socket_error(self) -> str:
        """Return why the daemon's socket does not answer, empty if it does; create a removed one again."""
        slow = HostError(f"the daemon's own socket did not answer within {_ANSWER_S:g} s")
        try:
            if not self._listener.is_reachable:
                await self._server.reopen(self._listener)
                log.warning("the socket %s was removed; creating it again", self._path)
            answer = await within(_ANSWER_S, _request_health(self._path), slow)
        except HostError as error:
            return error.message
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return ""  # this passes when clients disconnect, and a restart would not help
            return f"the daemon's own socket cannot be reached: {error.strerror or error}"
        return "" if answer.startswith(b"HTTP/1.1 ") else "the daemon's own socket does not answer"


async def _request_health(path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(_REQUEST)
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _report(loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
    """Log an unhandled error in asyncio, without a traceback if it is an OSError."""
    del loop
    error = context.get("exception")
    trace = error if isinstance(error, BaseException) and not isinstance(error, OSError) else None
    log.error("%s: %s", context.get("message"), error, exc_info=trace)
