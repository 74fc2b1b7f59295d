"""Facts for the metrics: the reference case, with what a test does not name left out."""

from __future__ import annotations

from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from yunion_mps.core.exposition import Histogram
from yunion_mps.core.models import Snapshot
from yunion_mps.inventory.nvml import GpuLoad, Load
from yunion_mps.metrics.exporter import text_of
from yunion_mps.observe.observer import DomainUsage, GpuUsage, HostUsage
from yunion_mps.observe.usage import DeviceUsage, LatestPoll
from yunion_mps.service.facts import ClockReadings, Facts, LeaseFacts, RequestCounts
from yunion_mps.service.queries import Queries

from unit.http import fake_services
from unit.http.snapshots import P40, reference

#: Now: the daemon's clock began 1,000 s before.
NOW = ClockReadings(1_788_000_000.0, 1000.0)

#: A value by the metric's name and its labels, sorted.
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def facts(snapshot: Snapshot | None = None, **given: Any) -> Facts:
    """What is known of a host at that snapshot."""
    taken = snapshot or reference()
    service = Queries(lambda: taken, 1_787_999_000.25, 4200)
    found = Facts(
        NOW,
        "6c4fb29c1d2e",
        fake_services.status_of(service),
        service.gpus()["gpus"],
        service.all_devices(),
        taken.domains,
        {},
        LeaseFacts(),
        {},
        RequestCounts(),
        unusable=service.unusable_gpus(),
    )
    return found._replace(**given)


def values(given: Facts, *, openmetrics: bool = False) -> Values:
    """What a monitoring system reads of it."""
    text = text_of(given, openmetrics=openmetrics).decode()
    families = (parse_openmetrics if openmetrics else parse_plain)(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.startswith("yunion_mps_process_")
    }


def value(given: Facts, name: str, **labels: str) -> float | None:
    """One of them, None if it is missing."""
    return values(given).get((name, tuple(sorted(labels.items()))))


USE = HostUsage(
    1_788_000_000.5,
    {str(P40.uuid): GpuUsage(2, 1)},
    {"00:06.0-1": DeviceUsage(5900, 2)},
    {"host": DomainUsage(1, 2, 1_787_999_500.0)},
)
LATENCIES = Histogram((0.0005, 0.001, 5.0))
for took_s in (0.0001, 0.0006, 0.0006):
    LATENCIES.observe(("/v1/status",), took_s)
#: A host on which every metric has a value that any host can have.
ALL = Facts(
    *facts(
        domains=(facts().domains[0]._replace(since_s=400.0),),
        use=USE,
        latest=LatestPoll(
            Load({str(P40.uuid): GpuLoad(87, 6144, 61, 187.5, 250.0)}),
            {"00:06.0-1": DeviceUsage(5900, 2, 42), "00:06.0-2": DeviceUsage(0, 1)},
        ),
        peaks_mib={"00:06.0-1": 5950},
        pods={
            "00:06.0-1": {"namespace": "ml", "pod": "trainer-0", "container": "main", "claim": ""},
            "00:06.0-2": {"namespace": "ml", "pod": "", "container": "", "claim": "shared"},
        },
        probe_s={"host": 0.0004},
        queue=LeaseFacts({"process": 2, "name": 1}, 3, 12.5),
        events={("domain", "warning"): 4},
        requests=RequestCounts({("/v1/status", "GET", 200): 3}, list(LATENCIES.samples())),
    )
)
