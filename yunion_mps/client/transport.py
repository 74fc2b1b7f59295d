"""Transports: how the clients reach the daemon. Queries are written once, as coroutines over a `Transport`.

An AsyncClient awaits them in asyncio. A Client runs them over a transport that blocks instead of suspending,
so a coroutine finishes in its first step: `run_blocking` takes that step, and needs no event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from yunion_mps.http.operation import Operation
from yunion_mps.http.parameters import Value

if TYPE_CHECKING:
    from yunion_mps.http.client import DaemonClient

T = TypeVar("T")


class Transport(Protocol):
    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        """The answer, as `DaemonClient.call` returns it; raises YunionError."""

    async def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        """The answer and its ETag, as `DaemonClient.call_if_changed` returns them; raises YunionError."""

    async def sleep(self, delay_s: float) -> None: ...


class BlockingTransport:
    """A transport whose coroutines block the thread and never suspend."""

    def __init__(self, daemon: DaemonClient) -> None:
        self._daemon = daemon

    async def call(self, operation: Operation[T], timeout_s: float | None = None, **arguments: Value) -> T:
        return self._daemon.call(operation, timeout_s, until_closed=False, **arguments)

    async def call_if_changed(self, operation: Operation[T], **arguments: Value) -> tuple[T | None, str]:
        return self._daemon.call_if_changed(operation, **arguments)

    async def sleep(self, delay_s: float) -> None:
        time.sleep(delay_s)  # noqa: ASYNC251 - blocking is its purpose


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that uses a BlockingTransport; returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise AssertionError("the transport has suspended instead of blocking")


def iterate_blocking(generator: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over an asynchronous generator that uses a BlockingTransport, and close it at the end."""
    try:
        while True:
            try:
                item = run_blocking(generator.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_blocking(generator.aclose())
