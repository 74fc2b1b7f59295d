"""The event loop: drives the supervisor, serves the socket, looks at the GPUs, and says that it is alive."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

from yunion_mps.containers.publisher import CdiPublisher
from yunion_mps.daemon.changing import Changing
from yunion_mps.daemon.health import Health
from yunion_mps.daemon.looking import Looking
from yunion_mps.daemon.run import ANEW, STOPPED
from yunion_mps.daemon.signals import Signals
from yunion_mps.daemon.tasks import end_all
from yunion_mps.gateway import addresses
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.handlers import Handlers
from yunion_mps.http.listener import Listener
from yunion_mps.http.router import Router
from yunion_mps.http.server import Server
from yunion_mps.metrics.exporter import Exporter
from yunion_mps.metrics.textfile import Textfile
from yunion_mps.paths import Paths
from yunion_mps.service.clients import Clients
from yunion_mps.service.faults import Faults
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.metrics import Metrics
from yunion_mps.service.queries import Service
from yunion_mps.service.state import one_line
from yunion_mps.service.usage import ProcessDevices, UsageSampler
from yunion_mps.supervisor import Supervisor

log = logging.getLogger(__name__)

#: The supervisor is late when what was due is not done for so long.
_LATE_S = 10.0


def serve(
    paths: Paths,
    listener: Listener,
    supervisor: Supervisor,
    service: Service,
    notifier: Notifier,
    signals: Signals,
) -> str:
    """Run until the domains have stopped after a signal, or the program is to be run anew; returns which."""
    gc.freeze()  # what was imported stays for good; the collector need not look at it
    return asyncio.run(_Loop(paths, supervisor, service, notifier).run(listener, signals))


class _Loop:
    def __init__(self, paths: Paths, supervisor: Supervisor, service: Service, notifier: Notifier) -> None:
        self._paths = paths
        self._supervisor = supervisor
        self._service = service
        self._notifier = notifier
        self._watched: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s: float | None = None
        self._stopping = self._ticks_soon = False
        self._end: asyncio.Future[str] | None = None
        self._changing: Changing | None = None
        self._looking: Looking | None = None
        self._leases: LeaseService | None = None
        self._textfile: Textfile | None = None
        self._devices = CdiPublisher(paths, supervisor)
        self._seeing: asyncio.Future[None] | None = None
        self._announced = supervisor.config

    async def run(self, listener: Listener, signals: Signals) -> str:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_report)
        self._end = loop.create_future()
        lock = asyncio.Lock()
        clients = Clients(self._paths, self._supervisor)
        faults = Faults(self._paths, self._supervisor, clients)
        leases = self._leases = LeaseService(self._paths, self._supervisor, self._service, self._devices)
        devices = ProcessDevices(self._supervisor, leases.ledger)
        sampler = UsageSampler(self._supervisor, devices, self._service.usage)
        looking = Looking(self._paths, self._supervisor, lock, faults, self._tick_soon, sampler.record)
        lease_waits = leases.ledger.lease_waits
        changing = Changing(
            self._paths, self._supervisor, looking, lock, lease_waits, self._tick_soon, self._anew
        )
        self._changing, self._looking = changing, looking
        self._service.ledger = leases.ledger
        leases.restore()
        metrics = Metrics(
            self._supervisor,
            self._service,
            leases.ledger,
            leases.queue,
            devices,
            lambda: router.counted(),
        )
        exporter = Exporter(metrics)
        router = Router(Handlers(self._service, changing, clients, leases, exporter.answer))
        # Not loop.add_signal_handler: its end would leave the winding up to a second signal's mercy.
        loop.add_reader(signals.fileno(), self._guarded, lambda: self._heed(signals))
        server = Server(router)
        await server.open(listener.socket)
        health = Health(self._paths, listener, server, self._notifier, self._late)
        textfile = self._textfile = Textfile(self._paths, self._supervisor, exporter.text)
        tasks = [asyncio.create_task(one.run()) for one in (health, looking, textfile)]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        self._guarded(self._tick)
        self._guarded(lambda: self._heed(signals))
        end = STOPPED
        try:
            end = await self._end
        finally:
            await end_all(tasks)
            self._unwatch()
            loop.remove_reader(signals.fileno())
            leases.cancel_queued()
            await (server.hand_over() if end == ANEW else server.close())
            textfile.remove()
            if end == STOPPED:
                addresses.remove(self._paths)
            leases.close()  # before the end of its connections is noticed
            self._devices.close()
        if end == STOPPED:  # and not after a fault of ours: then the next daemon finds them as they are
            self._devices.remove()
        return end

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

    def _heed(self, signals: Signals) -> None:
        """Do what a signal asks for."""
        signals.clear()
        if signals.stop and not self._stopping:
            self._stop(signals.stop)
        elif signals.take_reload() and self._changing and not self._stopping:
            self._changing.reload_for("SIGHUP").add_done_callback(self._task_ended)

    def _stop(self, name: str) -> None:
        self._stopping = True
        log.info("stopping, for %s came", name)
        status = "waiting for the control daemons' clients to end"
        self._notifier.stopping(status, self._supervisor.stop_within_s)
        self._supervisor.stop(asyncio.get_running_loop().time())
        if self._looking:
            self._seeing = asyncio.ensure_future(self._looking.see_jobs())
        self._tick()

    def _anew(self) -> None:
        if self._end and not self._end.done() and not self._stopping:
            self._end.set_result(ANEW)

    def _tick_soon(self) -> None:
        """Tick once for all that has happened by then: dozens of control daemons may answer at a time."""
        if not self._ticks_soon:
            self._ticks_soon = True
            asyncio.get_running_loop().call_soon(self._guarded, self._tick)

    def _tick(self) -> None:
        """Let the supervisor do what is due, then watch for whatever it waits for now."""
        loop = asyncio.get_running_loop()
        self._ticks_soon = False
        self._unwatch()
        if self._end and self._end.done():
            return
        due_s = self._due_s = self._supervisor.tick(loop.time())
        if self._looking and self._supervisor.fleet.take_poll_request():
            self._looking.soon()
        if self._end and self._stopping and self._supervisor.fleet.stopped:
            self._end.set_result(STOPPED)
            return
        self._watched = self._supervisor.descriptors()
        for descriptor in self._watched:
            loop.add_reader(descriptor, self._tick_soon)
        if due_s is not None:
            self._timer = loop.call_at(due_s, self._guarded, self._tick)
        if self._leases:
            self._leases.serve()  # what has come or changed may be what a queued request needs
        self._announce()
        self._devices.refresh()
        self._say()

    def _announce(self) -> None:
        """Tell the gateway what the configuration opens, when that may have changed."""
        if self._supervisor.config is not self._announced:
            self._announced = self._supervisor.config
            if self._textfile:
                self._textfile.soon()
            addresses.publish(self._paths, self._announced)

    def _say(self) -> None:
        if not self._stopping:
            self._notifier.status(one_line(self._service.status()))

    def _late(self) -> str:
        """What the supervisor should have done by now."""
        late_s = 0.0 if self._due_s is None else asyncio.get_running_loop().time() - self._due_s
        return f"supervision is {late_s:.0f} s late" if late_s > _LATE_S else ""

    def _unwatch(self) -> None:
        """Forget every descriptor: the supervisor may close one, and the next of its number be another's."""
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
        self._watched = []
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio could not hand to anybody: in one line where the system refused something."""
    del loop
    error = context.get("exception")
    trace = None if isinstance(error, OSError) else error
    log.error("%s: %s", context.get("message"), error, exc_info=trace)
