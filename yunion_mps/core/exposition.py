"""Metrics as text: OpenMetrics, or Prometheus' older text format, made by prometheus_client.

It is imported at the first scrape, because it takes 40 ms and 6 MiB, of which a daemon without metrics needs
nothing. So what is counted before a scrape has a histogram of ours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from yunion_mps.core.enums import OPENMETRICS
from yunion_mps.core.text import printable

GAUGE = "gauge"
COUNTER = "counter"
INFO = "info"
HISTOGRAM = "histogram"

OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
PLAIN_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Suffixes that OpenMetrics does not count as part of a family's name, by kind.
_SUFFIXES = {COUNTER: "_total", INFO: "_info"}

#: The labels' values, then the value; for a histogram, its buckets and then the sum.
Sample = tuple[Any, ...]


class Family(NamedTuple):
    """A metric with its samples."""

    #: GAUGE, COUNTER, INFO or HISTOGRAM.
    kind: str
    #: Includes the suffix of its kind, such as `_total`.
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Iterable[Sample]


class Histogram:
    """Counts observed values by label values, in buckets up to each bound and one for all values above."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def samples(self) -> Iterator[Sample]:
        names = [*map(str, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            yield labels, list(zip(names, accumulate(counts))), self._sums[labels]


def wants_openmetrics(accept: str) -> bool:
    """Return whether an Accept header asks for OpenMetrics, as Prometheus' does and curl's does not."""
    return OPENMETRICS in accept


class _Collector:
    """What prometheus_client collects at a scrape: one family after the other, so that none is kept."""

    def __init__(self, families: Iterable[Family], process: Any) -> None:
        self._families = families
        self._process = process

    def collect(self) -> Iterator[Any]:
        for family in self._families:
            library_family = _library_family(family)
            if library_family.samples:
                yield library_family
        yield from self._process.collect()


def exposition_of(families: Iterable[Family], program: str, *, openmetrics: bool) -> bytes:
    """Format the families that have samples, and the usual metrics of a process, as `PROGRAM_process_...`.

    Raises ImportError without prometheus_client.
    """
    from prometheus_client import ProcessCollector, exposition
    from prometheus_client.openmetrics import exposition as openmetrics_exposition

    collector = _Collector(families, ProcessCollector(namespace=program, registry=None))
    # This escaping checks a name as a whole, the default one checks every letter.
    write = openmetrics_exposition.generate_latest if openmetrics else exposition.generate_latest
    return bytes(write(collector, escaping="allow-utf-8"))


def _library_family(metric: Family) -> Any:
    """Return the metric as prometheus_client knows it."""
    from prometheus_client import core

    classes = {
        GAUGE: core.GaugeMetricFamily,
        COUNTER: core.CounterMetricFamily,
        INFO: core.InfoMetricFamily,
        HISTOGRAM: core.HistogramMetricFamily,
    }
    name = metric.name.removesuffix(_SUFFIXES.get(metric.kind, ""))
    family = classes[metric.kind](name, metric.help, labels=metric.labels)
    labels_written = set()
    for labels, value, *total in metric.samples:
        # Two domains may have the same name for a while, during a replacement.
        if value is None or labels in labels_written:
            continue
        labels_written.add(labels)
        if metric.kind == INFO:  # the only text from elsewhere: driver versions, GPU names
            value = {key: printable(text) for key, text in value.items()}
        if metric.kind == HISTOGRAM:
            family.add_metric(labels, buckets=value, sum_value=total[0])
        else:
            family.add_metric(labels, value)
    return family
