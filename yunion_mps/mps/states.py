"""The states of a domain, and which may follow which."""

from __future__ import annotations

STOPPED = "stopped"
STARTING = "starting"  # the control daemon was started (or found) and does not answer yet
APPLYING = "applying"  # its limits are being set and read back
READY = "ready"  # every limit was read back: clients are served within their budgets
BACKOFF = "backoff"  # it ended or failed; the next start is due at a time
FAILED = "failed"  # no start helps before somebody has done something; tried again slowly
STOPPING = "stopping"  # it was asked to quit

LEGAL_CHANGES: dict[str, tuple[str, ...]] = {
    STOPPED: (STARTING, FAILED),
    STARTING: (APPLYING, BACKOFF, STOPPING, STOPPED),
    APPLYING: (READY, BACKOFF, STOPPING, STOPPED),
    READY: (BACKOFF, STOPPING, STOPPED),
    BACKOFF: (STARTING, FAILED, STOPPED),
    FAILED: (STARTING, FAILED, STOPPED),
    STOPPING: (STOPPED,),
}
