"""Every metric: its kind, its name as Prometheus shows it, what it means, and its labels.

Names and units are as https://prometheus.io/docs/practices/naming has them. Labels name GPUs, devices and
domains, and what there are few of; never a process, a user or a command.
"""

from __future__ import annotations

from typing import NamedTuple

GAUGE, COUNTER, INFO, HISTOGRAM = "gauge", "counter", "info", "histogram"


class Metric(NamedTuple):
    """One metric; `name` is with the ending that its kind has."""

    kind: str
    name: str
    help: str
    labels: tuple[str, ...] = ()


_DAEMON = (
    Metric(GAUGE, "yunion_mps_up", "Whether the daemon answers."),
    Metric(INFO, "yunion_mps_build_info", "Which program answers."),
    Metric(INFO, "yunion_mps_driver_info", "The NVIDIA driver."),
    Metric(GAUGE, "yunion_mps_start_time_seconds", "When the daemon was started, since 1970."),
    Metric(
        GAUGE,
        "yunion_mps_state",
        "Whether this is the host's state in `/v1/status`, which does not depend on what jobs do.",
        ("state",),
    ),
    Metric(GAUGE, "yunion_mps_warnings", "How many warnings `yunion-mps status` has."),
    Metric(GAUGE, "yunion_mps_leases", "The leases that there are, by what ends them.", ("binding",)),
    Metric(GAUGE, "yunion_mps_lease_waiters", "How many wait for devices."),
    Metric(
        GAUGE,
        "yunion_mps_lease_longest_wait_seconds",
        "How long the first of those who wait for devices has waited.",
    ),
    Metric(
        COUNTER,
        "yunion_mps_events_total",
        "The events since the daemon's start, as `yunion-mps events` shows them.",
        ("kind", "severity"),
    ),
    Metric(COUNTER, "yunion_mps_http_requests_total", "The API's answers.", ("route", "method", "code")),
    Metric(
        HISTOGRAM,
        "yunion_mps_http_request_duration_seconds",
        "How long the API's answers took, with what their askers chose to wait for.",
        ("route",),
    ),
    Metric(
        GAUGE,
        "yunion_mps_use_timestamp_seconds",
        "When the driver last told who uses the GPUs, since 1970; missing before it has.",
    ),
)
_GPU = ("gpu",)
_GPUS = (
    Metric(INFO, "yunion_mps_gpu_info", "A GPU of the host.", _GPU),
    Metric(
        GAUGE,
        "yunion_mps_gpu_state",
        "Whether this is the state of the GPU, as `yunion-mps gpus` says it.",
        ("gpu", "state"),
    ),
    Metric(
        GAUGE,
        "yunion_mps_gpu_usable",
        "Whether the GPU itself can be used, whatever its control daemon is at.",
        _GPU,
    ),
    Metric(GAUGE, "yunion_mps_gpu_memory_bytes", "The GPU's memory.", _GPU),
    Metric(
        GAUGE,
        "yunion_mps_gpu_memory_used_bytes",
        "What processes have of the GPU's memory, as far as the driver tells it.",
        _GPU,
    ),
    Metric(
        GAUGE,
        "yunion_mps_gpu_pool_free_bytes",
        "What one more client can get of a GPU whose memory is handed out in units.",
        _GPU,
    ),
    Metric(
        GAUGE,
        "yunion_mps_gpu_devices",
        "The GPU's devices: those that it is divided into, and those that a lease has of a former division.",
        _GPU,
    ),
    Metric(GAUGE, "yunion_mps_gpu_devices_leased", "The devices of the GPU that somebody has.", _GPU),
    Metric(
        GAUGE,
        "yunion_mps_gpu_devices_pending",
        "The devices of the GPU that wait for leases of a former division to end, or belong to one.",
        _GPU,
    ),
    Metric(
        GAUGE,
        "yunion_mps_gpu_budget_enforced",
        "Whether MPS enforces the budgets of the GPU's devices: not before Volta.",
        _GPU,
    ),
    Metric(GAUGE, "yunion_mps_gpu_clients", "The processes that use the GPU through MPS.", _GPU),
    Metric(
        GAUGE,
        "yunion_mps_gpu_processes_past_mps",
        "The processes that use the GPU past MPS, so that no budget holds them.",
        _GPU,
    ),
)
_DEVICE = ("device", "gpu")
_DEVICES = (
    Metric(INFO, "yunion_mps_device_info", "A device.", _DEVICE),
    Metric(GAUGE, "yunion_mps_device_available", "Whether the device can be used now.", _DEVICE),
    Metric(GAUGE, "yunion_mps_device_leased", "Whether somebody has the device.", _DEVICE),
    Metric(
        GAUGE,
        "yunion_mps_device_memory_limit_bytes",
        "The memory of the device's budget; of who has it, as it was given.",
        _DEVICE,
    ),
    Metric(
        GAUGE,
        "yunion_mps_device_sm_ratio",
        "The part of the GPU's SM threads that the device's budget has: 1 is all of them.",
        _DEVICE,
    ),
    Metric(
        GAUGE,
        "yunion_mps_device_memory_used_bytes",
        "What the device's clients have of the GPU's memory, as far as the driver tells it.",
        _DEVICE,
    ),
    Metric(GAUGE, "yunion_mps_device_clients", "The processes that use the device.", _DEVICE),
)
_DOMAIN = ("domain",)
_DOMAINS = (
    Metric(GAUGE, "yunion_mps_domain_state", "Whether this is the state of the domain.", ("domain", "state")),
    Metric(
        GAUGE,
        "yunion_mps_domain_state_timestamp_seconds",
        "Since when the domain is in its state, since 1970.",
        _DOMAIN,
    ),
    Metric(
        GAUGE,
        "yunion_mps_domain_start_time_seconds",
        "When the domain's control daemon was started, since 1970; missing while none runs.",
        _DOMAIN,
    ),
    Metric(
        COUNTER,
        "yunion_mps_domain_restarts_total",
        "How often the domain's control daemon has ended or failed since the daemon's start.",
        _DOMAIN,
    ),
    Metric(
        GAUGE,
        "yunion_mps_domain_pending",
        "Whether a change of the domain waits for jobs to end.",
        _DOMAIN,
    ),
    Metric(GAUGE, "yunion_mps_domain_gpus", "The GPUs that the domain serves.", _DOMAIN),
    Metric(GAUGE, "yunion_mps_domain_servers", "The domain's MPS servers.", _DOMAIN),
    Metric(GAUGE, "yunion_mps_domain_clients", "The processes that use the domain's GPUs by MPS.", _DOMAIN),
    Metric(
        GAUGE,
        "yunion_mps_domain_probe_duration_seconds",
        "How long the control daemon took to answer when it was asked for a sign of life last.",
        _DOMAIN,
    ),
)

CATALOGUE = (*_DAEMON, *_GPUS, *_DEVICES, *_DOMAINS)
#: What prometheus_client itself tells of the daemon's process, as every exporter has it, behind our name.
PROCESS = "yunion_mps_process"
