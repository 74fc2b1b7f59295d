"""What the metrics say, and that others can read it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yunion_mps.core.exposition import Histogram
from yunion_mps.core.models import DomainStatus
from yunion_mps.core.text import printable
from yunion_mps.metrics.catalogue import CATALOGUE
from yunion_mps.metrics.exporter import text_of
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.observe.observer import DomainUsage, GpuUsage, HostUsage
from yunion_mps.observe.usage import DeviceUsage, LatestPoll
from yunion_mps.service.facts import Facts, RequestCounts

from unit.http import snapshots
from unit.http.snapshots import H100, IN_MIG_MODE, P40, snapshot

from .metric_facts import ALL, USE, facts, value, values


def test_both_formats_say_the_same() -> None:
    assert values(ALL, openmetrics=True) == values(ALL)


def test_each_metric_of_the_catalogue_can_be_had_and_no_other() -> None:
    in_units: Any = [{**gpu, "memory_free_mib": 4096} for gpu in facts(snapshot(H100)).gpus]
    pending: Any = {**ALL.gpus[0], "state": "pending", "reason_code": "mig_in_use"}
    gpus = [*ALL.gpus, *in_units, pending, *facts(snapshots.troubled()).gpus]
    text = text_of(ALL._replace(gpus=gpus), openmetrics=False).decode()
    helped = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    ours = {name: words for name, words in helped.items() if not name.startswith("yunion_mps_process_")}
    assert ours == {metric.name: metric.help for metric in CATALOGUE}


def test_a_gpu_with_a_pending_change_has_the_reason() -> None:
    gpu: Any = {**ALL.gpus[0], "state": "pending", "reason_code": "mig_in_use"}
    labels = {"gpu": gpu["addr"], "gpu_uuid": gpu["uuid"]}
    given = ALL._replace(gpus=[gpu])
    assert value(given, "yunion_mps_gpu_pending", **labels, reason="mig_in_use") == 1
    assert value(given, "yunion_mps_gpu_unavailable", **labels, reason="mig_in_use") is None


def test_names_and_units_are_as_prometheus_has_them() -> None:
    for metric in CATALOGUE:
        assert metric.name.startswith("yunion_mps_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric
        assert metric.name.endswith("_info") == (metric.kind == "info"), metric
        assert not re.search(r"_(mib|mb|ms|percent|percentage|minutes)(_|$)", metric.name), metric
        assert metric.help.endswith("."), metric
        for word in ("memory", "pool"):
            assert f"_{word}_" not in metric.name or metric.name.endswith("_bytes"), metric
        for word in ("duration", "time", "timestamp", "wait"):
            assert f"_{word}_" not in metric.name or metric.name.endswith("_seconds"), metric


def test_labels_name_no_process_user_or_command() -> None:
    labels = {label for metric in CATALOGUE for label in metric.labels}
    known = {
        "binding",
        "kind",
        "level",
        "severity",
        "route",
        "method",
        "code",
        "gpu",
        "gpu_uuid",
        "device",
        "domain",
        "state",
        "reason",
    }
    assert labels == known


#: The labels of the reference case's GPU.
GPU = {"gpu": "00:06.0", "gpu_uuid": str(P40.uuid)}
FAULTY = {"gpu": "81:00.0", "gpu_uuid": IN_MIG_MODE.uuid or ""}


def test_no_label_value_has_a_space() -> None:
    for found in [ALL, *(facts(each()) for each in snapshots.ALL.values())]:
        for _, labels in values(found):
            assert not [one for one in labels if " " in one[1]]


def test_dcgms_series_can_be_joined_to_gpus_and_devices_by_uuid() -> None:
    of_gpus = [(name, dict(labels)) for name, labels in values(ALL) if "gpu" in dict(labels)]
    assert len(of_gpus) > 20
    for name, labels in of_gpus:
        assert labels.items() >= GPU.items(), name


def test_measurements_of_nvml_are_in_base_units() -> None:
    shown = {name: value(ALL, f"yunion_mps_gpu_{name}", **GPU) for name in (
        "utilization_ratio", "temperature_celsius", "power_watts", "power_limit_watts", "memory_used_bytes",
    )}  # fmt: skip
    assert list(shown.values()) == [0.87, 61, 187.5, 250, 6144 * 1024**2]
    idle = ALL._replace(latest=LatestPoll())
    assert not {name for name, _ in values(idle) if re.search("utilization|celsius|watts", name)}


def test_the_use_of_a_device_is_missing_if_it_is_not_known() -> None:
    first, second, third = ({"device": f"00:06.0-{slot}", **GPU} for slot in (1, 2, 3))
    sm, peak = "yunion_mps_device_sm_utilization_ratio", "yunion_mps_device_memory_peak_bytes"
    assert [value(ALL, sm, **one) for one in (first, second, third)] == [0.42, None, None]
    assert [value(ALL, peak, **one) for one in (first, second)] == [5950 * 1024**2, None]


def test_budgets_are_in_bytes_and_parts_of_one() -> None:
    device = {"device": "00:06.0-1", **GPU}
    assert value(ALL, "yunion_mps_device_memory_limit_bytes", **device) == 5760 * 1024**2
    assert value(ALL, "yunion_mps_device_sm_limit_ratio", **device) == 0.25
    assert value(ALL, "yunion_mps_device_memory_used_bytes", **device) == 5900 * 1024**2
    assert value(ALL, "yunion_mps_device_clients", **device) == 2
    unused = {**device, "device": "00:06.0-0"}
    assert value(ALL, "yunion_mps_device_memory_used_bytes", **unused) == 0
    assert value(ALL, "yunion_mps_device_clients", **unused) == 0
    assert value(ALL, "yunion_mps_gpu_memory_bytes", **GPU) == 23040 * 1024**2
    assert value(ALL, "yunion_mps_gpu_memory_used_bytes", **GPU) == 6144 * 1024**2
    assert value(ALL, "yunion_mps_gpu_processes_outside_mps", **GPU) == 1


def test_a_holder_keeps_the_budget_it_was_granted() -> None:
    """As `who` has it: a reload changes what the next lease gets, and puts no one over budget."""
    given = ALL._replace(leased_budgets={"00:06.0-1": (11520, 50.0)})
    device, other = ({"device": f"00:06.0-{slot}", **GPU} for slot in (1, 2))
    assert value(given, "yunion_mps_device_memory_limit_bytes", **device) == 11520 * 1024**2
    assert value(given, "yunion_mps_device_sm_limit_ratio", **device) == 0.5
    assert value(given, "yunion_mps_device_memory_limit_bytes", **other) == 5760 * 1024**2


def test_terminations_over_budget_are_counted_from_0() -> None:
    name = "yunion_mps_over_budget_terminations_total"
    assert value(ALL, name, **GPU) == 0
    assert value(ALL._replace(over_budget_terminations={GPU["gpu"]: 2}), name, **GPU) == 2


def test_a_gpu_is_usable_by_its_own_health_not_its_control_daemons() -> None:
    down = facts(snapshot(P40, state="backoff"))
    assert value(down, "yunion_mps_gpu_state", **GPU, state="unavailable") == 1
    assert value(down, "yunion_mps_gpu_usable", **GPU) == 1
    faulty = facts(snapshot(P40, IN_MIG_MODE))
    assert value(faulty, "yunion_mps_gpu_usable", **FAULTY) == 0
    assert value(faulty, "yunion_mps_gpu_usable", **GPU) == 1


def test_unknown_values_are_missing_and_not_0() -> None:
    unknown = ALL._replace(use=None, probe_s={})
    shown = {name for name, _ in values(unknown)}
    assert not {name for name in shown if re.search("device_memory_used|clients|probe", name)}
    assert "yunion_mps_use_timestamp_seconds" not in shown
    silent = ALL._replace(use=USE._replace(gpus={str(P40.uuid): GpuUsage(0, None)}))
    assert value(silent, "yunion_mps_gpu_processes_outside_mps", **GPU) is None
    assert value(silent, "yunion_mps_gpu_clients", **GPU) == 0


@pytest.mark.parametrize("state", LEGAL_CHANGES)
def test_just_one_state_of_a_domain_is_1(state: str) -> None:
    found = values(facts(snapshot(P40, state=state)))
    shown = {
        dict(labels)["state"]: one
        for (name, labels), one in found.items()
        if name == "yunion_mps_domain_state"
    }
    assert shown == {each: float(each == state) for each in LEGAL_CHANGES}


def test_a_domain_tells_since_when_it_is_in_its_state_by_the_wall_clock() -> None:
    status = ALL.domains[0]._replace(restarts=3, pending="it waits")
    given = ALL._replace(domains=(status,))
    assert value(given, "yunion_mps_domain_state_timestamp_seconds", domain="host") == 1_788_000_000 - 600
    assert value(given, "yunion_mps_domain_start_time_seconds", domain="host") == 1_787_999_500
    assert value(given, "yunion_mps_domain_restarts_total", domain="host") == 3
    assert value(given, "yunion_mps_domain_pending", domain="host") == 1
    assert value(given, "yunion_mps_domain_probe_duration_seconds", domain="host") == 0.0004


def test_a_series_is_never_repeated_for_two_domains_of_one_name() -> None:
    second: DomainStatus = ALL.domains[0]._replace(restarts=7)
    given = ALL._replace(domains=(*ALL.domains, second))
    lines = text_of(given, openmetrics=False).decode().splitlines()
    assert [line for line in lines if line.startswith("yunion_mps_domain_restarts_total")] == [
        'yunion_mps_domain_restarts_total{domain="host"} 0.0'
    ]


def test_budget_metrics_exist_only_for_gpus_with_devices() -> None:
    given = facts(snapshot(P40, IN_MIG_MODE))
    assert value(given, "yunion_mps_gpu_budget_enforced", **GPU) == 0
    other = {"gpu": "0001:e1:00.0", "gpu_uuid": str(H100.uuid)}
    assert value(facts(snapshot(H100)), "yunion_mps_gpu_budget_enforced", **other) == 1
    unavailable = {**FAULTY, "state": "unavailable"}
    assert value(given, "yunion_mps_gpu_state", **unavailable) == 1


def test_memory_of_mig_instances_can_be_left_out_of_sums() -> None:
    given = facts(snapshots.mig())
    read = values(given)
    infos = [dict(labels) for name, labels in read if name == "yunion_mps_gpu_info"]
    assert [(one["gpu"], one["parent"], one["mig_profile"], one["sharing"]) for one in infos] == [
        ("00:06.0", "", "", "mps"),
        ("81:00.0", "", "", "mig"),
        ("81:00.0-g1", IN_MIG_MODE.uuid, "3g.40gb", "none"),
        ("81:00.0-g2", IN_MIG_MODE.uuid, "3g.40gb", "none"),
    ]
    memory = {
        dict(labels)["gpu"]: number
        for (name, labels), number in read.items()
        if name == "yunion_mps_gpu_memory_bytes" and dict(labels)["gpu_uuid"].startswith("GPU-")
    }
    assert memory == {"00:06.0": 23040 * 2**20, "81:00.0": 81559 * 2**20}
    devices = [number for (name, _), number in read.items() if name == "yunion_mps_gpu_devices"]
    assert sorted(devices) == [0, 1, 1, 4]


def test_sums_over_a_host_with_every_way_of_sharing_count_nothing_twice() -> None:
    read = values(facts(snapshots.every_way()))

    def of(name: str, *labels: str) -> dict[str, list[str]]:
        found = [dict(pairs) for metric, pairs in read if metric == f"yunion_mps_{name}"]
        return {one.get("device", one["gpu"]): [one[label] for label in labels] for one in found}

    def numbers(name: str) -> dict[str, float]:
        found = {
            dict(pairs)["gpu"]: n for (metric, pairs), n in read.items() if metric == f"yunion_mps_{name}"
        }
        return {gpu: number for gpu, number in found.items() if number}

    ways = of("gpu_info", "sharing", "time_slice")
    assert (ways["01:00.0"], ways["02:00.0"]) == (["mps", ""], ["time-slicing", "short"])
    assert (ways["05:00.0"], ways["05:00.0-g1"]) == (["mig", ""], ["time-slicing", ""])
    assert sum(numbers("gpu_devices").values()) == len(of("device_info")) == 19
    assert Counter(way for (way,) in of("device_info", "sharing").values()) == {
        "mps": 8, "time-slicing": 7, "none": 4,
    }  # fmt: skip
    enforced = of("gpu_budget_enforced")
    assert not {"03:00.0", "04:00.0", "05:00.0"} & enforced.keys(), "of a GPU in MIG mode, only instances"
    assert enforced.keys() - numbers("gpu_budget_enforced").keys() == {"02:00.0", "05:00.0-g1", "05:00.0-g2"}


def test_leases_and_those_who_wait_are_counted() -> None:
    assert value(ALL, "yunion_mps_leases", binding="process") == 2
    assert value(ALL, "yunion_mps_queued_requests") == 3
    assert value(ALL, "yunion_mps_queue_longest_wait_seconds") == 12.5
    assert value(ALL, "yunion_mps_events_total", kind="domain", severity="warning") == 4
    nothing = facts()
    assert value(nothing, "yunion_mps_leases", binding="process") == 0
    assert value(nothing, "yunion_mps_events_total", kind="domain", severity="warning") == 0
    held: Any = [{**device, "lease": "7c1f"} for device in ALL.devices[:1]]
    given = ALL._replace(devices=[*held, *ALL.devices[1:]])
    assert value(given, "yunion_mps_gpu_devices_leased", **GPU) == 1
    assert value(given, "yunion_mps_device_leased", device="00:06.0-0", **GPU) == 1
    assert value(given, "yunion_mps_device_leased", device="00:06.0-1", **GPU) == 0


def test_devices_of_a_former_division_are_counted_with_the_new_ones() -> None:
    devices: Any = [
        {**one, "state": "pending", "lease": f"lease-{place}"} for place, one in enumerate(ALL.devices)
    ]
    former: Any = {**devices[0], "addr": "00:06.0-9", "id": "former"}
    given = ALL._replace(devices=[*devices, former])
    counts = [value(given, f"yunion_mps_gpu_devices{what}", **GPU) for what in ("", "_leased", "_pending")]
    assert counts == [len(devices) + 1] * 3


def test_latencies_are_a_histogram() -> None:
    name = "yunion_mps_http_request_duration_seconds"
    assert value(ALL, f"{name}_bucket", route="/v1/status", le="0.0005") == 1
    assert value(ALL, f"{name}_bucket", route="/v1/status", le="0.001") == 3
    assert value(ALL, f"{name}_bucket", route="/v1/status", le="+Inf") == 3
    assert value(ALL, f"{name}_count", route="/v1/status") == 3
    assert value(ALL, f"{name}_sum", route="/v1/status") == pytest.approx(0.0013)


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBER = st.integers(0, 1 << 50)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    """What a host may be like, with unlikely names."""
    found = facts(draw(st.sampled_from([each() for each in snapshots.ALL.values()])))
    gpus: list[Any] = [
        {**gpu, "name": draw(TEXT), "addr": draw(TEXT), "compute_mode": draw(st.none() | TEXT)}
        for gpu in found.gpus
    ]
    devices: Any = [{**device, "lease": draw(st.none() | TEXT)} for device in found.devices]
    use = HostUsage(
        draw(st.floats(0, 1e10)),
        {str(gpu["uuid"]): GpuUsage(draw(NUMBER), draw(st.none() | NUMBER)) for gpu in gpus},
        {device["addr"]: DeviceUsage(draw(NUMBER), draw(NUMBER)) for device in devices},
        {domain.plan.name: DomainUsage(draw(NUMBER), draw(NUMBER), None) for domain in found.domains},
    )
    latencies, route = Histogram((0.5, 1.0)), draw(TEXT)
    for took_s in draw(st.lists(st.floats(0, 2), min_size=1)):
        latencies.observe((route,), took_s)
    return found._replace(
        gpus=gpus,
        devices=devices,
        use=draw(st.none() | st.just(use)),
        revision=draw(TEXT),
        events=draw(st.dictionaries(st.tuples(TEXT, TEXT), NUMBER, max_size=3)),
        requests=RequestCounts({(draw(TEXT), "GET", 200): draw(NUMBER)}, list(latencies.samples())),
    )


@given(any_facts())
@settings(deadline=None, max_examples=60)
def test_both_parsers_read_the_same_metrics_of_any_host(given: Facts) -> None:
    read = values(given, openmetrics=True)
    assert read == values(given)
    assert read["yunion_mps_up", ()] == 1
    for gpu in given.gpus:
        about = {
            "gpu_uuid": gpu["uuid"] or "",
            "name": (gpu["name"] or "").replace(" ", "-"),
            "compute_mode": gpu["compute_mode"] or "",
            "sharing": gpu["sharing"] or "",
            "time_slice": gpu["time_slice"] or "",
            "parent": gpu["parent"] or "",
            "mig_profile": gpu["mig_profile"] or "",
        }
        about = {key: printable(text) for key, text in about.items()}
        shown = [dict(labels) for name, labels in read if name == "yunion_mps_gpu_info"]
        assert any(one == {**about, "gpu": gpu["addr"]} for one in shown) or len(
            {each["addr"] for each in given.gpus}
        ) < len(given.gpus)


@pytest.mark.processes
def test_prometheus_client_is_loaded_only_when_it_is_needed() -> None:
    """A daemon without metrics does not pay for its HTTP servers and OpenSSL."""
    code = """
import sys
from yunion_mps.metrics import exporter
print("prometheus_client" in sys.modules)
exporter.exposition_of([], "a", openmetrics=True)
print("prometheus_client" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "True"]


def test_an_unknown_amount_of_memory_has_no_sample() -> None:
    devices: Any = [{**ALL.devices[0], "memory_mib": None, "addr": "00:06.0-9"}]
    gpus: Any = [{**ALL.gpus[0], "memory_mib": None}]
    given = ALL._replace(devices=devices, gpus=gpus)
    names = {name for name, _ in values(given)}
    assert "yunion_mps_device_available" in names
    assert not {"yunion_mps_device_memory_limit_bytes", "yunion_mps_gpu_memory_bytes"} & names
