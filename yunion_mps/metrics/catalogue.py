"""Every metric, declared once: its kind, name, help text, labels, and how its samples are made of the facts.

Names and units follow https://prometheus.io/docs/practices/naming. Labels name GPUs, devices, domains, other
small sets, and the pods that have devices, never processes, users or commands. A sample with the value None
is left out: unknown values are missing, not 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from yunion_mps.core.addresses import gpu_of
from yunion_mps.core.enums import (
    AVAILABLE,
    BINDINGS,
    EVENT_KINDS,
    HOST_STATES,
    MIG,
    NOT_USED,
    PENDING,
    RESERVED,
    SEVERITIES,
    UNAVAILABLE,
)
from yunion_mps.core.exposition import COUNTER, GAUGE, HISTOGRAM, INFO, Family, Sample
from yunion_mps.core.models import DomainStatus
from yunion_mps.core.units import seconds
from yunion_mps.inventory.nvml import GpuLoad
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.observe.observer import DomainUsage, GpuUsage
from yunion_mps.observe.usage import DeviceUsage
from yunion_mps.service.facts import Facts

if TYPE_CHECKING:
    from yunion_mps.answers import DeviceJson, GpuJson


MIB = 1 << 20

#: Labels of a GPU: its PCI address, and the UUID that DCGM's metrics have as `UUID`.
_GPU = ("gpu", "gpu_uuid")


class Metric(NamedTuple):
    """The declaration of a metric."""

    #: GAUGE, COUNTER, INFO or HISTOGRAM.
    kind: str
    #: Includes the suffix of its kind, such as `_total`.
    name: str
    help: str
    #: The value of an info adds labels of its own.
    labels: tuple[str, ...]
    samples: Callable[[Facts], Iterable[Sample]]

    def family(self, facts: Facts) -> Family:
        return Family(
            kind=self.kind,
            name=self.name,
            help=self.help,
            labels=self.labels,
            samples=self.samples(facts),
        )


def _host(name: str, help_: str, value: Callable[[Facts], Any], kind: str = GAUGE) -> Metric:
    return Metric(kind, name, help_, (), lambda facts: [((), value(facts))])


def _gpu(name: str, help_: str, value: Callable[[Facts, GpuJson], Any], kind: str = GAUGE) -> Metric:
    def samples(facts: Facts) -> Iterator[Sample]:
        for gpu in facts.gpus:
            yield _of_gpu(gpu), value(facts, gpu)

    return Metric(kind, name, help_, _GPU, samples)


def _of_gpu(gpu: GpuJson) -> tuple[str, str]:
    return gpu["addr"], gpu["uuid"] or ""


def _gpu_devices(name: str, help_: str, counts: Callable[[DeviceJson], bool]) -> Metric:
    """Count the GPU's devices for which `counts` is true; leaves out GPUs that are not used."""

    def samples(facts: Facts) -> Iterator[Sample]:
        devices = Counter(device["gpu_uuid"] for device in facts.devices if counts(device))
        for gpu in facts.gpus:
            if gpu["state"] != NOT_USED:
                yield _of_gpu(gpu), devices[gpu["uuid"] or ""]

    return Metric(GAUGE, name, help_, _GPU, samples)


def _device(name: str, help_: str, value: Callable[[Facts, DeviceJson], Any], kind: str = GAUGE) -> Metric:
    def samples(facts: Facts) -> Iterator[Sample]:
        for device in facts.devices:
            gpu = gpu_of(device["addr"])
            yield (device["addr"], gpu, device["gpu_uuid"]), value(facts, device)

    return Metric(kind, name, help_, ("device", *_GPU), samples)


def _domain(name: str, help_: str, value: Callable[[Facts, DomainStatus], Any], kind: str = GAUGE) -> Metric:
    def samples(facts: Facts) -> Iterator[Sample]:
        for domain in facts.domains:
            yield (domain.plan.name,), value(facts, domain)

    return Metric(kind, name, help_, ("domain",), samples)


def _state(
    name: str,
    help_: str,
    states: Iterable[str],
    samples_of: Callable[[Facts], Iterable[Sample]],
    labels: tuple[str, ...] = (),
) -> Metric:
    """Declare a metric with a sample for each possible state.

    samples_of: yields the values of the labels and the current state.
    """

    def samples(facts: Facts) -> Iterator[Sample]:
        for (*values, current), state in product(samples_of(facts), states):
            yield (*values, state.replace(" ", "_")), int(state == current)

    return Metric(GAUGE, name, help_, (*labels, "state"), samples)


