"""Asking the daemon."""

from __future__ import annotations

from typing import Any

from yunion_mps.paths import Paths


def ask(target: str) -> Any:
    """The daemon's JSON answer; raises YunionError of the kind that the failure is."""
    from yunion_mps.api.client import Client

    return Client(Paths.from_environment()).get(target)


def quoted(text: str) -> str:
    """`text` as a part of a URL."""
    from urllib.parse import quote

    return quote(text, safe="")
