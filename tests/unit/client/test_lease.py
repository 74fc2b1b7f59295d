"""A daemon that is away for a moment is waited for, and one that stays away is not."""

from __future__ import annotations

import pytest
from yunion_mps.cli.output import say
from yunion_mps.client.lease import Patience
from yunion_mps.errors import UnreachableError

AWAY = UnreachableError("it is away", "start it")


def test_it_is_said_once_that_the_daemon_is_away_and_once_that_it_is_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    patience = Patience(60.0, say)
    patience.found()
    patience.lost(AWAY)
    patience.lost(AWAY)
    patience.found()
    patience.found()
    said = "yunion-mps: it is away; waiting up to 60 s for it\nyunion-mps: the daemon answers again\n"
    assert capsys.readouterr() == ("", said)


def test_it_ends_after_its_time_and_starts_again_after_an_answer() -> None:
    patience = Patience(0.0, say)
    patience.lost(AWAY)
    with pytest.raises(UnreachableError, match="it is away"):
        patience.lost(AWAY)
    patience.found()
    patience.lost(AWAY)
