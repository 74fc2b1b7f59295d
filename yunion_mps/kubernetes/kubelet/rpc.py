"""Methods of gRPC services whose messages have types: called, or answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from yunion_mps.kubernetes.kubelet.grpc import Method, RpcError, StatusCode, call_unary
from yunion_mps.kubernetes.kubelet.protobuf import DecodeError, Message

RequestT = TypeVar("RequestT", bound="Message")
AnswerT = TypeVar("AnswerT", bound="Message")


@dataclass(frozen=True)
class Rpc(Generic[RequestT, AnswerT]):
    """A method of a service, with the types of its messages; an answer may be one of a stream."""

    path: str
    request: type[RequestT]
    answer: type[AnswerT]


async def call_rpc(
    socket_path: str, rpc: Rpc[RequestT, AnswerT], request: RequestT, timeout_s: float
) -> AnswerT:
    """Call the method of the server on this socket, and return its one answer.

    Raises RpcError if the call fails, and DecodeError if the answer cannot be read.
    """
    return rpc.answer.decode(await call_unary(socket_path, rpc.path, request.encode(), timeout_s))


def answered_by(rpc: Rpc[RequestT, AnswerT], answer: Callable[[RequestT], Awaitable[AnswerT]]) -> Method:
    """Return the method as a server answers it: `answer` gets the request, and returns the one answer."""

    async def answers(data: bytes) -> AsyncIterator[bytes]:
        try:
            request = rpc.request.decode(data)
        except DecodeError as error:
            raise RpcError(StatusCode.INVALID_ARGUMENT, f"the request cannot be decoded: {error}") from None
        yield (await answer(request)).encode()

    return Method(answers)
