"""The table of the API's operations, each declared once: its parameters, its answer and its access.

The router, the checks of parameters, the OpenAPI document, the request counters and the client's calls are
derived from it. GET has its parameters in the query, POST in a JSON body. An operation's handler is the
method of `Handlers` with its name, and its answer's schema comes from the type of that name in answers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunion_mps.enums import BINDINGS, EVENT_KINDS, PLACEMENTS, RELOAD_MODES
from yunion_mps.http.operation import OWNER, ROOT, SLOW_S, Operation
from yunion_mps.http.parameters import Parameter

if TYPE_CHECKING:
    from yunion_mps import answers

MAX_NUMBER = (1 << 31) - 1
#: No host has more devices; an answer is never larger than this many of them.
MAX_LIMIT = 100_000
#: The default page size of the listing, as in Cloudpods.
DEFAULT_LIMIT = 20
MAX_EVENTS = 1000
MAX_EVENT_WAIT_S = 60
#: A PID has seven digits at most (PID_MAX_LIMIT of the kernel's include/linux/threads.h).
MAX_PID = 9_999_999
#: The most devices that one lease may have.
MAX_DEVICES = 64
#: More memory than any GPU has.
MAX_MIB = 1 << 30
#: How long a request may wait, and how long a lease taken by name may live without renewal, in s.
MAX_WAIT_S = 30 * 86_400
MAX_TTL_S = 365 * 86_400
#: A holder's command line is cut to this many characters.
COMMAND_LENGTH = 100
#: The names of leases, and idempotency keys (regular expressions).
NAME = "^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,99}$"
IDEMPOTENCY_KEY = "^[A-Za-z0-9-]{16,64}$"


#: The format of metrics that Prometheus asks for; others get text.
OPENMETRICS = "application/openmetrics-text"


def _number(name: str, description: str, minimum: int, maximum: int, default: int | None = None) -> Parameter:
    return Parameter(name, description, "integer", default, minimum, maximum)


def _flag(name: str, description: str, *, default: bool = False) -> Parameter:
    return Parameter(name, description, "boolean", default)


_DEVICE = Parameter(
    "id", "Its id, its address, or a unique beginning of either.", pattern="^.+$", example="00:06.0-1"
)
_CLIENT = Parameter("pid", "The client's PID.", "integer", maximum=9_999_999_999, example=4260)
_LEASE = Parameter(
    "lease",
    "The lease's id, its first 8 or more characters, or the name of the caller's lease.",
    pattern="^.+$",
    example="7c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44",
)
_NAME_HINT = "write letters, digits and ._:/@-, a letter or digit first, at most 100"
_GIVE_ONE = "leave it out, or name one"

GET_DEVICES: Operation[answers.DeviceList] = Operation(
    "get_devices", "GET", "/v1/devices", "One page of the MPS devices", "DeviceList",
    _number("limit", "Devices a page; 0 for all.", 0, MAX_LIMIT, DEFAULT_LIMIT),
    _number("offset", "Devices to pass over.", 0, MAX_NUMBER, 0),
    Parameter("dev_type", "Only this type."),
    Parameter("model", "Only this model of GPU."),
    Parameter("addr", "Only this device, or the devices of the GPU at this address."),
    Parameter("device_path", "Only devices of the GPU with this UUID."),
    Parameter("vendor_device_id", "Only this kind of GPU, as vendor:device."),
    _number("numa_node", "Only GPUs at this NUMA node; -1: GPUs without one.", -1, MAX_NUMBER),
    _flag("unused", "Only devices that can be used now."),
    cached=True, watchable=True,
)  # fmt: skip
GET_DEVICE: Operation[answers.DeviceDetails] = Operation(
    "get_device", "GET", "/v1/devices/{id}", "One MPS device, and how to use it", "DeviceDetails",
    _DEVICE, refusals=(404,), cached=True,
)  # fmt: skip
GET_GPUS: Operation[answers.GpuList] = Operation(
    "get_gpus", "GET", "/v1/gpus", "All GPUs of the host", "GpuList"
)
GET_STATUS: Operation[answers.Status] = Operation(
    "get_status", "GET", "/v1/status", "The state of the daemon, the devices and the control daemons",
    "Status", cached=True,
)  # fmt: skip
GET_EVENTS: Operation[answers.EventList] = Operation(
    "get_events", "GET", "/v1/events", "What happened", "EventList",
    _number("after", "Only events with a higher id, the oldest first; `since` does not count then.",
            0, MAX_NUMBER),
    Parameter("since", "Only the newest from this time on: RFC 3339, or seconds since 1970.", "time", 0),
    _number("limit", "The most events.", 1, MAX_EVENTS, 100),
    Parameter("kind", "Only events of this kind.", choices=EVENT_KINDS),
    _number("wait_s", "If there are none, wait so many seconds for one, unless `after` is beyond the last.",
            0, MAX_EVENT_WAIT_S, 0),
    refusals=(409,),
)  # fmt: skip
GET_USAGE: Operation[answers.Usage] = Operation(
    "get_usage", "GET", "/v1/usage", "What was used in the last hour", "Usage",
    Parameter("gpu", "Only the GPU at this address, and its devices."),
    _flag("devices", "With false only GPUs, and none of their devices.", default=True),
)  # fmt: skip
GET_PLAN: Operation[answers.ChangeList] = Operation(
    "get_plan", "GET", "/v1/plan", "What a reload would change", "ChangeList",
    refusals=(409, 422), timeout_s=SLOW_S,
)  # fmt: skip
GET_CLIENTS: Operation[answers.ClientList] = Operation(
    "get_clients", "GET", "/v1/clients", "Who uses the GPUs through MPS", "ClientList",
    _flag("seen", "Only what the driver and the kernel see: no control daemon is asked."),
    refusals=(409,), timeout_s=SLOW_S,
)  # fmt: skip
RELOAD: Operation[answers.ChangeList] = Operation(
    "reload", "POST", "/v1/reload", "Read the configuration again, and bring into effect what differs",
    "ChangeList",
    Parameter("mode", "What is done about MPS servers that keep old limits: `drain` gives them no new "
              "clients, `now` ends them with their clients. By default they serve on until they have none.",
              choices=RELOAD_MODES),
    access=ROOT, refusals=(409, 422), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
REEXEC: Operation[answers.Reexec] = Operation(
    "reexec", "POST", "/v1/reexec", "Run the daemon's program again in its process", "Reexec",
    access=ROOT, refusals=(409,), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
TERMINATE_CLIENT: Operation[answers.Termination] = Operation(
    "terminate_client", "POST", "/v1/clients/{pid}/terminate",
    "End a client: its server lets go of it first", "Termination",
    _CLIENT,
    _flag("force", "End it by SIGKILL if nothing else helps."),
    access=OWNER, refusals=(404, 409), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
GET_LEASES: Operation[answers.LeaseList] = Operation(
    "get_leases", "GET", "/v1/leases", "Who has which devices, and which requests wait", "LeaseList"
)
GET_LEASE: Operation[answers.LeaseRecord] = Operation(
    "get_lease", "GET", "/v1/leases/{lease}", "One lease", "LeaseRecord", _LEASE, refusals=(404,)
)
_HOLDER = (
    Parameter("kind", "What ends the lease: a process (the default), a container's first process, this "
              "connection, or a name's time to live (the default if there is a name).", choices=BINDINGS),
    _number("pid", "Of kind `process` or `container`: another process of the caller's user.", 1, MAX_PID),
    Parameter("command", "The command line that the process is about to execute, for people."),
    Parameter("name", "Of kind `name`: the holder's name.", pattern=NAME, hint=_NAME_HINT),
    _number("ttl_s", "Of kind `name`: the time to live after each renewal, at most `max_lease_ttl_s`.",
            1, MAX_TTL_S),
)  # fmt: skip
TAKE_LEASE: Operation[answers.LeaseRecord] = Operation(
    "take_lease", "POST", "/v1/leases",
    "Take devices, for as long as a process, a connection or a name lives", "LeaseRecord",
    _number("count", "How many devices.", 1, MAX_DEVICES, 1),
    _flag("across", "Each on another GPU, and not all on one."),
    _number("memory_mib", "So much of a GPU that the configuration opens for it (memory_unit, or slices).",
            1, MAX_MIB),
    _number("memory_units", "The same, in units of `gpu_memory_unit`.", 1, MAX_MIB),
    Parameter("devices", "These very devices: ids, addresses, or unique beginnings of either; `all` for all "
              "of the host.", "array", minimum=1, maximum=MAX_DEVICES, pattern="^.+$", hint=_GIVE_ONE,
              example=("00:06.0-1",)),
    Parameter("gpu", "Devices of this GPU: UUID, address, or a unique beginning of either.",
              pattern="^.+$", hint=_GIVE_ONE, example="00:06.0"),
    Parameter("placement", "Of the GPU with the fewest free devices that will do, or with the most.",
              default=PLACEMENTS[0], choices=PLACEMENTS),
    _flag("enforced", "Only of GPUs that hold their clients to the budget: from Volta on."),
    _number("wait_s", "If nothing is free, wait so many seconds: first come, first served.",
            0, MAX_WAIT_S, 0),
    _flag("cdi", "Let container engines find it: device `yunion.io/mps=` and the lease's id."),
    _flag("dry_run", "Only say what would be given now."),
    Parameter("holder", "Who has the devices, and what ends the lease: by default the calling process.",
              "object", members=_HOLDER),
    headers=(
        Parameter("Idempotency-Key", "A random name. A request that is repeated with it gets the lease that "
                  "it was given, or its place in the queue.", pattern=IDEMPOTENCY_KEY,
                  hint="write 16 to 64 letters, digits and -, at random"),
    ),
    access=OWNER, refusals=(404, 409, 410, 423), creates=True,
)  # fmt: skip
END_LEASE: Operation[answers.LeaseRecord] = Operation(
    "end_lease", "DELETE", "/v1/leases/{lease}", "Give devices back", "LeaseRecord",
    _LEASE, access=OWNER, refusals=(404, 409),
)  # fmt: skip
RENEW_LEASE: Operation[answers.LeaseRecord] = Operation(
    "renew_lease", "POST", "/v1/leases/{lease}/renew",
    "Let a lease of a name live for its whole time from now", "LeaseRecord",
    _LEASE, access=OWNER, refusals=(404, 409),
)  # fmt: skip
BIND_LEASE: Operation[answers.LeaseRecord] = Operation(
    "bind_lease", "POST", "/v1/leases/{lease}/bind",
    "Let a lease end with a container; one of a name is only checked", "LeaseRecord",
    _LEASE,
    _number("pid", "The container's first process; the caller itself if it is left out.", 1, MAX_PID),
    access=OWNER, refusals=(404, 409),
)  # fmt: skip
GET_DOCUMENT: Operation[Any] = Operation(
    "get_document", "GET", "/v1/openapi.json", "This document", "", cached=True
)
GET_METRICS: Operation[str] = Operation(
    "get_metrics", "GET", "/metrics", "The metrics, for Prometheus", "",
    media_types=("text/plain", OPENMETRICS),
)  # fmt: skip
GET_HEALTH: Operation[str] = Operation(
    "get_health", "GET", "/healthz", "Whether the daemon answers: `ok`", "", media_types=("text/plain",)
)
GET_READINESS: Operation[str] = Operation(
    "get_readiness", "GET", "/readyz",
    "Whether devices can be leased, or MPS is disabled: `ok`, or 503 with a line for each reason", "",
    media_types=("text/plain",),
)  # fmt: skip

OPERATIONS: tuple[Operation[Any], ...] = tuple(
    one for one in tuple(globals().values()) if isinstance(one, Operation)
)
#: The operations of each path by their methods; HEAD is answered as GET is.
ROUTES: dict[str, dict[str, Operation[Any]]] = {}
for _operation in OPERATIONS:
    _methods = ROUTES.setdefault(_operation.path, {})
    _methods.update({method: _operation for method in ("GET", "HEAD") if _operation.method == "GET"})
    _methods[_operation.method] = _operation
