"""The closed sets of words that the API's parameters and answers, metrics and events share."""

from __future__ import annotations

DOMAIN_STATES = ("stopped", "starting", "applying", "ready", "wedged", "backoff", "failed", "stopping")
HOST_STATES = ("ready", "degraded", "failed", "disabled")
EVENT_KINDS = ("domain", "limit", "gpu", "compute_mode", "configuration", "client", "lease", "daemon")
SEVERITIES = ("info", "warning", "error")
#: What ends a lease.
BINDINGS = ("process", "connection", "name", "container")
PLACEMENTS = ("binpack", "spread")
RELOAD_MODES = ("drain", "now")

#: The states of a device, and of a GPU.
AVAILABLE = "available"
UNAVAILABLE = "unavailable"
#: The device is added or removed once the leases of a former division have ended.
PENDING = "pending"
NOT_USED = "not used"

#: The state of an MPS server that has failed, as NVIDIA's control daemon reports it.
SERVER_FAULT = "FAULT"
