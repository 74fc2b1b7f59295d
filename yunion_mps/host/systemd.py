"""What systemd is told (sd_notify(3), if it started us), and the unit of ours that a process is in."""

from __future__ import annotations

import os
import re
import time

from yunion_mps.escaping import printable
from yunion_mps.host.proc import is_exiting

#: The control group of a unit of systemd/yunion-mps-job@.service, or one below it.
_JOB_UNIT = re.compile(r"(?:^|/)system\.slice/(?:[^/]+\.slice/)*(yunion-mps-job@[^/]*\.service)(?:/|$)")
#: Below these, users' own managers make groups of any name.
_USERS = re.compile(r"/user(?:@|\.slice)")


class Notifier:
    """Tells systemd how the daemon is, by the sdnotify library."""

    def __init__(self) -> None:
        self._last_status = ""
        self._library = None
        if os.environ.get("NOTIFY_SOCKET"):
            import sdnotify

            self._library = sdnotify.SystemdNotifier()

    def ready(self, status: str) -> None:
        self._last_status = status
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        """What `systemctl status` shows in words; a repetition is not sent."""
        if status != self._last_status:
            self._send(f"STATUS={status}")
        self._last_status = status

    def reloading(self, status: str) -> None:
        """The daemon changes, and calls `ready` after it; for systemd, it is up all the while."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}", f"STATUS={status}")

    def stopping(self, status: str, within_s: int) -> None:
        """The daemon has begun to stop, and may take so long, whatever the unit's own timeout is."""
        within_us = within_s * 1_000_000
        self._send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={within_us}", f"STATUS={status}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        """Send each assignment as one line: text quoted in a status cannot become another one."""
        if self._library:
            message = "\n".join(map(printable, assignments))
            # The library encodes to Latin-1, and sends nothing if that fails; systemd reads UTF-8.
            self._library.notify(message.encode().decode("latin-1"))


def watchdog_interval_s() -> float | None:
    """How often systemd expects a sign of life, halved for safety; None if it expects none."""
    text = os.environ.get("WATCHDOG_USEC", "")
    pid = os.environ.get("WATCHDOG_PID", "")
    if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 2_000_000


def job_unit_of(pid: int, proc: str = "/proc") -> str | None:
    """The job's unit that the process is in, such as `yunion-mps-job@train.service`; None if that is unknown.

    systemd makes a control group for each unit, and no job can leave its own. "" also if there are no control
    groups, or if the process is in a PID namespace that cannot be seen from here (PID 0). It is unknown
    if the process has ended or begun to: control groups of version 1 have lost it by then, and say `/`.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            groups = file.read().splitlines()
    except FileNotFoundError:
        groups = []
    except OSError:  # no descriptor is left, for example
        return None
    if pid and is_exiting(pid, proc):  # not before: it may exit at any time
        return None
    found = (_JOB_UNIT.search(group) for group in groups if not _USERS.search(group))
    return next((match[1] for match in found if match), "")
