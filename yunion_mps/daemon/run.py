"""The daemon's life: examine, start the domains, say READY, serve, stop, put back."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from yunion_mps import __version__
from yunion_mps.daemon import logs
from yunion_mps.daemon.lock import take_lock
from yunion_mps.daemon.options import Options
from yunion_mps.errors import ConfigError, ShortageError, YunionError
from yunion_mps.examination import Examination, examine
from yunion_mps.paths import Paths
from yunion_mps.service import Service, one_line
from yunion_mps.supervisor import Supervisor, warnings
from yunion_mps.systemd import Notifier

log = logging.getLogger("yunion_mps.daemon")


def run(options: Options) -> int:
    """Run until a signal says to stop; returns the exit status."""
    logs.set_up(options.log_level)
    paths = Paths.from_environment()
    try:
        if options.check:
            return _check(paths)
        lock = take_lock(paths)
        try:
            stop = StopSignals()
        except OSError as error:
            raise ShortageError(f"signals cannot be waited for: {error.strerror}") from None
        try:
            _serve(paths, stop)
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
    examination = examine(paths)
    try:
        examination.check()
    finally:
        examination.close()
    log.info("the configuration is right: %d devices", len(examination.plan.devices))
    return 0


def _serve(paths: Paths, stop: StopSignals) -> None:
    started_s = time.time()
    notifier = Notifier()
    notifier.status("reading the configuration and looking at the GPUs")
    examination = examine(paths)
    try:
        examination.check()
        supervisor = Supervisor(paths, examination)
        try:
            listener = _start(paths, supervisor, stop)
        except (YunionError, OSError) as error:
            _wind_up(supervisor, notifier, spare_found=True)
            if isinstance(error, OSError):
                raise ShortageError(f"the system refused something: {error}") from None
            raise
        if listener:
            service = Service(supervisor.snapshot, started_s, os.getpid())
            _until_stopped(paths, examination, listener, supervisor, service, notifier, stop)
        _wind_up(supervisor, notifier)
        stop.close()
    finally:
        examination.close()
    log.info("stopped")


def _wind_up(supervisor: Supervisor, notifier: Notifier, *, spare_found: bool = False) -> None:
    """Stop the control daemons and put the compute modes back.

    Not done when a fault of our own ends us: then, as after SIGKILL, the control daemons and their clients
    live on, and the next daemon takes them over.
    """
    notifier.stopping("stopping the control daemons and putting the compute modes back")
    supervisor.stop(time.monotonic(), spare_found=spare_found)
    drive(supervisor, lambda: supervisor.stopped)
    supervisor.close()


def _until_stopped(
    paths: Paths,
    examination: Examination,
    listener: socket.socket,
    supervisor: Supervisor,
    service: Service,
    notifier: Notifier,
    stop: StopSignals,
) -> None:
    """Serve. READY is said once every limit was read back and the socket listens.

    What the event loop needs (asyncio, h11: some 20 ms of imports) is loaded after that; until then
    the kernel keeps the connections of the first clients for us.
    """
    with listener:
        try:
            line = one_line(service.status())
            log.info("yunion-mps %s is ready: %s", __version__, line)
            for warning in warnings(supervisor.snapshot()):
                log.warning("%s", warning)
            notifier.ready(line)
            serve = _load_event_loop()
            serve(examination, paths, listener, supervisor, service, notifier, stop)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.socket)


def _load_event_loop() -> Callable[..., None]:
    """Import asyncio without ssl, which it would take where it is there: 4 MiB for a Unix socket."""
    absent: Any = None  # makes an import of the name fail, which asyncio is written for
    sys.modules.setdefault("ssl", absent)
    try:
        from yunion_mps.daemon.loop import serve
    finally:
        if sys.modules["ssl"] is None:
            del sys.modules["ssl"]
    return serve


class StopSignals:
    """SIGTERM and SIGINT: the handler only notes the name, and a descriptor wakes whatever waits."""

    def __init__(self) -> None:
        self.requested = ""
        self._wake, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def fileno(self) -> int:
        """A descriptor that becomes readable with the first signal."""
        return self._wake

    def close(self) -> None:
        """Go back to the system's own handling."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake)
        os.close(self._write)

    def _request(self, number: int, _: object) -> None:
        self.requested = signal.Signals(number).name


def _start(paths: Paths, supervisor: Supervisor, stop: StopSignals) -> socket.socket | None:
    """Start the domains and wait for each to be ready or to say why not; return the listening socket.

    None where a signal came first. Raises YunionError when no domain is ready.
    """
    supervisor.start(time.monotonic())
    drive(supervisor, lambda: supervisor.started or bool(stop.requested), stop.fileno())
    if stop.requested:
        return None
    error = supervisor.first_error()
    if error and not supervisor.serving:
        raise error
    from yunion_mps.api.listener import listen

    return listen(paths)


def drive(supervisor: Supervisor, done: Callable[[], bool], wake: int | None = None) -> None:
    """Tick until `done`, by poll(2): what the event loop does while it is there."""
    while True:
        due_s = supervisor.tick(time.monotonic())
        if done():
            return
        poll = select.poll()
        for descriptor in [*supervisor.descriptors(), *([] if wake is None else [wake])]:
            poll.register(descriptor, select.POLLIN)
        wait_ms = None if due_s is None else max(0.0, due_s - time.monotonic()) * 1000
        poll.poll(wait_ms)
