"""Every metric, declared once: its kind, its name as Prometheus shows it, what it means, and its samples.

Names and units are as https://prometheus.io/docs/practices/naming has them. Labels name GPUs, devices and
domains, and other things of which there are few; never a process, a user or a command. A value of None leaves
its sample out: what is unknown is missing, not 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.http.operations import BINDINGS, EVENT_KINDS, SEVERITIES
from yunion_mps.models import DomainStatus
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.service.metrics import BOUNDS_S, DomainUse, Facts, GpuUse
from yunion_mps.service.state import AVAILABLE, NOT_USED, PENDING, STATES, UNAVAILABLE
from yunion_mps.service.usage import DeviceUse

if TYPE_CHECKING:
    from yunion_mps.answers import Device, Gpu

MIB = 1 << 20

GAUGE, COUNTER, INFO, HISTOGRAM = "gauge", "counter", "info", "histogram"

#: The values of a metric's labels, then what its kind of family takes as a value.
Sample = tuple[Any, ...]


class Metric(NamedTuple):
    """One metric; `name` has the ending of its kind, and an info's value adds labels of its own."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Facts], Iterable[Sample]]


def _host(name: str, help_: str, value: Callable[[Facts], Any], kind: str = GAUGE) -> Metric:
    return Metric(kind, name, help_, (), lambda facts: [((), value(facts))])


def _gpu(name: str, help_: str, value: Callable[[Facts, Gpu], Any], kind: str = GAUGE) -> Metric:
    def samples(facts: Facts) -> Iterator[Sample]:
        return (((gpu["addr"],), value(facts, gpu)) for gpu in facts.gpus)

    return Metric(kind, name, help_, ("gpu",), samples)


def _gpu_devices(name: str, help_: str, counts: Callable[[Device], bool]) -> Metric:
    """How many of the GPU's devices count, of GPUs that are to have any."""

    def samples(facts: Facts) -> Iterator[Sample]:
        devices = Counter(device["gpu_uuid"] for device in facts.devices if counts(device))
        for gpu in facts.gpus:
            if gpu["state"] != NOT_USED:
                yield (gpu["addr"],), devices[gpu["uuid"] or ""]

    return Metric(GAUGE, name, help_, ("gpu",), samples)


def _device(name: str, help_: str, value: Callable[[Facts, Device], Any], kind: str = GAUGE) -> Metric:
    def samples(facts: Facts) -> Iterator[Sample]:
        for device in facts.devices:
            yield (device["addr"], device["addr"].rpartition("-")[0]), value(facts, device)

    return Metric(kind, name, help_, ("device", "gpu"), samples)


def _domain(name: str, help_: str, value: Callable[[Facts, DomainStatus], Any], kind: str = GAUGE) -> Metric:
    def samples(facts: Facts) -> Iterator[Sample]:
        return (((domain.plan.name,), value(facts, domain)) for domain in facts.domains)

    return Metric(kind, name, help_, ("domain",), samples)


