"""sd_notify(3) messages to systemd, and the interval of its watchdog."""

from __future__ import annotations

import os
import time

from sdnotify import SystemdNotifier

from yunion_mps.core.text import printable


class Notifier:
    """Reports the daemon's state to systemd; does nothing if systemd did not start it."""

    def __init__(self) -> None:
        self._last_status = ""
        self._systemd: SystemdNotifier | None = None
        if os.environ.get("NOTIFY_SOCKET"):  # connected now, because later no descriptor may be left
            self._systemd = SystemdNotifier()

    def ready(self, status: str) -> None:
        """Report the end of a start or reload; by then `systemctl status` shows this status."""
        self._last_status = status
        self._send(f"STATUS={status}", "READY=1")

    def status(self, status: str) -> None:
        """Set the status line of `systemctl status`; repetitions are not sent."""
        if status != self._last_status:
            self._send(f"STATUS={status}")
        self._last_status = status

    def reloading(self, status: str) -> None:
        """Report a change that `ready` ends; systemd considers the daemon up throughout."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}", f"STATUS={status}")

    def stopping(self, status: str, within_s: int) -> None:
        """Report that the daemon is stopping and may take `within_s`, whatever the unit's timeout is."""
        within_us = within_s * 1_000_000
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={within_us}", f"STATUS={status}")

    def alive(self) -> None:
        """Report a sign of life, which systemd's watchdog expects."""
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        """Send one line for each assignment: text quoted in a status cannot add another assignment."""
        if self._systemd is None:
            return
        message = "\n".join([printable(assignment) for assignment in assignments])
        # It encodes text as Latin-1 and drops what does not fit. So it gets a letter for each byte of UTF-8.
        self._systemd.notify(message.encode().decode("latin-1"))


def watchdog_interval_s() -> float | None:
    """Return half the interval in which systemd expects a sign of life; None if it expects none."""
    text = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or int(text) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None
    return int(text) / 2_000_000
