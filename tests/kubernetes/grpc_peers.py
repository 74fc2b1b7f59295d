"""Both sides of gRPC: ours in an event loop of its own, and grpcio's, which stands in for the kubelet's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import grpc
from yunion_mps.kubernetes.kubelet.grpc import Method, RpcServer

T = TypeVar("T")

PATIENCE_S = 60.0
#: The options of grpcio's that the kubelet's Go library has by default.
_OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.enable_http_proxy", 0),
    # Otherwise a channel shares the connection of another one to the same path, and with it a failed attempt
    # to reach the program that listened there before.
    ("grpc.use_local_subchannel_pool", 1),
]


class Loop:
    """An event loop in a thread. A context manager: no task is left at its end."""

    def __enter__(self) -> Loop:  # noqa: PYI034 - typing.Self is not in 3.9
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def call(self, function: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(function)

    def __exit__(self, *_: object) -> None:
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # transports that were closed end in the loop's next turn


@contextlib.contextmanager
def our_server(methods: Sequence[Method], path: Path, **more: float) -> Iterator[Loop]:
    """Our server on this socket."""
    with Loop() as loop:
        server = RpcServer(methods, **more)
        loop.run(server.open(str(path)))
        try:
            yield loop
        finally:
            loop.run(server.close())


@contextlib.contextmanager
def channel(path: Path) -> Iterator[grpc.Channel]:
    """A connection of grpcio's to this socket."""
    with grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as opened:
        yield opened


@contextlib.contextmanager
def their_server(
    service: str, methods: Mapping[str, Callable[[bytes, Any], bytes]], path: Path
) -> Iterator[Any]:
    """grpcio's server on this socket: a function of the request and the context for each method."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=_OPTIONS)
    handlers = {name: grpc.unary_unary_rpc_method_handler(function) for name, function in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield server
    finally:
        server.stop(None).wait(PATIENCE_S)
