"""The status: its state is the worst of what it lists, and each reason stands with what it is true of."""

from __future__ import annotations

from typing import Any

import pytest
from yunion_mps.mps.states import LEGAL_CHANGES, READY
from yunion_mps.reasons import CONTROL_DAEMON_SILENT, Reason
from yunion_mps.service.queries import Queries

from unit.http.by_hand import status_of
from unit.http.snapshots import H100, P40, snapshot


def warnings(status: Any) -> list[Any]:
    return [one for one in status["problems"] if one["level"] == "warning"]


SILENT = Reason("it does not answer", CONTROL_DAEMON_SILENT)


@pytest.mark.parametrize("state", sorted(LEGAL_CHANGES.keys() - {READY}))
@pytest.mark.parametrize(("broken", "worst"), [(1, "degraded"), (2, "failed")])
def test_a_domain_that_does_not_serve_worsens_the_state(state: str, broken: int, worst: str) -> None:
    sound = snapshot(P40, H100, scope="gpu")
    domains = [one._replace(state=state, reason=SILENT) for one in sound.domains[:broken]]
    now = sound._replace(domains=(*domains, *sound.domains[broken:]))
    good, bad = status_of(Queries(lambda: sound, 0.0, 1)), status_of(Queries(lambda: now, 0.0, 1))
    assert (good["state"], bad["state"]) == ("ready", worst)
    assert [one["reason"] for one in bad["domains"]] == [SILENT] * broken + [""] * (2 - broken)
    assert bad["devices"]["unavailable"] == 4 * broken
    assert warnings(bad) == warnings(good) != [], "they are of what runs"
