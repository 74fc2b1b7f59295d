"""The daemon's life: examine, start the domains, say READY, serve, stop, put back."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from yunion_mps import __version__
from yunion_mps.daemon.handover import Handover, become_anew, received
from yunion_mps.daemon.lock import take_lock
from yunion_mps.daemon.options import Options
from yunion_mps.daemon.signals import Signals
from yunion_mps.errors import ConfigError, ShortageError, YunionError
from yunion_mps.gateway import addresses
from yunion_mps.host import logs
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.listener import Listener
from yunion_mps.leases.storage import recorded_ledger
from yunion_mps.models import Event
from yunion_mps.mps import directories
from yunion_mps.paths import Paths
from yunion_mps.service.queries import Service
from yunion_mps.service.state import one_line
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.supervisor.status import warnings

log = logging.getLogger("yunion_mps.daemon")

#: How the event loop came to its end.
STOPPED, ANEW = "stopped", "anew"


#: Imported where they are used, for few hosts and few clients use them.
_NEEDED_LATER = ("yunion_mps.http.openapi",)


class _LoadError(Exception):
    """A module could not be read, for descriptors are short."""


def run(options: Options) -> int:
    """Run until a signal says to stop; returns the exit status."""
    logs.set_up(options.log_level)
    paths = Paths.from_environment()
    try:
        if options.check:
            return _check(paths)
        if options.put_back:
            from yunion_mps.daemon.put_back import put_back  # few ever need it

            return put_back(paths)
        if options.take_over is not None:
            from yunion_mps.daemon.take_over import take_over  # once in a host's life

            return take_over(paths, options.take_over)
        handover = received()
        lock = handover.lock if handover else take_lock(paths)
        try:
            signals = Signals()
        except OSError as error:
            raise ShortageError(f"signals cannot be waited for: {error.strerror}") from None
        try:
            _serve(paths, signals, lock, handover)
        finally:
            os.close(lock)
    except YunionError as error:
        problems = error.problems if isinstance(error, ConfigError) else (error.message,)
        for problem in problems:
            log.error("%s", problem)
        if error.hint:
            log.error("%s", error.hint)
        return error.exit_code
    return 0


def _check(paths: Paths) -> int:
    examination = run_preflight(paths)
    try:
        examination.check()
    finally:
        examination.close()
    log.info("the configuration is right: %d devices", len(examination.plan.devices))
    return 0


def _serve(paths: Paths, signals: Signals, lock: int, handover: Handover | None) -> None:
    started_s = handover.started_s if handover else time.time()
    notifier = Notifier()
    notifier.status("reading the configuration and looking at the GPUs")
    directories.record_in(os.path.join(paths.state_directory, "directories"))
    examination = run_preflight(paths).for_start()
    try:
        examination.check()
        supervisor = Supervisor(paths, examination)
        try:
            listener = _start(paths, supervisor, signals, handover)
        except (YunionError, OSError) as error:
            _wind_up(supervisor, notifier, spare_found=True)
            if isinstance(error, OSError):
                raise ShortageError(f"the system refused something: {error}") from None
            raise
        if listener:
            service = Service(supervisor.snapshot, started_s, os.getpid(), supervisor.event_log)
            service.ledger = recorded_ledger(supervisor.store(), paths.lease_copies)
            anew = Handover(listener.socket.fileno(), lock, started_s)
            try:
                _until_stopped(paths, listener, supervisor, service, notifier, signals, anew)
            except MemoryError:
                if not signals.stop:
                    raise
                log.error("the stop goes on without the event loop, because memory is short")
        _wind_up(supervisor, notifier)
        signals.close()
    finally:
        examination.close()
    log.info("stopped")


def _wind_up(supervisor: Supervisor, notifier: Notifier, *, spare_found: bool = False) -> None:
    """Stop the control daemons and put the compute modes back.

    Not done when a fault of our own ends us: then, as after SIGKILL, the control daemons and their clients
    live on, and the next daemon takes them over.
    """
    status = "stopping the control daemons and putting the compute modes back"
    notifier.stopping(status, supervisor.stop_within_s)
    supervisor.stop(time.monotonic(), spare_found=spare_found)
    drive(supervisor, lambda: supervisor.fleet.stopped)
    supervisor.close()


def _until_stopped(
    paths: Paths,
    listener: Listener,
    supervisor: Supervisor,
    service: Service,
    notifier: Notifier,
    signals: Signals,
    anew: Handover,
) -> None:
    """Serve. READY is said once every limit was read back and the socket listens.

    What the event loop needs (asyncio, h11: some 20 ms of imports) is loaded after that; until then
    the kernel keeps the connections of the first clients for us.
    """
    line = one_line(service.status())
    log.info("yunion-mps %s is ready: %s", __version__, line)
    for warning in warnings(supervisor.snapshot()):
        log.warning("%s", warning)
    _record(supervisor, "info", f"ready, {__version__}", consequence=line)
    addresses.publish(paths, supervisor.config)
    notifier.ready(line)
    try:
        serve = _load_event_loop()
        while serve(paths, listener, supervisor, service, notifier, signals) == ANEW:
            _become_anew(supervisor, notifier, anew._replace(listener=listener.socket.fileno()))
        supervisor.report_late_jobs()
        _record(supervisor, "info", "stopped", signals.stop)
    except _LoadError as error:
        _wind_up(supervisor, notifier)
        raise ShortageError(f"the event loop cannot be loaded: {error}") from None
    finally:
        listener.close()


def _become_anew(supervisor: Supervisor, notifier: Notifier, anew: Handover) -> None:
    """Run the program anew in this process; where that fails, go on with this one."""
    log.info("the program is run anew; control daemons, socket and lock stay")
    notifier.reloading("the program is run anew")
    supervisor.release()
    try:
        become_anew(anew)
    except OSError as error:
        what = f"the program cannot be run anew: {error}"
        log.error("%s; this one goes on", what)
        _record(supervisor, "error", what, consequence="this one goes on")
        notifier.ready(what)


def _record(supervisor: Supervisor, severity: str, what: str, cause: str = "", consequence: str = "") -> None:
    supervisor.event_log.record(Event(severity, "daemon", "yunion-mps-daemon", what, cause, consequence))


def _load_event_loop() -> Callable[..., str]:
    """Import asyncio without ssl, which it would take where it is there: 4 MiB for a Unix socket.

    And all else of ours that is needed later: after an upgrade, its files are those of another version.
    """
    absent: Any = None  # makes an import of the name fail, which asyncio is written for
    sys.modules.setdefault("ssl", absent)
    try:
        from yunion_mps.daemon.loop import serve

        for name in _NEEDED_LATER:
            importlib.import_module(name)
    except OSError as error:
        raise _LoadError(str(error)) from None
    finally:
        if sys.modules["ssl"] is None:
            del sys.modules["ssl"]
    return serve


def _start(
    paths: Paths, supervisor: Supervisor, signals: Signals, handover: Handover | None
) -> Listener | None:
    """Start the domains and wait for each to be ready or to say why not; return the listening socket.

    None where a signal came first. Raises YunionError when no domain is ready; but where a control daemon
    runs that may have jobs, it is looked after all the same, for nobody else would.
    """
    gc.freeze()  # what was imported stays for good
    gc.enable()  # a start may have to wait for long
    supervisor.start(time.monotonic())
    drive(supervisor, lambda: supervisor.fleet.started or bool(signals.stop), signals)
    if signals.stop:
        return None
    if handover:
        return Listener(paths, handover.listener)
    error = supervisor.fleet.error_of_all()
    if error:
        raise error
    return Listener(paths)


class Driven(Protocol):
    """What `drive` can drive."""

    def tick(self, now_s: float) -> float | None:
        """Do what is due; return when to be called again at the latest."""

    def descriptors(self) -> list[int]:
        """What to watch for reading, to be asked for again after every tick."""


def drive(driven: Driven, done: Callable[[], bool], wake: Signals | None = None) -> None:
    """Tick until `done`, by poll(2): what the event loop does while it is there."""
    while True:
        if wake:
            wake.clear()
        due_s = driven.tick(time.monotonic())
        if done():
            return
        poll = select.poll()
        for descriptor in [*driven.descriptors(), *([] if wake is None else [wake.fileno()])]:
            poll.register(descriptor, select.POLLIN)
        wait_ms = None if due_s is None else max(0.0, due_s - time.monotonic()) * 1000
        poll.poll(wait_ms)
