"""docs/metrics.md: it explains just what is served, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yunion_mps.kubernetes.metrics import PLUGIN_CATALOGUE
from yunion_mps.metrics.catalogue import CATALOGUE
from yunion_mps.metrics.exporter import text_of

from unit.generated import CHECKOUT

from .metric_facts import ALL

PATH = CHECKOUT / "docs/metrics.md"
PAGE = PATH.read_text()


def rows() -> dict[str, list[str]]:
    """The tables' rows of one metric each: kind, labels and meaning, by name."""
    found = re.findall(r"^\| `(yunion_mps_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
    return {name: rest for name, *rest in found}


def test_each_metric_is_explained_with_its_kind_in_its_own_words() -> None:
    assert {name: (row[0], row[2]) for name, row in rows().items()} == {
        metric.name: (metric.kind, metric.help) for metric in (*CATALOGUE, *PLUGIN_CATALOGUE)
    }


def test_each_label_is_named() -> None:
    text = text_of(ALL, openmetrics=False).decode()
    for name, (_, labels, _) in rows().items():
        sample = re.search(rf"^{name}(?:_bucket)?{{(.*)}} ", text, re.MULTILINE)
        served = set(re.findall(r'(\w+)="', sample[1])) - {"le"} if sample else set()
        if sample or f"\n{name} " in text:
            assert set(labels.split(", ")) - {""} == served, name


def test_each_label_of_the_kubelet_plugin_is_named() -> None:
    for metric in PLUGIN_CATALOGUE:
        assert rows()[metric.name][1] == ", ".join(metric.labels)


def test_the_documented_process_metrics_are_those_served() -> None:
    text = text_of(ALL, openmetrics=False).decode()
    served = set(re.findall(r"^# HELP (yunion_mps_process_\w+)", text, re.MULTILINE))
    assert set(re.findall(r"`(yunion_mps_process_\w+)`", PAGE)) == served


def test_each_alert_is_explained_with_its_severity() -> None:
    rules: Any = yaml.safe_load((CHECKOUT / "etc/prometheus/yunion-mps.rules.yml").read_text())
    alerts = {rule["alert"]: rule["labels"]["severity"] for rule in rules["groups"][0]["rules"]}
    assert dict(re.findall(r"^\| (YunionMps\w+) \| (\w+) \|", PAGE, re.MULTILINE)) == alerts


def test_each_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) >= 3
    for link in links:
        assert (PATH.parent / link).resolve().exists(), link
        assert Path(link).suffix in (".md", ".yml", ".json")
