"""Every metric's values, out of the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, product
from operator import itemgetter
from typing import Any

from yunion_mps.http.counting import BOUNDS_S
from yunion_mps.http.leases import BINDINGS
from yunion_mps.metrics.facts import Facts, Json
from yunion_mps.metrics.use import MIB, OfDevice
from yunion_mps.mps.states import LEGAL_CHANGES
from yunion_mps.service import EVENT_KINDS, SEVERITIES
from yunion_mps.service.shapes import AVAILABLE, NOT_USED, PENDING, UNAVAILABLE
from yunion_mps.service.state import STATES

#: A metric's name, the values of its labels, and what its kind of family takes as a value.
Row = tuple[Any, ...]

_GPU_STATES = (AVAILABLE, UNAVAILABLE, NOT_USED)


def rows(facts: Facts) -> Iterator[Row]:
    """Every value of every metric, those of one metric together."""
    for part in (_daemon, _requests, _gpus, _domains):
        yield from sorted(part(facts), key=itemgetter(0))
    yield from _devices(facts)


def _daemon(facts: Facts) -> Iterator[Row]:
    status = facts.status
    driver = {name: value or "" for name, value in status["driver"].items()}
    yield "yunion_mps_up", (), 1
    yield "yunion_mps_build_info", (), {"version": status["version"], "revision": facts.revision}
    yield "yunion_mps_driver_info", (), driver
    yield "yunion_mps_start_time_seconds", (), status["started"]
    yield from _states("yunion_mps_state", (), STATES, status["state"])
    yield "yunion_mps_warnings", (), len(status["warnings"])
    for binding in BINDINGS:
        yield "yunion_mps_leases", (binding,), facts.queue.leases.get(binding, 0)
    yield "yunion_mps_lease_waiters", (), facts.queue.waiting
    yield "yunion_mps_lease_longest_wait_seconds", (), facts.queue.longest_s
    # From 0 on: Prometheus sees no increase where the first value is 1.
    for kind, severity in product(EVENT_KINDS, SEVERITIES):
        yield "yunion_mps_events_total", (kind, severity), facts.events.get((kind, severity), 0)
    if facts.use:
        yield "yunion_mps_use_timestamp_seconds", (), facts.use.taken_s


def _requests(facts: Facts) -> Iterator[Row]:
    for (route, method, code), number in facts.requests.answers.items():
        yield "yunion_mps_http_requests_total", (route, method, str(code)), number
    bounds = [*(str(bound_s) for bound_s in BOUNDS_S), "+Inf"]
    for route, latency in facts.requests.latencies.items():
        buckets = list(zip(bounds, accumulate(latency.counts)))
        yield "yunion_mps_http_request_duration_seconds", (route,), buckets, latency.sum_s


def _gpus(facts: Facts) -> Iterator[Row]:
    devices = Counter(device["gpu_uuid"] for device in facts.devices)
    leased = Counter(device["gpu_uuid"] for device in facts.devices if device["lease"])
    pending = Counter(device["gpu_uuid"] for device in facts.devices if device["state"] == PENDING)
    for gpu in facts.gpus:
        labels, uuid = (gpu["addr"],), gpu["uuid"]
        about = {"uuid": uuid or "", "name": gpu["name"] or "", "compute_mode": gpu["compute_mode"] or ""}
        yield "yunion_mps_gpu_info", labels, about
        yield from _states("yunion_mps_gpu_state", labels, _GPU_STATES, gpu["state"])
        if gpu["memory_total"] is not None:
            yield "yunion_mps_gpu_memory_bytes", labels, gpu["memory_total"] * MIB
        if gpu["memory_free"] is not None:
            yield "yunion_mps_gpu_pool_free_bytes", labels, gpu["memory_free"] * MIB
        if gpu["state"] != NOT_USED:
            yield "yunion_mps_gpu_usable", labels, int(gpu["addr"] not in facts.ill)
            yield "yunion_mps_gpu_devices", labels, devices[uuid]
            yield "yunion_mps_gpu_devices_leased", labels, leased[uuid]
            yield "yunion_mps_gpu_devices_pending", labels, pending[uuid]
            if gpu["compute_capability"] is not None:
                yield "yunion_mps_gpu_budget_enforced", labels, int(gpu["budget_enforced"])
        use = facts.use.gpus.get(uuid) if facts.use else None
        if use:
            yield "yunion_mps_gpu_memory_used_bytes", labels, use.bytes
            yield "yunion_mps_gpu_clients", labels, use.clients
        if use and use.past_mps is not None:
            yield "yunion_mps_gpu_processes_past_mps", labels, use.past_mps


#: There may be thousands of devices, so they are gone through for one metric after another, and none is kept.
_OF_DEVICE: dict[str, Callable[[Json], Any]] = {
    "yunion_mps_device_info": lambda device: {"id": device["id"]},
    "yunion_mps_device_available": lambda device: int(device["state"] == AVAILABLE),
    "yunion_mps_device_leased": lambda device: int(bool(device["lease"])),
}
_OF_BUDGET: dict[str, Callable[[int, float], Any]] = {
    "yunion_mps_device_memory_limit_bytes": lambda mib, _: mib * MIB,
    "yunion_mps_device_sm_ratio": lambda _, percentage: round(percentage / 100, 6),
}
_UNUSED = OfDevice(0, 0)
_OF_DEVICE_USED: dict[str, Callable[[OfDevice], int]] = {
    "yunion_mps_device_memory_used_bytes": lambda use: use.bytes,
    "yunion_mps_device_clients": lambda use: use.clients,
}


def _devices(facts: Facts) -> Iterator[Row]:
    for name, value_of in _OF_DEVICE.items():
        for device in facts.devices:
            yield name, _of_device(device), value_of(device)
    for name, part_of in _OF_BUDGET.items():
        for device in facts.devices:
            now = device["mps_memory_limit"], device["mps_thread_percentage"]
            yield name, _of_device(device), part_of(*facts.given.get(device["addr"], now))
    if facts.use is None:
        return
    for name, used_of in _OF_DEVICE_USED.items():
        for device in facts.devices:
            if device["gpu_uuid"] in facts.use.gpus:
                yield name, _of_device(device), used_of(facts.use.devices.get(device["addr"], _UNUSED))


def _of_device(device: Json) -> tuple[str, str]:
    return device["addr"], device["addr"].rpartition("-")[0]


def _domains(facts: Facts) -> Iterator[Row]:
    for status in facts.domains:
        labels = (status.plan.name,)
        yield from _states("yunion_mps_domain_state", labels, LEGAL_CHANGES, status.state)
        if status.since_s:
            since_s = facts.now.wall_s - (facts.now.clock_s - status.since_s)
            yield "yunion_mps_domain_state_timestamp_seconds", labels, round(since_s, 1)
        yield "yunion_mps_domain_restarts_total", labels, status.restarts
        yield "yunion_mps_domain_pending", labels, int(bool(status.pending))
        yield "yunion_mps_domain_gpus", labels, len(status.plan.gpu_uuids)
        if status.plan.name in facts.probe_s:
            yield "yunion_mps_domain_probe_duration_seconds", labels, facts.probe_s[status.plan.name]
        use = facts.use.domains.get(status.plan.name) if facts.use else None
        if use:
            yield "yunion_mps_domain_servers", labels, use.servers
            yield "yunion_mps_domain_clients", labels, use.clients
        if use and use.started_s:
            yield "yunion_mps_domain_start_time_seconds", labels, use.started_s


def _states(name: str, labels: tuple[str, ...], all_of_them: Iterable[str], one: str) -> Iterator[Row]:
    for state in all_of_them:
        yield name, (*labels, state), int(state == one)
