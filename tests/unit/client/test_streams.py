"""A watched answer is requested with its ETag, and yielded only if it has changed."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.core.errors import UnreachableError
from yunion_mps.http.client import Exchange, conditional_result_of
from yunion_mps.http.operation import EncodedRequest, Operation
from yunion_mps.http.operations import GET_DEVICES
from yunion_mps.http.transport import iterate_blocking, watch

UNREACHABLE = UnreachableError("it is away")


class ScriptedTransport:
    """A transport that answers in turn, or fails."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.requests: list[Any] = []

    async def call_if_changed(self, operation: Operation[Any], **arguments: Any) -> Any:
        self.requests.append((arguments.get("if_none_match"), "wait_s" in arguments))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def call(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def sleep(self, delay_s: float) -> None:
        pass


def test_only_changed_answers_are_yielded_also_across_a_restart() -> None:
    transport = ScriptedTransport(("a", "1"), (None, "1"), UNREACHABLE, (None, "1"), ("b", "2"))
    messages: list[str] = []
    watched: Any = iterate_blocking(watch(transport, GET_DEVICES, messages.append, limit=0))
    assert [next(watched), next(watched)] == ["a", "b"]
    assert transport.requests == [(None, False), *[("1", True)] * 4]
    assert messages == ["it is away; retrying for up to 60 s", "the daemon is responding again"]


def test_a_daemon_that_never_answered_is_not_retried() -> None:
    with pytest.raises(UnreachableError, match="it is away"):
        next(iterate_blocking(watch(ScriptedTransport(UNREACHABLE), GET_DEVICES, print)))


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [("200 OK", b'{"total": 4}', ({"total": 4}, '"1"')), ("304 Not Modified", b"", (None, '"1"'))],
)
def test_an_answer_has_its_etag(status: str, body: bytes, found: Any) -> None:
    exchange = Exchange("GET", EncodedRequest("/v1/devices"))
    head = f'HTTP/1.1 {status}\r\nETag: "1"\r\nContent-Length: {len(body)}\r\n\r\n'
    answer = exchange.feed(head.encode() + body)
    assert answer is not None
    assert conditional_result_of(answer) == found
