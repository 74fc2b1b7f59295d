"""Serves metrics and the web page over TCP, in an unprivileged process.

The daemon runs as root and never speaks to a network. It writes the addresses to a file, and loads no other
part of the gateway. The gateway listens there (`server`) and queries the daemon over the Unix socket
(`client`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os

from yunion_mps.core.paths import Paths
from yunion_mps.core.settings import Config
from yunion_mps.host.files import write_atomically

log = logging.getLogger(__name__)

#: Keys of host.conf that open a listener.
KEYS = ("metrics_listen", "web_listen")


def publish_addresses(paths: Paths, config: Config) -> None:
    """Write the TCP addresses to serve; the file exists while there are any."""
    addresses: dict[str, str] = {}
    for key in KEYS:
        address: str | None = getattr(config, key)
        if address:
            addresses[key] = address
    if not addresses:
        remove_addresses(paths)
        return
    try:
        write_atomically(paths.gateway, json.dumps(addresses))
    except OSError as error:
        log.error("the addresses that the gateway serves cannot be written: %s", error)


def remove_addresses(paths: Paths) -> None:
    """Remove the file, which makes the gateway exit."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.gateway)


def read_addresses(paths: Paths) -> dict[str, str]:
    """Return the published addresses by key of host.conf; empty if there are none, or none can be read."""
    try:
        with open(paths.gateway, encoding="utf-8") as file:
            addresses = json.load(file)
    except (OSError, ValueError):
        return {}
    if not isinstance(addresses, dict):
        return {}
    return {key: str(addresses[key]) for key in KEYS if addresses.get(key)}
