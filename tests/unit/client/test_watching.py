"""A watched answer is asked for with its ETag, and given on only if it has changed."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.client.following import watch
from yunion_mps.client.transport import iterate
from yunion_mps.errors import UnreachableError
from yunion_mps.http.client import Exchange, changed_of
from yunion_mps.http.operations import GET_DEVICES, Message, Operation

AWAY = UnreachableError("it is away")


class Answering:
    """A transport that answers in turn, or fails."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[Any] = []

    async def changed(self, operation: Operation[Any], **arguments: Any) -> Any:
        self.asked.append((arguments.get("if_none_match"), "wait_s" in arguments))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def call(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def sleep(self, delay_s: float) -> None:
        pass


def test_only_another_answer_is_yielded_also_past_a_restart() -> None:
    transport = Answering(("a", "1"), (None, "1"), AWAY, (None, "1"), ("b", "2"))
    said: list[str] = []
    watched: Any = iterate(watch(transport, GET_DEVICES, said.append, limit=0))
    assert [next(watched), next(watched)] == ["a", "b"]
    assert transport.asked == [(None, False), *[("1", True)] * 4]
    assert said == ["it is away; waiting up to 60 s for it", "the daemon answers again"]


def test_a_daemon_that_was_never_there_is_not_waited_for() -> None:
    with pytest.raises(UnreachableError, match="it is away"):
        next(iterate(watch(Answering(AWAY), GET_DEVICES, print)))


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [("200 OK", b'{"total": 4}', ({"total": 4}, '"1"')), ("304 Not Modified", b"", (None, '"1"'))],
)
def test_an_answer_has_its_etag(status: str, body: bytes, found: Any) -> None:
    exchange = Exchange("GET", Message("/v1/devices"))
    head = f'HTTP/1.1 {status}\r\nETag: "1"\r\nContent-Length: {len(body)}\r\n\r\n'
    answer = exchange.feed(head.encode() + body)
    assert answer is not None
    assert changed_of(answer) == found
