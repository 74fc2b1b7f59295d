"""A daemon that is away for a moment is waited for, and one that stays away is not."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.cli.output import say
from yunion_mps.client.taking import Patience
from yunion_mps.client.transport import finish
from yunion_mps.errors import UnreachableError
from yunion_mps.http.operations import GET_STATUS

AWAY = UnreachableError("it is away", "start it")


class Away:
    """A transport whose daemon is away for some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    async def call(self, *_: Any, **__: Any) -> Any:
        self.calls -= 1
        if self.calls >= 0:
            raise AWAY
        return {"an": "answer"}

    async def changed(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def sleep(self, delay_s: float) -> None:
        pass


def test_it_is_said_once_that_the_daemon_is_away_and_once_that_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    patience = Patience(Away(2), 60.0, say)
    for _ in range(2):
        finish(patience.call(GET_STATUS))
    said = "yunion-mps: it is away; waiting up to 60 s for it\nyunion-mps: the daemon answers again\n"
    assert capsys.readouterr() == ("", said)


def test_it_ends_after_its_time_and_starts_again_after_an_answer() -> None:
    patience = Patience(Away(0), 1e-9, say)
    finish(patience.lost(AWAY))
    with pytest.raises(UnreachableError, match="it is away"):
        finish(patience.lost(AWAY))
    patience.found()
    finish(patience.lost(AWAY))


def test_without_patience_the_first_failure_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnreachableError, match="it is away"):
        finish(Patience(Away(1), 0, say).call(GET_STATUS))
    assert capsys.readouterr() == ("", "")
