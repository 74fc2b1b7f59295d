"""What an operator can read, and how the table shows it."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from integration.daemon_host import Daemon
from simhost import SimHost


def readable(daemon: Daemon) -> list[str]:
    """What an operator can read: the events, the status, the GPUs, the log.

    They are read in the opposite order, so that what is in two of them is always found in the same one.
    """
    log = [re.sub(r"^<\d>", "", line) for line in daemon.log.splitlines()]
    if not daemon.running:
        return log
    with contextlib.suppress(OSError, AssertionError):
        gpus = [gpu["reason"] for gpu in daemon.get("/v1/gpus")[1]["gpus"]]
        status = daemon.status()
        lines = [status["notice"], *daemon.warnings()]
        for domain in status["domains"]:
            lines += [domain["reason"], domain["pending"]]
        return [*map(_sentence, events_of(daemon)), *lines, *gpus, *log]
    return log


def events_of(daemon: Daemon) -> list[dict[str, Any]]:
    """The newest events (1,000), oldest first."""
    status, answer = daemon.get("/v1/events?limit=1000")
    assert status == 200, answer
    return list(answer["events"])


def _sentence(event: dict[str, Any]) -> str:
    cause = f" ({event['cause']})" if event["cause"] else ""
    means = f": {event['consequence']}" if event["consequence"] else ""
    return f"{event['subject']}: {event['what']}{cause}{means}"


def shown(line: str, host: SimHost) -> str:
    """The line as it would be on any host: without the root, and N for what is another number each time."""
    text = line.replace(str(host.root), "")
    text = re.sub(r"\b(PIDs?) \d+(, \d+)*", r"\1 N", text)
    text = re.sub(r"\b(kill -\w+) \d+", r"\1 N", text)
    text = re.sub(r"\bhas \d+ connections", "has N connections", text)
    # A queue that is filled from the start may be full before or after the domain is ready.
    text = re.sub(r"\b(applying|ready) (-> wedged .*its queue is full)", r"… \2", text)
    return re.sub(r"GPU-[0-9a-f-]{36}", "GPU-…", text)


def shown_s(elapsed_s: float) -> str:
    """A time as the table has it, so rough that it is nearly the same each time."""
    if elapsed_s < 0.1:
        return "under 0.1 s"
    return f"{elapsed_s:.1f} s" if elapsed_s < 2 else f"{elapsed_s:.0f} s"