def _events(facts: Facts) -> Iterator[Sample]:
    # Counters start at 0, because Prometheus sees no increase if the first value is 1.
    for kind, severity in product(EVENT_KINDS, SEVERITIES):
        yield (kind, severity), facts.events.get((kind, severity), 0)


def _problems(facts: Facts) -> Iterator[Sample]:
    counts = Counter((problem["level"], problem["code"]) for problem in facts.status["problems"])
    yield from counts.items()


def _leases(facts: Facts) -> Iterator[Sample]:
    for binding in BINDINGS:
        yield (binding,), facts.queue.leases.get(binding, 0)


def _requests(facts: Facts) -> Iterator[Sample]:
    for (route, method, status), number in facts.requests.answers.items():
        yield (route, method, str(status)), number


def _reasons_of_gpus(state: str) -> Callable[[Facts], Iterator[Sample]]:
    """Return what makes a sample for each GPU in this state, with the reason code."""

    def samples(facts: Facts) -> Iterator[Sample]:
        for gpu in facts.gpus:
            if gpu["state"] == state:
                yield (*_of_gpu(gpu), gpu["reason_code"]), 1

    return samples


def _gpu_states(facts: Facts) -> Iterator[Sample]:
    for gpu in facts.gpus:
        yield (*_of_gpu(gpu), gpu["state"])


def _domain_states(facts: Facts) -> Iterator[Sample]:
    for domain in facts.domains:
        yield domain.plan.name, domain.state


def _is_enforced(gpu: GpuJson) -> int | None:
    if gpu["state"] == NOT_USED or gpu["sharing"] == MIG or gpu["compute_capability"] is None:
        return None
    return int(gpu["budget_enforced"])


def _load(facts: Facts, gpu: GpuJson) -> GpuLoad:
    return facts.latest.load.gpus.get(gpu["uuid"] or "", GpuLoad())


def _gpu_use(facts: Facts, gpu: GpuJson) -> GpuUsage | None:
    return facts.use.gpus.get(gpu["uuid"] or "") if facts.use else None


def _device_use(facts: Facts, device: DeviceJson) -> DeviceUsage | None:
    if facts.use is None or device["gpu_uuid"] not in facts.use.gpus:
        return None
    return facts.use.devices.get(device["addr"], DeviceUsage(0, 0))


def _domain_use(facts: Facts, domain: DomainStatus) -> DomainUsage | None:
    return facts.use.domains.get(domain.plan.name) if facts.use else None


def _budget(facts: Facts, device: DeviceJson) -> tuple[int | None, float]:
    unleased = device["memory_mib"], device["thread_percentage"]
    return facts.leased_budgets.get(device["addr"], unleased)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else round(percent / 100, 6)


def _gpu_clients(facts: Facts, gpu: GpuJson) -> int | None:
    use = _gpu_use(facts, gpu)
    return None if use is None else use.clients


def _outside_mps(facts: Facts, gpu: GpuJson) -> int | None:
    use = _gpu_use(facts, gpu)
    return None if use is None else use.outside_mps


def _device_clients(facts: Facts, device: DeviceJson) -> int | None:
    use = _device_use(facts, device)
    return None if use is None else use.clients


def _device_bytes(facts: Facts, device: DeviceJson) -> int | None:
    use = _device_use(facts, device)
    return None if use is None else use.mib * MIB


def _device_sm_ratio(facts: Facts, device: DeviceJson) -> float | None:
    use = facts.latest.devices.get(device["addr"])
    return None if use is None else _ratio(use.sm)


def _domain_servers(facts: Facts, domain: DomainStatus) -> int | None:
    use = _domain_use(facts, domain)
    return None if use is None else use.servers


def _domain_clients(facts: Facts, domain: DomainStatus) -> int | None:
    use = _domain_use(facts, domain)
    return None if use is None else use.clients


def _started_s(facts: Facts, domain: DomainStatus) -> float | None:
    use = _domain_use(facts, domain)
    return None if use is None else use.started_s or None


def _state_since_s(facts: Facts, domain: DomainStatus) -> float | None:
    if not domain.since_s:
        return None
    return round(facts.clocks.wall_s - (facts.clocks.clock_s - domain.since_s), 1)


