"""How the client reaches the daemon. What it asks is written once, as coroutines over a `Transport`.

An AsyncClient awaits them in asyncio. A Client runs them over a transport that blocks instead of suspending,
so that a coroutine is through after its first step: `finish` takes that step, and needs no event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from yunion_mps.http.operations import Operation
from yunion_mps.http.parameters import Value

if TYPE_CHECKING:
    from yunion_mps.http.client import DaemonClient

T = TypeVar("T")


class Transport(Protocol):
    """Calls operations of the daemon, and waits."""

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """The answer, as `DaemonClient.call` returns it; raises YunionError."""

    async def changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        """The answer and its ETag, as `DaemonClient.changed` returns them; raises YunionError."""

    async def sleep(self, delay_s: float) -> None: ...


class Blocking:
    """Blocks the thread."""

    def __init__(self, daemon: DaemonClient) -> None:
        self._daemon = daemon

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        return self._daemon.call(operation, timeout_s, until_closed=False, **arguments)

    async def changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        return self._daemon.changed(operation, **arguments)

    async def sleep(self, delay_s: float) -> None:
        time.sleep(delay_s)  # noqa: ASYNC251 - blocking is its purpose


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over a transport that blocks."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the transport has suspended instead of blocking")


def iterate(generator: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield what a generator over a transport that blocks does, and close it at the end."""
    try:
        while True:
            try:
                item = finish(generator.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        finish(generator.aclose())
