"""The alert rules: Prometheus takes them, each fires when it is to, and each says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from yunion_mps.metrics.catalogue import CATALOGUE

from monitoring.tools import RULES, promtool

TESTS = Path(__file__).with_name("rules.test.yml")
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
NAMES = [alert["alert"] for alert in ALERTS]


def test_promtool_takes_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", RULES)


def test_each_alert_waits_and_fires_as_its_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS)


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_is_tested(name: str) -> None:
    assert f'alertname="{name}", alertstate="firing"' in TESTS.read_text()


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_each_alert_says_what_is_wrong_and_what_to_do(alert: dict[str, Any]) -> None:
    assert set(alert) == {"alert", "expr", "for", "labels", "annotations"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "action"}
    assert alert["annotations"]["summary"].rstrip().endswith(".")


def test_the_rules_ask_only_for_metrics_that_there_are() -> None:
    asked = {name for alert in ALERTS for name in re.findall(r"yunion_mps_\w+", alert["expr"])}
    assert asked <= {metric.name for metric in CATALOGUE}
    assert len(asked) >= 8
