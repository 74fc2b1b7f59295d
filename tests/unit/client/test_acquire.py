"""A caller that is interrupted while it takes a lease has none, even if its answer was on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from yunion_mps.errors import NothingFreeError, YunionError
from yunion_mps.http.operations import Operation
from yunion_mps.http.transport import run_blocking, take

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
        run_blocking(take(transport, {"gpu": "00:06.0"}, 0, lambda _: None))
    (first, arguments), (again, repeated), (last, ended) = transport.calls
    assert (first, again, last) == ("take_lease", "take_lease", "end_lease")
    assert repeated == {name: value for name, value in arguments.items() if name != "wait_s"}
    assert ended == {"lease": "a lease"}


def test_an_interrupted_caller_that_got_nothing_has_nothing_to_release() -> None:
    transport = InterruptedTransport(KeyboardInterrupt(), NothingFreeError("nothing"))
    with pytest.raises(KeyboardInterrupt):
        run_blocking(take(transport, {}, 0, lambda _: None))
    assert len(transport.calls) == 2


def test_a_lease_with_a_name_is_left_to_its_time_to_live() -> None:
    transport = InterruptedTransport(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_blocking(take(transport, {"holder": {"name": "job-17", "ttl_s": 60}}, 0, lambda _: None))
    assert len(transport.calls) == 1


def test_a_failed_request_is_not_followed_by_a_release() -> None:
    transport = InterruptedTransport(YunionError("it is wrong"))
    with pytest.raises(YunionError, match="it is wrong"):
        run_blocking(take(transport, {}, 0, lambda _: None))
    assert len(transport.calls) == 1
