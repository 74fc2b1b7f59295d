"""What the host is at, in one word and in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yunion_mps.models import Snapshot
from yunion_mps.mps.states import READY
from yunion_mps.service.reasons import gpu_reason, reasons
from yunion_mps.service.shapes import AVAILABLE, PENDING

#: What the host can be at; see `state_of`.
STATES = ("ready", "degraded", "failed", "disabled")


def state_of(snapshot: Snapshot) -> str:
    """`ready`, `degraded` (something that should serve does not), `failed` (nothing does) or `disabled`."""
    if not snapshot.enabled:
        return "disabled"
    serving = sum(domain.state == READY for domain in snapshot.domains)
    if not serving:
        return "failed"
    broken = any(gpu_reason(gpu, snapshot) for gpu in snapshot.inventory.gpus)
    broken = broken or any(reasons(snapshot).values())
    return "degraded" if broken or serving < len(snapshot.domains) else "ready"


def one_line(status: dict[str, Any]) -> str:
    """The status in one line, for systemd and for logs."""
    devices, domains = status["devices"], status["domains"]
    serving = sum(domain["state"] == READY for domain in domains)
    if status["notice"]:
        return str(status["notice"])
    line = f"{devices[AVAILABLE]} of {devices['total']} devices available, "
    line += f"{devices[PENDING]} pending, " if devices[PENDING] else ""
    line += f"{serving} of {len(domains)} control daemons serving"
    troubles: Sequence[str] = [d["reason"] for d in domains if d["state"] != READY]
    return line + (f"; {troubles[0]}" if troubles else "")
