"""A caller that is interrupted while it takes a lease has none, even if its answer was on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from yunion_mps.core.errors import NothingFreeError, YunionError
from yunion_mps.http.operation import Operation
from yunion_mps.http.transport import request_lease, run_blocking

LEASE = {"id": "a lease"}


class InterruptedTransport:
    """A transport whose first call is interrupted, and whose later calls return the outcomes in turn."""

    def __init__(self, by: BaseException, *outcomes: Any) -> None:
        self.outcomes = [by, *outcomes]
        self.calls: list[tuple[str, Any]] = []

    async def call(self, operation: Operation[Any], timeout_s: float | None = None, **arguments: Any) -> Any:
        self.calls.append((operation.name, arguments))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def call_if_changed(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError


@pytest.mark.parametrize("by", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()], ids=repr)
def test_the_lease_of_an_interrupted_caller_is_released(by: BaseException) -> None:
    transport = InterruptedTransport(by, LEASE, LEASE)
    with pytest.raises(type(by)):
        run_blocking(request_lease(transport, {"gpu": "00:06.0"}, 0, lambda _: None))
    (first, arguments), (again, repeated), (last, ended) = transport.calls
    assert (first, again, last) == ("take_lease", "take_lease", "end_lease")
    assert repeated == {name: value for name, value in arguments.items() if name != "wait_s"}
    assert ended == {"lease": "a lease"}


@pytest.mark.parametrize(
    ("outcomes", "asked", "calls"),
    [
        ([KeyboardInterrupt(), NothingFreeError("nothing")], {}, 2),
        ([KeyboardInterrupt()], {"holder": {"name": "job-17", "ttl_s": 60}}, 1),
        ([YunionError("it is wrong")], {}, 1),
    ],
    ids=["it got nothing", "its time to live ends it", "it was refused"],
)
def test_nothing_is_released_if_no_lease_was_taken(
    outcomes: list[BaseException], asked: Any, calls: int
) -> None:
    transport = InterruptedTransport(*outcomes)
    with pytest.raises(type(outcomes[0])):
        run_blocking(request_lease(transport, asked, 0, lambda _: None))
    assert len(transport.calls) == calls
