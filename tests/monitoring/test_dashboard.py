"""The Grafana dashboard: its shape, expressions that Prometheus takes, and metrics that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yunion_mps.metrics.exporter import text_of
from yunion_mps.mps.states import LEGAL_CHANGES

from monitoring.tools import CHECKOUT, promtool
from unit.metrics.metric_facts import ALL

DASHBOARD: dict[str, Any] = json.loads((CHECKOUT / "etc/grafana/yunion-mps.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Each expression, with what Grafana puts in for its variables."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")


def test_prometheus_accepts_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(expressions())]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # which is YAML as well
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", file)
    assert len(rules) > 20


def test_the_dashboard_uses_only_metrics_that_are_served() -> None:
    served = set(
        re.findall(r"^(yunion_mps_\w+?)[ {]", text_of(ALL, openmetrics=False).decode(), re.MULTILINE)
    )
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    asked = {name for one in [*expressions(), *variables] for name in re.findall(r"yunion_mps_\w+", one)}
    assert asked - served == set()
    assert len(asked) > 20


def test_every_expression_is_limited_to_the_selected_hosts() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            selectors = re.findall(r"(?:yunion_mps_\w+|ALERTS){(.*?)}", target["expr"])
            names = re.findall(r"yunion_mps_\w+|ALERTS", target["expr"])
            assert len(selectors) == len(names), panel["title"]
            assert all('instance=~"$instance"' in selector for selector in selectors), panel["title"]


def test_the_dashboard_uses_only_labels_of_its_metrics() -> None:
    text = text_of(ALL, openmetrics=False).decode()
    labels = set(re.findall(r'[{,](\w+)="', text)) | {"instance"}
    shown = {
        name
        for panel in PANELS
        for target in panel["targets"]
        for name in re.findall(r"{{(\w+)}}", target["legendFormat"])
    }
    assert shown - labels == set()
    assert shown >= {"gpu", "device", "domain", "instance"}


def test_every_panel_has_a_description_and_none_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["title"] and panel["description"].endswith(".") for panel in PANELS)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboard_names_no_data_source() -> None:
    sources = {
        json.dumps(found["datasource"], sort_keys=True)
        for panel in PANELS
        for found in [panel, *panel["targets"]]
    }
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}
    assert DASHBOARD["templating"]["list"][0]["name"] == "datasource"


def test_the_dashboard_can_be_imported_and_provisioned() -> None:
    """What grafana.com/docs has of the JSON model; `__inputs` would be asked for at an import alone."""
    assert not {"__inputs", "__requires", "id"} & set(DASHBOARD)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", DASHBOARD["uid"])
    core = {"row", "stat", "timeseries", "table", "bargauge", "state-timeline"}
    assert {panel["type"] for panel in DASHBOARD["panels"]} <= core
    known = {each["name"] for each in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all"} == known
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        assert all(target.get("instant", False) != target.get("range", False) for target in panel["targets"])


def test_every_domain_state_has_a_name_and_only_ready_is_green() -> None:
    """Numbers that are mapped to words are how Grafana's documentation has a state timeline of series."""
    (panel,) = (one for one in PANELS if one["title"] == "States")
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    words = {number: shown["text"] for number, shown in mapping["options"].items()}
    (target,) = panel["targets"]
    numbers = re.findall(r'state="(\w+)"} \* (\d+)', target["expr"])
    assert {number: state for state, number in numbers} == words
    assert sorted(words.values()) == sorted(LEGAL_CHANGES)
    green = [shown["text"] for shown in mapping["options"].values() if shown["color"] == "green"]
    assert green == ["ready"]


def test_the_state_panel_has_the_number_of_the_domains_state(tmp_path: Path) -> None:
    (expression,) = (one for one in expressions() if one.startswith("sum by (instance, domain)"))
    states = list(LEGAL_CHANGES)
    number = int(re.findall(r'state="backoff"} \* (\d+)', expression)[0])
    series = [
        {"series": f'yunion_mps_domain_state{{instance="a", domain="host", state="{state}"}}',
         "values": str(int(state == "backoff"))}
        for state in states
    ]  # fmt: skip
    samples = [{"labels": '{instance="a", domain="host"}', "value": number}]
    asked = {"expr": expression, "eval_time": "0s", "exp_samples": samples}
    file = tmp_path / "states.yml"
    file.write_text(json.dumps({"tests": [{"input_series": series, "promql_expr_test": [asked]}]}))
    assert "SUCCESS" in promtool("test", "rules", file)
