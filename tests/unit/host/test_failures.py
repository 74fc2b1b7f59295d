"""Failures of work that is retried."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from yunion_mps.host.log import Failures


def test_a_failure_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    errors = Counter[str]()
    failures = Failures(logging.getLogger(__name__), errors)
    for cause in ("refused", "refused", "no answer"):
        failures.report(cause, "kubelet")
    assert caplog.messages == ["refused; trying again", "no answer; trying again"]
    assert (failures.cause, errors) == ("no answer", {"kubelet": 3})
    failures.clear()
    failures.report("no answer")
    assert caplog.messages[2:] == ["no answer; trying again"], "it had succeeded meanwhile"
    assert errors == {"kubelet": 3}, "no program was asked"
