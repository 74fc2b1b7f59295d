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


def test_promtool_accepts_the_rules() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in promtool("check", "rules", RULES)


def test_the_alerts_pass_their_rule_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS)


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_is_tested(name: str) -> None:
    assert f'alertname="{name}", alertstate="firing"' in TESTS.read_text()


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES)
def test_every_alert_has_a_summary_and_an_action(alert: dict[str, Any]) -> None:
    assert set(alert) == {"alert", "expr", "for", "labels", "annotations"}
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "action"}
    assert alert["annotations"]["summary"].rstrip().endswith(".")


def test_the_rules_use_only_metrics_that_are_served() -> None:
    asked = {name for alert in ALERTS for name in re.findall(r"yunion_mps_\w+", alert["expr"])}
    assert asked <= {metric.name for metric in CATALOGUE}
    assert len(asked) >= 8
