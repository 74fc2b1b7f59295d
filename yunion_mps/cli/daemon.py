"""The daemon as commands ask it, and tell it what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunion_mps.paths import Paths

if TYPE_CHECKING:
    from yunion_mps.http.client import Client

#: For what makes the daemon ask the driver: waking many GPUs takes tens of seconds, and a call that hangs
#: is given up after 60.
SLOW_S = 150.0


def daemon() -> Client:
    """The daemon of this host. Its client is imported only to ask: `--help` does not pay for it."""
    from yunion_mps.http.client import Client

    return Client(Paths.from_environment())


def ask(target: str, timeout_s: float | None = None) -> Any:
    """The daemon's JSON answer; raises YunionError of the kind that the failure is."""
    return daemon().get(target, timeout_s)


def tell(target: str, *, until_closed: bool = False) -> Any:
    """The daemon's JSON answer to what it is told to do; raises as `ask` does.

    With `until_closed` it returns once the program that answered has given way to the next.
    """
    return daemon().post(target, SLOW_S, until_closed=until_closed)


def remove(target: str) -> Any:
    """The daemon's JSON answer to a DELETE; raises as `ask` does."""
    return daemon().delete(target)


def quoted(text: str) -> str:
    """`text` as a part of a URL."""
    from urllib.parse import quote

    return quote(text, safe="")


def listed_devices() -> list[dict[str, Any]]:
    """All devices; raises as `ask` does."""
    devices: list[dict[str, Any]] = ask("/v1/devices?limit=0")["isolated_devices"]
    return devices
