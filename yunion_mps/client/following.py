"""Events as they come, also past a restart of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from yunion_mps.client.patience import MOST_S, Patience, Say
from yunion_mps.errors import UnreachableError

if TYPE_CHECKING:
    from yunion_mps.answers import Event

#: The most events that the daemon gives at once.
MOST = 1000
#: How long a question waits for the next event.
WAIT_S = 10
_ANSWER_S = 30.0
#: The last moment that can be asked for, in s since 1970.
LATEST_S = 99_999_999_999

#: Asks the daemon for a target, and gives it so many seconds.
Ask = Callable[[str, float], Any]


def target(kind: str | None, **words: int) -> str:
    """The question for events, of one kind or of all."""
    query = "&".join(f"{name}={value}" for name, value in words.items())
    if not kind:
        return f"/v1/events?{query}"
    from urllib.parse import quote  # 2 ms, which a plain `run` need not pay

    return f"/v1/events?{query}&kind={quote(kind)}"


def follow(ask: Ask, last: int, kind: str | None, say: Say) -> Iterator[list[Event]]:
    """Yield what comes after the event with the id `last`, for good.

    Where nothing comes it yields an empty list now and then, so that one can look whether anybody cares.
    Raises UnreachableError where the daemon stays away.
    """
    patience = Patience(MOST_S, say)
    while True:
        try:
            answer = ask(target(kind, after=last, limit=MOST, wait=WAIT_S), WAIT_S + _ANSWER_S)
        except UnreachableError as error:
            patience.lost(error)
            yield []
            continue
        patience.found()
        if answer["last"] < last:
            say("the record of events was begun anew")
            last = 0
            continue
        last = answer["last"]
        yield answer["events"]
