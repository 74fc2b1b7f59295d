"""Methods of gRPC services whose messages have types."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from yunion_mps.kubernetes.kubelet.grpc import Method, RpcError, StatusCode
from yunion_mps.kubernetes.kubelet.protobuf import DecodeError, Message

RequestT = TypeVar("RequestT", bound="Message")

AnswerT = TypeVar("AnswerT", bound="Message")


@dataclass(frozen=True)
class Rpc(Generic[RequestT, AnswerT]):
    """A method of a service, with the types of its messages; an answer may be one of a stream."""

    path: str
    request: type[RequestT]
    answer: type[AnswerT]


def rpc_method(
    rpc: Rpc[RequestT, AnswerT], answer: Callable[[RequestT], Awaitable[AnswerT]]
) -> tuple[str, Method]:
    async def answers(data: bytes) -> AsyncIterator[bytes]:
        try:
            request = rpc.request.decode(data)
        except DecodeError as error:
            raise RpcError(StatusCode.INVALID_ARGUMENT, f"the request cannot be decoded: {error}") from None
        yield (await answer(request)).encode()

    return rpc.path, Method(answers)
