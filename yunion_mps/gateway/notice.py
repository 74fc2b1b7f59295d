"""What is to be served over TCP: written by the daemon, read by the gateway."""

from __future__ import annotations

import contextlib
import json
import logging
import os

from yunion_mps.host.files import write_atomically
from yunion_mps.models import Config
from yunion_mps.paths import Paths

log = logging.getLogger(__name__)

#: The keys of host.conf that open a listener.
KEYS = ("metrics_listen", "web_listen")


def write(paths: Paths, config: Config) -> None:
    """Say what is to be served by this configuration, where anything is; raises OSError."""
    wanted = {key: getattr(config, key) for key in KEYS if getattr(config, key)}
    if not wanted:
        remove(paths)
        return
    write_atomically(paths.gateway, json.dumps(wanted))


def announce(paths: Paths, config: Config) -> None:
    """Say it, or at least log that it cannot be said."""
    try:
        write(paths, config)
    except OSError as error:
        log.error("nothing is served over TCP, for the gateway cannot be told: %s", error)


def remove(paths: Paths) -> None:
    """Say that nothing is to be served."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.gateway)


def read(paths: Paths) -> dict[str, str]:
    """The addresses by key, empty where nothing is to be served."""
    try:
        with open(paths.gateway, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return {key: str(found[key]) for key in KEYS if isinstance(found, dict) and found.get(key)}
