"""Follow the event log, and watch an answer for changes, across restarts of the daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, TypeVar

from yunion_mps.client.acquire import RECONNECT_TIMEOUT_S, OnMessage, Retrier
from yunion_mps.client.transport import Transport
from yunion_mps.errors import BusyError, UnreachableError
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_EVENTS, MAX_EVENTS
from yunion_mps.http.parameters import Value

if TYPE_CHECKING:
    from yunion_mps import answers

T = TypeVar("T")

WAIT_S = 10
#: How long a request waits for the answer to change, in s.
_CHANGE_WAIT_S = 60


async def follow_events(
    transport: Transport, last: int, kind: str | None, on_message: OnMessage
) -> AsyncGenerator[list[answers.Event], None]:
    """Yield the events with ids above `last` forever; yield an empty list at each timeout.

    An empty list lets the caller check whether its own reader still exists. Raises UnreachableError if the
    daemon stays unreachable.
    """
    retrier = Retrier(transport, RECONNECT_TIMEOUT_S, on_message)
    while True:
        try:
            answer = await transport.call(GET_EVENTS, after=last, limit=MAX_EVENTS, kind=kind, wait_s=WAIT_S)
        except UnreachableError as error:
            await retrier.wait(error)
            yield []
            continue
        retrier.reset()
        if answer["last"] < last:
            on_message("the event log was restarted")
            last = 0
            continue
        last = answer["last"]
        yield answer["events"]


async def watch(
    transport: Transport, operation: Operation[T], on_message: OnMessage, **arguments: Value
) -> AsyncGenerator[T, None]:
    """Yield the answer of a watched operation, and the new answer whenever it changes, without end.

    Raises UnreachableError if the daemon stays unreachable.
    """
    retrier = Retrier(transport, RECONNECT_TIMEOUT_S, on_message)
    condition: dict[str, Value] = {}
    while True:
        try:
            result = await transport.call_if_changed(operation, **arguments, **condition)
        except (UnreachableError, BusyError) as error:
            if not condition:
                raise
            await retrier.wait(error)
            continue
        retrier.reset()
        answer, etag = result
        condition = {"if_none_match": etag, "wait_s": _CHANGE_WAIT_S}
        if answer is not None:
            yield answer
