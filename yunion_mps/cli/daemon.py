"""The daemon as commands ask it, and tell it what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from yunion_mps.http.operations import GET_DEVICES, Operation, Value
from yunion_mps.paths import Paths

if TYPE_CHECKING:
    from yunion_mps.answers import Device
    from yunion_mps.http.client import DaemonClient

T = TypeVar("T")


def daemon() -> DaemonClient:
    """The daemon of this host. Its client is imported only to ask: `--help` does not pay for it."""
    from yunion_mps.http.client import DaemonClient

    return DaemonClient(Paths.from_environment())


def call(
    operation: Operation[T],
    timeout_s: float | None = None,
    *,
    until_closed: bool = False,
    **arguments: Value,
) -> T:
    """The daemon's answer; raises YunionError of the kind that the failure is.

    With `until_closed` it returns once the program that answered has given way to the next.
    """
    return daemon().call(operation, timeout_s, until_closed=until_closed, **arguments)


def listed_devices() -> list[Device]:
    """All devices; raises as `call` does."""
    return call(GET_DEVICES, limit=0)["isolated_devices"]
