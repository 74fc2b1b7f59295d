"""Following the event log, and watching an answer, also past a restart of the daemon."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, TypeVar

from yunion_mps.client.taking import MAX_S, Patience, Say
from yunion_mps.client.transport import Transport
from yunion_mps.errors import BusyError, UnreachableError
from yunion_mps.http.operations import GET_EVENTS, MAX_EVENTS, Operation
from yunion_mps.http.parameters import Value

if TYPE_CHECKING:
    from yunion_mps import answers

T = TypeVar("T")

#: How long a question waits for the next event, in s.
WAIT_S = 10
#: How long a question waits for another answer, in s.
_CHANGE_WAIT_S = 60


async def follow(
    transport: Transport, last: int, kind: str | None, say: Say
) -> AsyncGenerator[list[answers.Event], None]:
    """Yield what comes after the event with the id `last`, for good, and now and then an empty list.

    With the empty lists a caller can look whether its own reader is still there. Raises UnreachableError
    if the daemon stays away.
    """
    patience = Patience(transport, MAX_S, say)
    while True:
        try:
            answer = await transport.call(GET_EVENTS, after=last, limit=MAX_EVENTS, kind=kind, wait_s=WAIT_S)
        except UnreachableError as error:
            await patience.lost(error)
            yield []
            continue
        patience.found()
        if answer["last"] < last:
            say("the event log was started again")
            last = 0
            continue
        last = answer["last"]
        yield answer["events"]


async def watch(
    transport: Transport, operation: Operation[T], say: Say, **arguments: Value
) -> AsyncGenerator[T, None]:
    """Yield the answer of a watched operation, and each other answer that comes after it, for good.

    Raises UnreachableError if the daemon stays away.
    """
    patience = Patience(transport, MAX_S, say)
    known: dict[str, Value] = {}
    while True:
        try:
            found = await transport.changed(operation, **arguments, **known)
        except (UnreachableError, BusyError) as error:
            if not known:
                raise
            await patience.lost(error)
            continue
        patience.found()
        answer, etag = found
        known = {"if_none_match": etag, "wait_s": _CHANGE_WAIT_S}
        if answer is not None:
            yield answer
