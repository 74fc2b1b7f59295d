"""The plugin's metrics: each is declared once, and served at an address of this host or pod."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from yunion_mps.core.exposition import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    OPENMETRICS_TYPE,
    PLAIN_TYPE,
    Family,
    Histogram,
    Sample,
    exposition_of,
    wants_openmetrics,
)
from yunion_mps.host.log import Failures
from yunion_mps.http.listener import listen_on
from yunion_mps.http.messages import EventualResponse, Request, Response, problem_response
from yunion_mps.http.operations import GET_METRICS
from yunion_mps.http.pool import Limits
from yunion_mps.http.server import Server
from yunion_mps.kubernetes.kubelet.device_plugin_api import HEALTHY, UNHEALTHY

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_PROGRAM = "yunion_mps_kubelet_plugin"
#: The results of what the kubelet asks for.
DONE = "done"
REFUSED = "refused"
#: The programs whose failures are counted.
DAEMON = "daemon"
KUBELET = "kubelet"
API_SERVER = "api_server"
#: The buckets of the time that a container's start waits, in s: up to that for a daemon that restarts.
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: Few clients are expected: programs on this host or, in a cluster, the monitoring system.
LIMITS = Limits(first_request_timeout_s=2.0, connections=16, reserved_for_root=0, reserved_for_new_clients=4)
_ADDRESS = re.compile(r"(localhost|[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class Counts:
    """What has happened since the start of the program, by resource and result."""

    def __init__(self) -> None:
        self.registrations = Counter[tuple[str, str]]()
        self.allocations = Counter[tuple[str, str]]()
        self.starts = Counter[tuple[str, str]]()
        #: Failed requests, by the program that was asked.
        self.errors = Counter[str]({DAEMON: 0, KUBELET: 0, API_SERVER: 0})
        self.start_times = Histogram(_BOUNDS_S)

    def note_start(self, resource: str, result: str, took_s: float) -> None:
        """Count a container's start that was permitted or refused."""
        self.starts[resource, result] += 1
        self.start_times.observe((resource,), took_s)


class ResourceHealth:
    """How many of a resource's devices are healthy, and how many have become healthy or unhealthy."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.devices = Counter[str]()
        self.changes = Counter[str]()

    def update(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Count the devices, whose health is given by name: HEALTHY or UNHEALTHY."""
        self.devices = Counter(after.values())
        self.changes.update(health for _, health in after.items() - before.items())


class PluginMetric(NamedTuple):
    """A metric of the plugin.

    `samples` are made of the program's counts and the health of its resources.
    """

    kind: str
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Counts, Sequence[ResourceHealth]], Iterable[Sample]]


def _of_program(counts: Counts, _: Sequence[ResourceHealth]) -> Iterator[Sample]:
    """Yield the failed requests of each program that was asked."""
    for program, number in counts.errors.items():
        yield (program,), number


def _counter(name: str, help_: str, counter_of: Callable[[Counts], Counter[tuple[str, str]]]) -> PluginMetric:
    def samples(counts: Counts, _: Sequence[ResourceHealth]) -> Iterable[Sample]:
        return counter_of(counts).items()

    return PluginMetric(COUNTER, f"{_PROGRAM}_{name}_total", help_, ("resource", "result"), samples)


def _by_health(numbers_of: Callable[[ResourceHealth], Counter[str]]) -> Callable[..., Iterable[Sample]]:
    def samples(_: Counts, resources: Sequence[ResourceHealth]) -> Iterator[Sample]:
        for resource in resources:
            for health in (HEALTHY, UNHEALTHY):
                yield (resource.resource, health.lower()), numbers_of(resource)[health]

    return samples


PLUGIN_CATALOGUE = (
    PluginMetric(
        GAUGE, f"{_PROGRAM}_devices",
        "Number of the devices or units that are offered to the kubelet.", ("resource", "health"),
        _by_health(lambda resource: resource.devices),
    ),
    PluginMetric(
        COUNTER, f"{_PROGRAM}_health_changes_total",
        "Total number of times that a device or unit has become healthy or unhealthy.",
        ("resource", "health"), _by_health(lambda resource: resource.changes),
    ),
    _counter("registrations", "Total number of registrations with the kubelet.",
             lambda counts: counts.registrations),
    _counter("allocations", "Total number of containers for which the kubelet has allocated the resource.",
             lambda counts: counts.allocations),
    _counter("starts", "Total number of starts of containers with the resource.",
             lambda counts: counts.starts),
    PluginMetric(
        HISTOGRAM, f"{_PROGRAM}_start_duration_seconds",
        "Time that the start of a container waited for its lease.", ("resource",),
        lambda counts, _: counts.start_times.samples(),
    ),
    PluginMetric(
        COUNTER, f"{_PROGRAM}_errors_total",
        "Total number of requests to the program that have failed.", ("program",),
        _of_program,
    ),
)  # fmt: skip


class MetricsPage:
    """Answers GET /metrics at an IP address; a name could belong to a malicious web page (DNS rebinding)."""

    def __init__(self, counts: Counts, resources: Sequence[ResourceHealth]) -> None:
        self._counts = counts
        self._resources = resources

    def handle(self, request: Request) -> EventualResponse:
        if not _ADDRESS.fullmatch(request.headers.get("host", "").lower()):
            return problem_response(
                421, "the metrics are not served under that name", "use an IP address or localhost"
            )
        if request.method not in ("GET", "HEAD"):
            return problem_response(
                405, f"{request.method} is not supported here", "use GET", (("Allow", "GET, HEAD"),)
            )
        if urlsplit(request.target).path != GET_METRICS.path:
            return problem_response(404, "not found", f"the metrics are at {GET_METRICS.path}")
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        text = self.text(openmetrics=openmetrics)
        return Response(200, OPENMETRICS_TYPE if openmetrics else PLAIN_TYPE, text)

    def text(self, *, openmetrics: bool = False) -> bytes:
        """Return all metrics, in the format of OpenMetrics or in Prometheus' older one."""
        families: list[Family] = []
        for metric in PLUGIN_CATALOGUE:
            family = Family(
                kind=metric.kind,
                name=metric.name,
                help=metric.help,
                labels=metric.labels,
                samples=metric.samples(self._counts, self._resources),
            )
            families.append(family)
        return exposition_of(families, _PROGRAM, openmetrics=openmetrics)


async def serve_metrics(address: str, page: MetricsPage) -> None:
    """Serve the metrics at the address, without end; retry while the address is in use."""
    server = Server(page, LIMITS)
    failures = Failures(log)
    try:
        while True:
            try:
                await server.open(listen_on(address))
                log.info("metrics: serving at http://%s%s", address, GET_METRICS.path)
                await asyncio.Event().wait()
            except OSError as error:
                failures.report(f"metrics: cannot listen on {address}: {error.strerror}")
                await asyncio.sleep(_RETRY_S)
    finally:
        await server.close()
