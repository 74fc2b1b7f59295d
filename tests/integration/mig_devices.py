"""The MIG devices of the first GPU, 00:06.0, of a host with a running daemon."""

from __future__ import annotations

from typing import Any

from integration.daemon_host import Daemon
from simhost.gpu import MigDevice


def instances(daemon: Daemon) -> list[MigDevice]:
    return daemon.host.gpus[0].mig_devices()


def profiles(daemon: Daemon) -> list[str]:
    return sorted(one.profile for one in instances(daemon))


def devices(daemon: Daemon) -> dict[str, dict[str, Any]]:
    rows = daemon.get("/v1/devices?limit=100")[1]["isolated_devices"]
    return {row["addr"]: row for row in rows if row["addr"].startswith("00:06.0")}


def gpu(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.get("/v1/gpus")[1]["gpus"][0]
    return found


def free(daemon: Daemon) -> int:
    return sum(row["state"] == "free" for row in devices(daemon).values())
