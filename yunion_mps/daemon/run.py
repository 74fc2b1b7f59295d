"""The daemon's life cycle: preflight, start the domains, READY, serve, stop, restore what GPUs had before."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from yunion_mps import __version__
from yunion_mps.core.enums import WARNING
from yunion_mps.core.errors import ShortageError, YunionError
from yunion_mps.core.models import Event
from yunion_mps.core.paths import Paths
from yunion_mps.core.reasons import FAILED
from yunion_mps.daemon.options import PROGRAM, Options
from yunion_mps.daemon.process import DaemonParts, ReexecState, Signals, inherited_state, reexec_program
from yunion_mps.gateway import publish_addresses
from yunion_mps.gpus.restoration import RESTORE_WITHIN_S
from yunion_mps.host.lock import take_lock
from yunion_mps.host.log import set_log_prefix, set_up_log
from yunion_mps.host.processes import drive
from yunion_mps.host.systemd import Notifier
from yunion_mps.http.listener import Listener
from yunion_mps.supervisor import Supervisor
from yunion_mps.supervisor.preflight import run_preflight
from yunion_mps.supervisor.unit_access import own_unit_problems

log = logging.getLogger("yunion_mps.daemon")


def run_daemon(options: Options) -> int:
    """Do what the options say; return the exit status. A YunionError, such as ShortageError, is logged."""
    set_up_log(options.log_level)
    paths = Paths.from_environment()
    try:
        if options.is_offline:
            set_log_prefix(PROGRAM)
            return _run_offline(paths, options)
        state = inherited_state()
        lock = state.lock if state else take_lock(paths)
        try:
            signals = Signals()
        except OSError as error:
            raise ShortageError(f"cannot wait for signals: {error.strerror}") from None
        try:
            is_restored = _run(paths, signals, lock, state)
        finally:
            os.close(lock)
    except YunionError as error:
        set_log_prefix(PROGRAM)
        for line in error.lines:
            log.error("%s", line)
        return error.exit_code
    return 0 if is_restored else 1


def _run_offline(paths: Paths, options: Options) -> int:
    from yunion_mps.service import offline  # a daemon that serves does not need it in its memory

    if options.check:
        return offline.check(paths, requires_driver=options.require_driver)
    if options.adopt is not None:
        return offline.adopt(paths, options.adopt)
    lock = take_lock(paths)
    try:
        return offline.restore(paths)
    finally:
        os.close(lock)


def _run(paths: Paths, signals: Signals, lock: int, state: ReexecState | None) -> bool:
    """Serve until a stop; return whether it was known what the stop had to restore."""
    notifier = Notifier()
    notifier.status("reading the configuration and the GPUs")
    preflight = run_preflight(paths, creates_directories=True, find_unit_problems=own_unit_problems)
    try:
        preflight = preflight.for_start()
        daemon = DaemonLife(
            paths,
            signals=signals,
            notifier=notifier,
            supervisor=Supervisor(paths, preflight),
            lock=lock,
            state=state,
        )
        listener = daemon.start()
        if listener:
            daemon.serve(listener)
        is_known = daemon.stop()
        signals.close()
    finally:
        preflight.close()
    log.info("stopped")
    return is_known


class DaemonLife:
    """The start, the service and the stop of one daemon.

    lock: the descriptor that holds the lock of the host's only daemon.
    state: what the program before a re-exec has handed over; None if this is none.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        signals: Signals,
        notifier: Notifier,
        supervisor: Supervisor,
        lock: int,
        state: ReexecState | None,
    ) -> None:
        self._started_s = state.started_s if state else time.time()
        self._paths = paths
        self._signals = signals
        self._notifier = notifier
        self._supervisor = supervisor
        self._lock = lock
        self._state = state
        #: Serves requests until a stop, or a re-exec, for which it returns True.
        self._serve_requests: Callable[[DaemonParts], bool] | None = None

    def start(self) -> Listener | None:
        """Start the domains, wait until each is ready or has failed, and return the listening socket.

        None if a signal arrived first. Raises YunionError if nothing is ready, after stopping everything.
        """
        try:
            return self._start_domains()
        except (YunionError, OSError) as error:
            self.stop(spare_adopted=True)
            if isinstance(error, OSError):
                raise ShortageError(f"a system call failed: {error}") from None
            raise

    def _start_domains(self) -> Listener | None:
        """Listen even if no domain is ready, if an adopted control daemon may have jobs to supervise."""
        supervisor = self._supervisor
        fleet = supervisor.fleet
        supervisor.start(time.monotonic())
        self._serve_requests = load_event_loop()  # while the control daemons start
        drive(supervisor, lambda: fleet.started or bool(self._signals.stop), self._signals)
        if self._signals.stop:
            return None
        supervisor.check_pipe_directories()
        if self._state:
            return Listener(self._paths, self._state.listener)
        error = fleet.common_error()
        if error:
            raise error
        return Listener(self._paths)

    def serve(self, listener: Listener) -> None:
        """Serve until a stop; in a shortage of memory, the stop does not use the event loop."""
        try:
            self._serve(listener)
        except MemoryError:
            if not self._signals.stop:
                raise
            log.error("stopping without the event loop: out of memory")

    def _serve(self, listener: Listener) -> None:
        """Notify READY, because every limit was read back, the socket listens, and all modules are there."""
        publish_addresses(self._paths, self._supervisor.config)
        try:
            summary = self._summary()
            self._notifier.ready(summary)
            self._announce(summary)
            parts = DaemonParts(
                paths=self._paths,
                listener=listener,
                supervisor=self._supervisor,
                notifier=self._notifier,
                signals=self._signals,
                started_s=self._started_s,
            )
            assert self._serve_requests
            while self._serve_requests(parts):
                state = ReexecState(
                    listener=listener.socket.fileno(), lock=self._lock, started_s=self._started_s
                )
                self._reexec(state)
            self._supervisor.report_late_jobs()
            self._record("info", "stopped", self._signals.stop)
        except OSError as error:  # the next daemon adopts the control daemons
            raise ShortageError(f"requests cannot be served: {error}") from None
        finally:
            listener.close()

    def _summary(self) -> str:
        """Return the status in one line, with the recorded leases."""
        from yunion_mps.service.queries import Queries

        ledger = self._supervisor.ledger
        return Queries(self._supervisor.snapshot, self._started_s, os.getpid(), ledger=ledger).summary

    def _announce(self, summary: str) -> None:
        """Log and record that the daemon is ready, and what is not as it should be."""
        state = "is running" if self._supervisor.snapshot().notice else "is ready"
        log.info("yunion-mps %s %s: %s", __version__, state, summary)
        for condition in self._supervisor.snapshot().conditions:
            if condition.level == WARNING:
                log.warning("%s", condition.text)
        self._record("info", f"ready, {__version__}", consequence=summary)

    def stop(self, *, spare_adopted: bool = False) -> bool:
        """Stop the control daemons and restore what GPUs had before; return whether that is known.

        Not called if the daemon crashes: then, as after SIGKILL, the control daemons and their clients keep
        running, and the next daemon adopts them.
        """
        self._notifier.stopping("stopping the control daemons", self._supervisor.stop_within_s)
        self._supervisor.stop(time.monotonic(), spare_adopted=spare_adopted)
        drive(self._supervisor, lambda: self._supervisor.fleet.stopped)
        self._notifier.stopping("restoring the GPUs' settings", RESTORE_WITHIN_S)
        return self._supervisor.close()

    def _reexec(self, state: ReexecState) -> None:
        """Run the program again in this process; if that fails, continue with this one."""
        log.info("re-executing the program; control daemons, socket and lock are kept")
        self._notifier.reloading("re-executing the program")
        self._supervisor.release()
        try:
            reexec_program(state)
        except OSError as error:
            text = f"cannot re-execute the program: {error}"
            log.error("%s; the running daemon continues", text)
            self._record("error", text, consequence="the running daemon continues", code=FAILED)
            self._notifier.ready(text)

    def _record(
        self, severity: str, text: str, cause: str = "", consequence: str = "", code: str = ""
    ) -> None:
        event = Event(
            severity=severity,
            kind="daemon",
            subject="yunion-mps-daemon",
            what=text,
            cause=cause,
            consequence=consequence,
            code=code,
        )
        self._supervisor.event_log.record(event)


def load_event_loop() -> Callable[[DaemonParts], bool]:
    """Import asyncio, without ssl, which would take 4 MiB, and all modules that are needed later.

    After an upgrade, their files would be of another version, and in a shortage they could not be read.
    Raises ShortageError.
    """
    absent: Any = None  # makes the import fail, which asyncio handles
    sys.modules.setdefault("ssl", absent)
    try:
        from yunion_mps.daemon.loop import serve_until_stop
        from yunion_mps.http import openapi  # noqa: F401 - which is otherwise imported when it is needed
    except OSError as error:
        raise ShortageError(f"the event loop cannot be loaded: {error}") from None
    except MemoryError:
        raise ShortageError("the event loop cannot be loaded: out of memory") from None
    finally:
        if sys.modules["ssl"] is None:
            del sys.modules["ssl"]
    return serve_until_stop
