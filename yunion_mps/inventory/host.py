"""The host's own identity."""

from __future__ import annotations

from yunion_mps.errors import HostError
from yunion_mps.paths import Paths


def machine_id(paths: Paths) -> str:
    """The host's machine-id(5), 32 hexadecimal digits; raises HostError where there is none."""
    try:
        with open(paths.machine_id, encoding="ascii") as file:
            text = file.read(64).strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if len(text) != 32 or set(text) - set("0123456789abcdef"):
        raise HostError(
            f"{paths.machine_id} holds no machine id, from which the devices' ids are derived",
            "make one with: systemd-machine-id-setup",
        )
    return text