# fmt: off
CATALOGUE = (
    _host("yunion_mps_up", "Whether the daemon answers (1) or not (0).", lambda _: 1),
    _host("yunion_mps_build_info", "Version of the daemon; the value is always 1.",
          lambda facts: {"version": facts.status["version"], "revision": facts.revision}, INFO),
    _host("yunion_mps_driver_info", "Version of the NVIDIA driver; the value is always 1.",
          lambda facts: {name: value or "" for name, value in facts.status["driver"].items()}, INFO),
    _host("yunion_mps_start_time_seconds", "Unix time at which the daemon started.",
          lambda facts: seconds(facts.status["started"])),
    _state("yunion_mps_state",
           "State of the service as in yunion-mps status: 1 for the current state, 0 for all others.",
           HOST_STATES, lambda facts: [(facts.status["state"],)]),
    Metric(GAUGE, "yunion_mps_problems", "Number of problems in yunion-mps status, by level and reason code.",
           ("level", "reason"), _problems),
    Metric(GAUGE, "yunion_mps_leases", "Number of leases, by binding.", ("binding",), _leases),
    _host("yunion_mps_queued_requests", "Number of queued requests for devices.",
          lambda facts: facts.queue.waiting),
    _host("yunion_mps_queue_longest_wait_seconds",
          "Time that the oldest queued request has been waiting; 0 if the queue is empty.",
          lambda facts: facts.queue.longest_s),
    Metric(COUNTER, "yunion_mps_events_total",
           "Total number of events since the daemon started, by kind and severity.",
           ("kind", "severity"), _events),
    Metric(COUNTER, "yunion_mps_http_requests_total",
           "Total number of API requests, by route, method and status code.", ("route", "method", "code"),
           _requests),
    Metric(HISTOGRAM, "yunion_mps_http_request_duration_seconds",
           "Time taken to answer API requests, including the time that callers chose to wait.",
           ("route",), lambda facts: facts.requests.latencies),
    _host("yunion_mps_use_timestamp_seconds",
          "Unix time at which the driver last listed the processes on the GPUs.",
          lambda facts: facts.use and facts.use.taken_s),

    _gpu("yunion_mps_gpu_info",
         "A GPU of the host, or a MIG instance, whose parent is the UUID of its GPU; the value is always 1.",
         # Hyphens as in the node label nvidia.com/gpu.product.
         lambda _, gpu: {"name": (gpu["name"] or "").replace(" ", "-"),
                         "compute_mode": gpu["compute_mode"] or "", "sharing": gpu["sharing"] or "",
                         "time_slice": gpu["time_slice"] or "",
                         "parent": gpu["parent"] or "", "mig_profile": gpu["mig_profile"] or ""}, INFO),
    _state("yunion_mps_gpu_state",
           "State of the GPU as in yunion-mps gpus: 1 for the current state, 0 for all others.",
           (AVAILABLE, PENDING, UNAVAILABLE, NOT_USED), _gpu_states, _GPU),
    _gpu("yunion_mps_gpu_usable",
         "Whether the GPU itself can be used (1) or not (0), regardless of the state of its control daemon.",
         lambda facts, gpu: None if gpu["state"] == NOT_USED else int(gpu["addr"] not in facts.unusable)),
    Metric(GAUGE, "yunion_mps_gpu_unavailable",
           "1 for each GPU that is unavailable, with the reason code.",
           (*_GPU, "reason"), _reasons_of_gpus(UNAVAILABLE)),
    Metric(GAUGE, "yunion_mps_gpu_pending",
           "1 for each GPU with a pending change, with the reason code; its remaining devices can be leased.",
           (*_GPU, "reason"), _reasons_of_gpus(PENDING)),
    _gpu("yunion_mps_gpu_utilization_ratio",
         "Fraction of the time in which a kernel ran on the GPU, over the driver's last sample period.",
         lambda facts, gpu: _ratio(_load(facts, gpu).utilization)),
    _gpu("yunion_mps_gpu_temperature_celsius", "Temperature of the GPU.",
         lambda facts, gpu: _load(facts, gpu).temperature_c),
    _gpu("yunion_mps_gpu_power_watts", "Power that the GPU draws.",
         lambda facts, gpu: _load(facts, gpu).power_w),
    _gpu("yunion_mps_gpu_power_limit_watts", "Power limit that the driver enforces on the GPU.",
         lambda facts, gpu: _load(facts, gpu).power_limit_w),
    _gpu("yunion_mps_gpu_memory_bytes", "Memory of the GPU.", lambda _, gpu: _bytes(gpu["memory_mib"])),
    _gpu("yunion_mps_gpu_memory_used_bytes", "Memory of the GPU that is in use, as nvidia-smi shows it.",
         lambda facts, gpu: _bytes(_load(facts, gpu).memory_used_mib)),
    _gpu("yunion_mps_gpu_pool_free_bytes",
         "Memory that can still be leased of a GPU whose memory is leased in units (a pool).",
         lambda _, gpu: _bytes(gpu["memory_free_mib"])),
    _gpu_devices("yunion_mps_gpu_devices",
                 "Number of devices of the GPU, including leased ones of a previous division.",
                 lambda _: True),
    _gpu_devices("yunion_mps_gpu_devices_leased", "Number of devices of the GPU that are leased.",
                 lambda device: bool(device["lease"])),
    _gpu_devices("yunion_mps_gpu_devices_pending",
                 "Number of devices of the GPU that wait for, or belong to, leases of a previous division.",
                 lambda device: bool(device["state"] == PENDING)),
    _gpu_devices("yunion_mps_gpu_devices_reserved",
                 "Number of devices of the GPU that are reserved, and not leased.",
                 lambda device: bool(device["state"] == RESERVED)),
    _gpu("yunion_mps_gpu_budget_enforced",
         "Whether budgets of the GPU's devices are enforced (1) or not (0, before Volta, or time-sliced); "
         "missing in MIG mode, where its instances have the devices.",
         lambda _, gpu: _is_enforced(gpu)),
    _gpu("yunion_mps_gpu_clients", "Number of processes that use the GPU, not counting those outside MPS.",
         _gpu_clients),
    _gpu("yunion_mps_gpu_processes_outside_mps",
         "Number of processes that use the GPU outside MPS, where no budget applies.",
         _outside_mps),
    _gpu("yunion_mps_over_budget_terminations_total",
         "Total number of processes on the GPU terminated by over_budget: terminate since the "
         "daemon started.",
         lambda facts, gpu: facts.over_budget_terminations.get(gpu["addr"], 0), COUNTER),

    # There may be thousands of devices: each metric iterates over them and stores none.
    _device("yunion_mps_device_info", "A device; the value is always 1.",
            lambda _, device: {"id": device["id"], "sharing": device["sharing"]}, INFO),
    _device("yunion_mps_device_pod_info",
            "The pod with its container, or the resource claim, that has leased the device; "
            "the value is always 1.",
            lambda facts, device: facts.pods.get(device["addr"]), INFO),
    _device("yunion_mps_device_available", "Whether the device can be used now (1) or not (0).",
            lambda _, device: int(device["state"] not in (UNAVAILABLE, PENDING))),
    _device("yunion_mps_device_leased", "Whether the device is leased (1) or not (0).",
            lambda _, device: int(bool(device["lease"]))),
    _device("yunion_mps_device_memory_limit_bytes",
            "Memory budget of the device; of a leased device, that of its lease.",
            lambda facts, device: _bytes(_budget(facts, device)[0])),
    _device("yunion_mps_device_memory_used_bytes",
            "Memory of the GPU that the clients of the device use.",
            _device_bytes),
    _device("yunion_mps_device_memory_peak_bytes",
            "Peak memory use of the device since its lease began, as polled.",
            lambda facts, device: _bytes(facts.peaks_mib.get(device["addr"]))),
    _device("yunion_mps_device_sm_limit_ratio",
            "Fraction of the GPU's SM threads that the budget of the device allows.",
            lambda facts, device: _ratio(_budget(facts, device)[1])),
    _device("yunion_mps_device_sm_utilization_ratio",
            "Fraction of the time in which kernels of the device's clients ran, as sampled by the driver.",
            _device_sm_ratio),
    _device("yunion_mps_device_clients", "Number of processes that use the device.",
            _device_clients),

    _state("yunion_mps_domain_state",
           "State of the domain: 1 for the current state, 0 for all others.", LEGAL_CHANGES,
           _domain_states, ("domain",)),
    _domain("yunion_mps_domain_state_timestamp_seconds",
            "Unix time at which the domain entered its state.", _state_since_s),
    _domain("yunion_mps_domain_start_time_seconds",
            "Unix time at which the control daemon of the domain started; missing if none runs.",
            _started_s),
    _domain("yunion_mps_domain_restarts_total",
            "Total number of times that the control daemon of the domain ended or failed.",
            lambda _, domain: domain.restarts, COUNTER),
    _domain("yunion_mps_domain_pending",
            "Whether a change of the domain waits for jobs to end (1) or not (0).",
            lambda _, domain: int(bool(domain.pending))),
    _domain("yunion_mps_domain_gpus", "Number of GPUs that the domain serves.",
            lambda _, domain: len(domain.plan.gpu_uuids)),
    _domain("yunion_mps_domain_servers", "Number of MPS servers of the domain.",
            _domain_servers),
    _domain("yunion_mps_domain_clients", "Number of processes that use the domain's GPUs through MPS.",
            _domain_clients),
    _domain("yunion_mps_domain_probe_duration_seconds",
            "Time that the control daemon took to answer the last probe.",
            lambda facts, domain: facts.probe_s.get(domain.plan.name)),
)
# fmt: on
