"""The table of the API's operations, each declared once: its parameters, its answer and its access.

The router, the checks of parameters, the OpenAPI document, the request counters and the client's calls are
derived from it. An operation's handler is the method of `Handlers` with its name, and its answer's schema
comes from the type of that name in answers/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from yunion_mps.core.enums import (
    BINDINGS,
    BINPACK,
    CLIENT_SIGNALS,
    EVENT_KINDS,
    OPENMETRICS,
    PLACEMENTS,
    RELOAD_MODES,
    RESERVATIONS,
    SIGNAL_TERM,
)
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
#: PID_MAX_LIMIT of the kernel (include/linux/threads.h).
MAX_PID = 4_194_304
#: The largest user id of Linux; the next number stands for none.
MAX_UID = (1 << 32) - 2
MAX_DEVICES_PER_LEASE = 64
#: More memory than any GPU has.
MAX_MIB = 1 << 30
#: How long a request may wait, in s.
MAX_WAIT_S = 30 * 86_400
#: What can be sent as a time to live, in s; host.conf says what is granted (`max_lease_ttl_s`).
MAX_TTL_S = 100_000 * 86_400
#: A holder's command line is cut to this many characters.
COMMAND_LENGTH = 100
#: Long enough for a Kubernetes claim's claim:NAMESPACE/NAME@UID (at most 63, 253 and 36 characters).
NAME_LENGTH = 360
#: The names of leases, those of containers, and idempotency keys (regular expressions). A container's name is
#: also a CDI device's, so it has neither the form of a device's address nor of an id.
NAME = f"^[A-Za-z0-9][A-Za-z0-9._:/@-]{{0,{NAME_LENGTH - 1}}}$"
CONTAINER_NAME = "(?=.{1,32}$)[a-z0-9]+(-[a-z0-9]+)*"
IDEMPOTENCY_KEY = "^[A-Za-z0-9-]{16,64}$"


def _number(name: str, description: str, minimum: int, maximum: int, default: int | None = None) -> Parameter:
    return Parameter(name, description, type="integer", default=default, minimum=minimum, maximum=maximum)


def _flag(name: str, description: str, *, default: bool = False) -> Parameter:
    return Parameter(name, description, type="boolean", default=default)


_DEVICE = Parameter(
    "id", "The device's id or address, or a unique prefix of either.", pattern="^.+$", example="00:06.0-1"
)
_CLIENT = Parameter("pid", "The client's PID.", type="integer", maximum=MAX_PID, example=4260)
_STARTED = Parameter(
    "started",
    "When the client started, as it was listed: another process that has its PID now is not terminated.",
    default="",
)
_LEASE = Parameter(
    "lease",
    "The lease's id, at least the first 8 characters of it, or the name of one of the caller's leases.",
    pattern="^.+$",
    example="7c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44",
)
_SIGNALS = Parameter(
    "signals",
    "Whether clients are sent only SIGTERM, then also SIGKILL, or nothing because the caller does it.",
    default=SIGNAL_TERM,
    choices=CLIENT_SIGNALS,
)
_NAME_HINT = f"write letters, digits and ._:/@-, a letter or digit first, at most {NAME_LENGTH}"
_GIVE_ONE = "omit it, or name one"

GET_DEVICES: Operation[answers.DeviceListJson] = Operation(
    name="get_devices",
    method="GET",
    path="/v1/devices",
    summary="List one page of the MPS devices",
    answer="DeviceList",
    parameters=(
        _number(
            "limit",
            "Maximum number of devices on a page; 0 returns all.",
            minimum=0,
            maximum=MAX_LIMIT,
            default=DEFAULT_LIMIT,
        ),
        _number("offset", "Number of devices to skip.", minimum=0, maximum=MAX_NUMBER, default=0),
        Parameter("dev_type", "Only devices of this type."),
        Parameter("model", "Only devices of GPUs of this model."),
        Parameter("addr", "Only this device, or the devices of the GPU at this address."),
        Parameter("device_path", "Only devices of the GPU with this UUID."),
        Parameter("vendor_device_id", "Only devices of GPUs with this PCI id, as vendor:device."),
        _number(
            "numa_node",
            "Only devices of GPUs on this NUMA node; -1: GPUs without one.",
            minimum=-1,
            maximum=MAX_NUMBER,
        ),
        _flag("unused", "Only devices that are free now."),
    ),
    cached=True,
    watchable=True,
)
GET_DEVICE: Operation[answers.DeviceDetailsJson] = Operation(
    name="get_device",
    method="GET",
    path="/v1/devices/{id}",
    summary="Get one MPS device, and the environment to use it",
    answer="DeviceDetails",
    parameters=(_DEVICE,),
    refusals=(404,),
    cached=True,
)
TERMINATE_DEVICE: Operation[answers.TerminationListJson] = Operation(
    name="terminate_device",
    method="POST",
    path="/v1/devices/{id}/terminate",
    summary="Disconnect a device's clients from their MPS server, then terminate them",
    answer="TerminationList",
    parameters=(
        _DEVICE,
        _SIGNALS,
    ),
    access=OWNER,
    refusals=(404, 409),
    uninterruptible=True,
    timeout_s=SLOW_S,
)
GET_GPUS: Operation[answers.GpuListJson] = Operation(
    name="get_gpus",
    method="GET",
    path="/v1/gpus",
    summary="List the GPUs of the host",
    answer="GpuList",
)
GET_POOLS: Operation[answers.PoolListJson] = Operation(
    name="get_pools",
    method="GET",
    path="/v1/pools",
    summary="List the GPUs whose memory is leased in units",
    answer="PoolList",
    cached=True,
    watchable=True,
)
GET_STATUS: Operation[answers.StatusJson] = Operation(
    name="get_status",
    method="GET",
    path="/v1/status",
    summary="Get the state of the daemon, the devices and the control daemons",
    answer="Status",
)
GET_EVENTS: Operation[answers.EventListJson] = Operation(
    name="get_events",
    method="GET",
    path="/v1/events",
    summary="List the events",
    answer="EventList",
    parameters=(
        _number(
            "after",
            "Only events with a higher id, oldest first, and those whose `count` has risen since because of "
            "a warning or an error; `since` is then ignored.",
            minimum=0,
            maximum=MAX_NUMBER,
        ),
        _number("before", "Only the newest events with a lower id.", minimum=1, maximum=MAX_NUMBER),
        Parameter("since", "Only the newest events since this RFC 3339 time.", type="time", default=0),
        _number("limit", "Maximum number of events.", minimum=1, maximum=MAX_EVENTS, default=100),
        Parameter("kind", "Only events of this kind.", choices=EVENT_KINDS),
        _flag(
            "severe_first",
            "Whether the list of the newest events is filled in the order of their `rank`: warnings and "
            "errors of the last day, or since `since`, before others. It is sorted by id all the same; "
            "`omitted` is how many of that time are left out. Ignored with `after`.",
        ),
        _number(
            "wait_s",
            "If no event matches, wait up to this many seconds for one. Ignored if `after` is "
            "above the last id.",
            minimum=0,
            maximum=MAX_EVENT_WAIT_S,
            default=0,
        ),
    ),
    refusals=(409,),
)
GET_USAGE: Operation[answers.UsageJson] = Operation(
    name="get_usage",
    method="GET",
    path="/v1/usage",
    summary="Get the usage of the last hour",
    answer="Usage",
    parameters=(
        Parameter("gpu", "Only the GPU at this address, and its devices."),
        _flag("devices", "Whether to include devices, or only GPUs.", default=True),
    ),
)
GET_PLAN: Operation[answers.ChangeListJson] = Operation(
    name="get_plan",
    method="GET",
    path="/v1/plan",
    summary="Show what a reload would change",
    answer="ChangeList",
    refusals=(409, 422),
    timeout_s=SLOW_S,
)
GET_CLIENTS: Operation[answers.ClientListJson] = Operation(
    name="get_clients",
    method="GET",
    path="/v1/clients",
    summary="List MPS clients and servers",
    answer="ClientList",
    parameters=(
        _flag(
            "seen",
            "Whether to list only what the driver and the kernel report, without asking the control daemons.",
        ),
    ),
    refusals=(409,),
    timeout_s=SLOW_S,
)
RELOAD: Operation[answers.ChangeListJson] = Operation(
    name="reload",
    method="POST",
    path="/v1/reload",
    summary="Read the configuration again, and apply the differences",
    answer="ChangeList",
    parameters=(
        Parameter(
            "mode",
            "What to do with MPS servers that still have old limits: `drain` admits no new "
            "clients; `now` ends them and their clients. By default, they run until they have no clients.",
            choices=RELOAD_MODES,
        ),
        Parameter(
            "confirmation",
            "For `now`: the `confirmation` of the plan whose losses are accepted. If more "
            "would be lost now, the reload is refused with the code `not_confirmed`; a server that gets "
            "another client meanwhile ends after its clients.",
        ),
    ),
    access=ROOT,
    refusals=(409, 422),
    uninterruptible=True,
    timeout_s=SLOW_S,
)
REEXEC: Operation[answers.ReexecJson] = Operation(
    name="reexec",
    method="POST",
    path="/v1/reexec",
    summary="Run the installed version of the daemon in the same process",
    answer="Reexec",
    access=ROOT,
    refusals=(409,),
    uninterruptible=True,
    timeout_s=SLOW_S,
)
TERMINATE_CLIENT: Operation[answers.TerminationJson] = Operation(
    name="terminate_client",
    method="POST",
    path="/v1/clients/{pid}/terminate",
    summary="Disconnect a client from its MPS server, then terminate it",
    answer="Termination",
    parameters=(
        _CLIENT,
        _SIGNALS,
        _STARTED,
    ),
    access=OWNER,
    refusals=(404, 409),
    uninterruptible=True,
    timeout_s=SLOW_S,
)
GET_LEASES: Operation[answers.LeaseListJson] = Operation(
    name="get_leases",
    method="GET",
    path="/v1/leases",
    summary="List the leases and the queued requests",
    answer="LeaseList",
)
GET_LEASE: Operation[answers.LeaseDetailsJson] = Operation(
    name="get_lease",
    method="GET",
    path="/v1/leases/{lease}",
    summary="Get one lease",
    answer="LeaseDetails",
    parameters=(_LEASE,),
    refusals=(404,),
)
#: The members of the `holder` of a request.
HOLDER = (
    Parameter(
        "kind",
        "What the lease is bound to: a process (the default), a container's first process, "
        "this connection, or a name with a time to live (the default with `name`).",
        choices=BINDINGS,
    ),
    _number(
        "pid",
        "For `process` and `container`: another process of the caller's user.",
        minimum=1,
        maximum=MAX_PID,
    ),
    Parameter("command", "The command line that the process is about to execute, for display only."),
    Parameter(
        "name",
        "For `name`: the holder's name. For `container` without `pid`, by root: a name for a "
        "container that is about to start, and for its CDI device.",
        pattern=NAME,
        hint=_NAME_HINT,
    ),
    _number(
        "ttl_s",
        "For `name`: the time to live after each renewal, at most `max_lease_ttl_s`; 0, by "
        "root: until it is released.",
        minimum=0,
        maximum=MAX_TTL_S,
    ),
    _number(
        "uid",
        "For `name` and `container`, by root: the user (uid) whose processes will use the "
        "devices. MPS serves one user at a time.",
        minimum=0,
        maximum=MAX_UID,
    ),
)
TAKE_LEASE: Operation[answers.LeaseRecordJson] = Operation(
    name="take_lease",
    method="POST",
    path="/v1/leases",
    summary="Lease devices to a process, a connection, a name or a container",
    answer="LeaseRecord",
    parameters=(
        _number("count", "The number of devices.", minimum=1, maximum=MAX_DEVICES_PER_LEASE, default=1),
        _flag("across", "Whether to take each device from a different GPU, instead of all from one GPU."),
        _number(
            "memory_mib",
            "The memory of each device, on a GPU that is divided by `memory_unit` or `slices`.",
            minimum=1,
            maximum=MAX_MIB,
        ),
        _number(
            "memory_units", "Like `memory_mib`, in units of `gpu_memory_unit`.", minimum=1, maximum=MAX_MIB
        ),
        _number(
            "thread_percentage",
            "With an amount of memory: the percentage of the SM threads of each device, "
            "on a GPU whose entry has `thread_percentage`; of a slice, at least this.",
            minimum=1,
            maximum=100,
        ),
        Parameter(
            "devices",
            "Exactly these devices: ids, addresses, or unique prefixes of either; `all`: all "
            "devices of the host.",
            type="array",
            minimum=1,
            maximum=MAX_DEVICES_PER_LEASE,
            pattern="^.+$",
            hint=_GIVE_ONE,
            example=("00:06.0-1",),
        ),
        Parameter(
            "gpu",
            "Only devices of this GPU: its UUID or address, or a unique prefix of either.",
            pattern="^.+$",
            hint=_GIVE_ONE,
            example="00:06.0",
        ),
        Parameter(
            "placement",
            "`binpack` prefers the GPU with the most memory leased, as a share of its total, "
            "`spread` the one with the least.",
            default=BINPACK,
            choices=PLACEMENTS,
        ),
        _flag("allow_unlimited", "Also GPUs that do not enforce budgets (time-sliced, or older than Volta)."),
        Parameter(
            "reserved_for",
            "Also devices that are reserved for this; only root may request them.",
            choices=RESERVATIONS,
        ),
        _number(
            "wait_s",
            "If no suitable device is free, wait in the queue for up to this many seconds.",
            minimum=0,
            maximum=MAX_WAIT_S,
            default=0,
        ),
        _flag("cdi", "Publish the lease as the CDI device `yunion.io/mps=ID`."),
        _flag("dry_run", "Whether to only show what would be leased now."),
        Parameter(
            "holder",
            "Who holds the lease, and what ends it; by default, the calling process.",
            type="object",
            members=HOLDER,
        ),
    ),
    headers=(
        Parameter(
            "Idempotency-Key",
            "A random string that identifies the request: a repetition returns the "
            "same lease, or keeps the same position in the queue.",
            pattern=IDEMPOTENCY_KEY,
            hint="write 16 to 64 random characters: letters, digits and -",
        ),
    ),
    access=OWNER,
    refusals=(404, 409, 410, 423),
    creates=True,
)
END_LEASE: Operation[answers.LeaseRecordJson] = Operation(
    name="end_lease",
    method="DELETE",
    path="/v1/leases/{lease}",
    summary="Release a lease",
    answer="LeaseRecord",
    parameters=(
        _LEASE,
        _flag("terminate", "Whether to terminate its clients first, with SIGKILL if nothing else ends them."),
    ),
    access=OWNER,
    refusals=(404, 409),
    uninterruptible=True,
    timeout_s=SLOW_S,
)
RENEW_LEASE: Operation[answers.LeaseRecordJson] = Operation(
    name="renew_lease",
    method="POST",
    path="/v1/leases/{lease}/renew",
    summary="Renew a lease that was taken by name",
    answer="LeaseRecord",
    parameters=(_LEASE,),
    access=OWNER,
    refusals=(404, 409),
)
TERMINATE_LEASE: Operation[answers.TerminationListJson] = Operation(
    name="terminate_lease",
    method="POST",
    path="/v1/leases/{lease}/terminate",
    summary="Disconnect a lease's clients from their MPS server, then terminate them",
    answer="TerminationList",
    parameters=(
        _LEASE,
        _SIGNALS,
    ),
    access=OWNER,
    refusals=(404, 409),
    uninterruptible=True,
    timeout_s=SLOW_S,
)
BIND_LEASE: Operation[answers.LeaseRecordJson] = Operation(
    name="bind_lease",
    method="POST",
    path="/v1/leases/{lease}/bind",
    summary="Bind a lease to a container; a lease that was taken by name is only checked",
    answer="LeaseRecord",
    parameters=(
        _LEASE,
        _number("pid", "The container's first process; by default, the caller.", minimum=1, maximum=MAX_PID),
    ),
    access=OWNER,
    refusals=(404, 409),
)
GET_DOCUMENT: Operation[Any] = Operation(
    name="get_document",
    method="GET",
    path="/v1/openapi.json",
    summary="Get this document",
    answer="",
    cached=True,
)
GET_METRICS: Operation[str] = Operation(
    name="get_metrics",
    method="GET",
    path="/metrics",
    summary="Get the metrics, for Prometheus",
    answer="",
    media_types=("text/plain", OPENMETRICS),
)
GET_HEALTH: Operation[str] = Operation(
    name="get_health",
    method="GET",
    path="/healthz",
    summary="Check that the daemon is alive",
    answer="",
    media_types=("text/plain",),
)
GET_READINESS: Operation[str] = Operation(
    name="get_readiness",
    method="GET",
    path="/readyz",
    summary="Check whether devices can be leased or MPS is disabled: "
    "`ok`, or 503 with one line for each reason",
    answer="",
    media_types=("text/plain",),
)


def _operations() -> tuple[Operation[Any], ...]:
    return tuple(value for value in globals().values() if isinstance(value, Operation))


#: All operations, in the order in which they are declared above.
OPERATIONS = _operations()


def _routes() -> dict[str, dict[str, Operation[Any]]]:
    routes: dict[str, dict[str, Operation[Any]]] = {}
    for operation in OPERATIONS:
        methods = routes.setdefault(operation.path, {})
        methods[operation.method] = operation
        if operation.method == "GET":
            methods["HEAD"] = operation
    return routes


#: The operations of each path by their methods; HEAD is answered as GET is.
ROUTES = _routes()