def _state(
    name: str,
    help_: str,
    states: Iterable[str],
    of: Callable[[Facts], Iterable[Sample]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """One sample for each state that there can be; `of` gives label values and the current state."""

    def samples(facts: Facts) -> Iterator[Sample]:
        for (*values, current), state in product(of(facts), states):
            yield (*values, state), int(state == current)

    return Metric(GAUGE, name, help_, (*labels, "state"), samples)


def _events(facts: Facts) -> Iterator[Sample]:
    # From 0 on: Prometheus sees no increase if the first value is 1.
    for kind, severity in product(EVENT_KINDS, SEVERITIES):
        yield (kind, severity), facts.events.get((kind, severity), 0)


def _latencies(facts: Facts) -> Iterator[Sample]:
    bounds = [*(str(bound_s) for bound_s in BOUNDS_S), "+Inf"]
    for route, latency in facts.requests.latencies.items():
        yield (route,), list(zip(bounds, accumulate(latency.counts))), latency.sum_s


def _gpu_use(facts: Facts, gpu: Gpu) -> GpuUse | None:
    return facts.use.gpus.get(gpu["uuid"] or "") if facts.use else None


def _device_use(facts: Facts, device: Device) -> DeviceUse | None:
    if facts.use is None or device["gpu_uuid"] not in facts.use.gpus:
        return None
    return facts.use.devices.get(device["addr"], DeviceUse(0, 0))


def _domain_use(facts: Facts, domain: DomainStatus) -> DomainUse | None:
    return facts.use.domains.get(domain.plan.name) if facts.use else None


def _budget(facts: Facts, device: Device) -> tuple[int, float]:
    now = device["mps_memory_limit"], device["mps_thread_percentage"]
    return facts.leased_budgets.get(device["addr"], now)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB


def _state_since_s(facts: Facts, domain: DomainStatus) -> float | None:
    if not domain.since_s:
        return None
    return round(facts.now.wall_s - (facts.now.clock_s - domain.since_s), 1)


# fmt: off
CATALOGUE = (
    _host("yunion_mps_up", "Whether the daemon answers.", lambda _: 1),
    _host("yunion_mps_build_info", "Which program answers.",
          lambda facts: {"version": facts.status["version"], "revision": facts.revision}, INFO),
    _host("yunion_mps_driver_info", "The NVIDIA driver.",
          lambda facts: {name: value or "" for name, value in facts.status["driver"].items()}, INFO),
    _host("yunion_mps_start_time_seconds", "When the daemon was started, since 1970.",
          lambda facts: facts.status["started"]),
    _state("yunion_mps_state",
           "Whether this is the host's state in `/v1/status`, which does not depend on what jobs do.",
           STATES, lambda facts: [(facts.status["state"],)]),
    Metric(GAUGE, "yunion_mps_warnings", "The warnings of `yunion-mps status`, by their reason code.",
           ("reason",), lambda facts: (((code,), number) for code, number in
                          Counter(one["code"] for one in facts.status["warnings"]).items())),
    Metric(GAUGE, "yunion_mps_leases", "The leases, by their binding.", ("binding",),
           lambda facts: (((one,), facts.queue.leases.get(one, 0)) for one in BINDINGS)),
    _host("yunion_mps_lease_waiters", "The queued requests for devices.", lambda facts: facts.queue.waiting),
    _host("yunion_mps_lease_longest_wait_seconds", "How long the first request in the queue has waited.",
          lambda facts: facts.queue.longest_s),
    Metric(COUNTER, "yunion_mps_events_total",
           "The events since the daemon's start, as `yunion-mps events` shows them.",
           ("kind", "severity"), _events),
    Metric(COUNTER, "yunion_mps_http_requests_total", "The API's answers.", ("route", "method", "code"),
           lambda facts: (((route, method, str(status)), number)
                          for (route, method, status), number in facts.requests.answers.items())),
    Metric(HISTOGRAM, "yunion_mps_http_request_duration_seconds",
           "How long the API's answers took, including what their callers chose to wait for.",
           ("route",), _latencies),
    _host("yunion_mps_use_timestamp_seconds",
          "When the driver last told which processes use the GPUs, since 1970; missing before it has.",
          lambda facts: facts.use and facts.use.taken_s),

    _gpu("yunion_mps_gpu_info", "A GPU of the host.",
         lambda _, gpu: {name: gpu[name] or "" for name in ("uuid", "name", "compute_mode")}, INFO),
    _state("yunion_mps_gpu_state", "Whether this is the state of the GPU, as `yunion-mps gpus` shows it.",
           (AVAILABLE, UNAVAILABLE, NOT_USED),
           lambda facts: ((gpu["addr"], gpu["state"]) for gpu in facts.gpus), ("gpu",)),
    _gpu("yunion_mps_gpu_usable",
         "Whether the GPU itself can be used, whatever the state of its control daemon.",
         lambda facts, gpu: None if gpu["state"] == NOT_USED else int(gpu["addr"] not in facts.unusable)),
    Metric(GAUGE, "yunion_mps_gpu_unavailable",
           "1 for each GPU that cannot be used now, with the reason code.",
           ("gpu", "reason"), lambda facts: (((gpu["addr"], gpu["reason_code"]), 1) for gpu in facts.gpus
                                           if gpu["state"] == UNAVAILABLE)),
    _gpu("yunion_mps_gpu_memory_bytes", "The GPU's memory.", lambda _, gpu: _bytes(gpu["memory_total"])),
    _gpu("yunion_mps_gpu_memory_used_bytes",
         "The GPU's memory that processes use, as far as the driver tells.",
         lambda facts, gpu: (use := _gpu_use(facts, gpu)) and use.mib * MIB),
    _gpu("yunion_mps_gpu_pool_free_bytes",
         "What one more client can get of a GPU whose memory is leased in units.",
         lambda _, gpu: _bytes(gpu["memory_free"])),
    _gpu_devices("yunion_mps_gpu_devices",
                 "The GPU's devices: those that it is divided into, and leased ones of a former division.",
                 lambda _: True),
    _gpu_devices("yunion_mps_gpu_devices_leased", "The GPU's devices that are leased.",
                 lambda device: bool(device["lease"])),
    _gpu_devices("yunion_mps_gpu_devices_pending",
                 "The GPU's devices that wait for leases of a former division to end, or belong to one.",
                 lambda device: bool(device["state"] == PENDING)),
    _gpu("yunion_mps_gpu_budget_enforced",
         "Whether MPS enforces the budgets of the GPU's devices: not before Volta.",
         lambda _, gpu: None if gpu["state"] == NOT_USED or gpu["compute_capability"] is None
         else int(gpu["budget_enforced"])),
    _gpu("yunion_mps_gpu_clients", "The processes that use the GPU through MPS.",
         lambda facts, gpu: (use := _gpu_use(facts, gpu)) and use.clients),
    _gpu("yunion_mps_gpu_processes_outside_mps",
         "The processes that use the GPU outside MPS, so that no budget holds them.",
         lambda facts, gpu: (use := _gpu_use(facts, gpu)) and use.outside_mps),

    # There may be thousands of devices: each metric goes through them by itself, and keeps none.
    _device("yunion_mps_device_info", "A device.", lambda _, device: {"id": device["id"]}, INFO),
    _device("yunion_mps_device_available", "Whether the device can be used now.",
            lambda _, device: int(device["state"] == AVAILABLE)),
    _device("yunion_mps_device_leased", "Whether the device is leased.",
            lambda _, device: int(bool(device["lease"]))),
    _device("yunion_mps_device_memory_limit_bytes",
            "The memory of the device's budget; of a leased device, that of its lease.",
            lambda facts, device: _budget(facts, device)[0] * MIB),
    _device("yunion_mps_device_sm_ratio",
            "The part of the GPU's SM threads that the device's budget has: 1 is all of them.",
            lambda facts, device: round(_budget(facts, device)[1] / 100, 6)),
    _device("yunion_mps_device_memory_used_bytes",
            "The GPU's memory that the device's clients use, as far as the driver tells.",
            lambda facts, device: (use := _device_use(facts, device)) and use.mib * MIB),
    _device("yunion_mps_device_clients", "The processes that use the device.",
            lambda facts, device: (use := _device_use(facts, device)) and use.clients),

    _state("yunion_mps_domain_state", "Whether this is the state of the domain.", LEGAL_CHANGES,
           lambda facts: ((domain.plan.name, domain.state) for domain in facts.domains), ("domain",)),
    _domain("yunion_mps_domain_state_timestamp_seconds",
            "Since when the domain is in its state, since 1970.", _state_since_s),
    _domain("yunion_mps_domain_start_time_seconds",
            "When the domain's control daemon was started, since 1970; missing while none runs.",
            lambda facts, domain: (use := _domain_use(facts, domain)) and (use.started_s or None)),
    _domain("yunion_mps_domain_restarts_total",
            "How often the domain's control daemon has ended or failed since the daemon's start.",
            lambda _, domain: domain.restarts, COUNTER),
    _domain("yunion_mps_domain_pending", "Whether a change of the domain waits for jobs to end.",
            lambda _, domain: int(bool(domain.pending))),
    _domain("yunion_mps_domain_gpus", "The GPUs that the domain serves.",
            lambda _, domain: len(domain.plan.gpu_uuids)),
    _domain("yunion_mps_domain_servers", "The domain's MPS servers.",
            lambda facts, domain: (use := _domain_use(facts, domain)) and use.servers),
    _domain("yunion_mps_domain_clients", "The processes that use the domain's GPUs through MPS.",
            lambda facts, domain: (use := _domain_use(facts, domain)) and use.clients),
    _domain("yunion_mps_domain_probe_duration_seconds",
            "How long the control daemon took to answer the last probe.",
            lambda facts, domain: facts.probe_s.get(domain.plan.name)),
)
# fmt: on
