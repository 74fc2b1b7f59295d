"""The table of the API's operations, each declared once: its parameters, its answer and its access.

The router, the checks of parameters, the OpenAPI document, the request counters and the client's calls are
derived from it. GET has its parameters in the query, POST in a JSON body. An operation's handler is the
method of `Handlers` with its name, and its answer's schema comes from the type of that name in answers/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from yunion_mps.enums import (
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
from yunion_mps.http.parameters import Parameter, Value, body_arguments, query_arguments

if TYPE_CHECKING:
    from yunion_mps import answers

T = TypeVar("T")

MAX_CHANGE_WAIT_S = 600

#: How long a client waits for an answer, in s; longer if it needs the driver, because waking many GPUs takes
#: tens of seconds, and a hanging call is abandoned after 60.
TIMEOUT_S = 30.0
SLOW_S = 150.0

#: Who has access: every user that can connect; the owner and root (`service.permissions`); only root.
ANYONE, OWNER, ROOT = "anyone", "owner", "root"


class EncodedRequest(NamedTuple):
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Operation(Generic[T]):
    def __init__(
        self,
        name: str,
        method: str,
        path: str,
        summary: str,
        answer: str,
        *parameters: Parameter,
        headers: tuple[Parameter, ...] = (),
        access: str = ANYONE,
        refusals: tuple[int, ...] = (),
        cached: bool = False,
        uninterruptible: bool = False,
        media_types: tuple[str, ...] = (),
        watchable: bool = False,
        creates: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`answer` is the name of T, empty if it is not a type of answers/, such as text.

        `refusals` are the statuses that are specific to this operation. A `cached` answer is made from the
        snapshot without waiting, and reused until the snapshot changes; others may wait, up to the parameter
        `wait_s` if there is one. An `uninterruptible` operation is finished even if the caller disconnects.
        If it `creates` something, it answers 201 with the `Location`, or 200 if that exists already. A
        `watchable` answer has an `ETag`, with which a caller can wait for a change. `media_types` are set
        only for an answer that is not JSON.
        """
        self.name = name
        self.method = method
        self.path = path
        self.summary = summary
        self.answer = answer
        self.path_parameters = tuple(parameter for parameter in parameters if f"{{{parameter.name}}}" in path)
        rest = tuple(parameter for parameter in parameters if parameter not in self.path_parameters)
        self.has_body = method == "POST"
        self.query_parameters = () if self.has_body else rest
        self.members = rest if self.has_body else ()
        self.headers = headers
        self.access = access
        self.refusals = refusals if access == ANYONE else (403, *refusals)
        self.cached = cached
        self.uninterruptible = uninterruptible
        self.media_types = media_types
        self.watchable = watchable
        if watchable:
            self.query_parameters += WATCH_PARAMETERS[:1]
            self.headers += WATCH_PARAMETERS[1:]
        self.creates = creates
        self.timeout_s = timeout_s

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.path_parameters + self.query_parameters + self.headers + self.members

    def arguments(self, query: str, headers: Mapping[str, str], body: bytes) -> dict[str, Value]:
        """The value of every parameter except the path's, from lower-case headers; raises BadRequestError."""
        arguments = query_arguments(query, self.query_parameters)
        for parameter in self.headers:
            text = headers.get(parameter.name.lower())
            arguments[parameter.argument] = parameter.default if text is None else parameter.value(text)
        if self.has_body:
            arguments.update(body_arguments(body, headers.get("content-type", ""), self.members))
        return arguments

    def encode(self, arguments: Mapping[str, Value]) -> EncodedRequest:
        """Encode the request; arguments that are None are left out."""
        given = {name: value for name, value in arguments.items() if value is not None}
        unknown = set(given) - {parameter.argument for parameter in self.parameters}
        if unknown:
            raise TypeError(f"{self.name} has no parameter {', '.join(sorted(unknown))}")
        path = self.path
        for parameter in self.path_parameters:
            path = path.replace(f"{{{parameter.name}}}", _text(given[parameter.name]))
        query = [
            f"{parameter.name}={_text(given[parameter.name])}"
            for parameter in self.query_parameters
            if parameter.name in given
        ]
        headers = [
            (header.name, str(given[header.argument])) for header in self.headers if header.argument in given
        ]
        body = {
            member.name: _without_none(given[member.name]) for member in self.members if member.name in given
        }
        if body:
            headers.append(("Content-Type", "application/json"))
        return EncodedRequest(
            f"{path}?{'&'.join(query)}" if query else path,
            tuple(headers),
            json.dumps(body).encode() if body else b"",
        )


#: The parameters of a watchable operation: one of the query, and a header.
WATCH_PARAMETERS = (
    Parameter("wait_s", "If the response still matches `If-None-Match`, wait this many seconds for a change.",
              "integer", 0, 0, MAX_CHANGE_WAIT_S),
    Parameter("If-None-Match", "The `ETag` of the response that the caller has; 304 if nothing has changed.",
              example='"3f8a6c0d51b7e294"'),
)  # fmt: skip


def _without_none(value: Value) -> Value:
    if not isinstance(value, Mapping):
        return value
    return {name: member for name, member in value.items() if member is not None}


def _text(value: Value) -> str:
    return _quote(str(value).lower() if isinstance(value, bool) else str(value))


def _quote(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._~-]*", text):
        return text
    from urllib.parse import quote  # 2 ms, which a plain `run` need not pay

    return quote(text, safe="", errors="surrogateescape")  # an argument need not be UTF-8


# -- the table

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
    return Parameter(name, description, "integer", default, minimum, maximum)


def _flag(name: str, description: str, *, default: bool = False) -> Parameter:
    return Parameter(name, description, "boolean", default)


_DEVICE = Parameter(
    "id", "The device's id or address, or a unique prefix of either.", pattern="^.+$", example="00:06.0-1"
)
_CLIENT = Parameter("pid", "The client's PID.", "integer", maximum=MAX_PID, example=4260)
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

GET_DEVICES: Operation[answers.DeviceList] = Operation(
    "get_devices", "GET", "/v1/devices", "List one page of the MPS devices", "DeviceList",
    _number("limit", "Maximum number of devices on a page; 0 returns all.", 0, MAX_LIMIT, DEFAULT_LIMIT),
    _number("offset", "Number of devices to skip.", 0, MAX_NUMBER, 0),
    Parameter("dev_type", "Only devices of this type."),
    Parameter("model", "Only devices of GPUs of this model."),
    Parameter("addr", "Only this device, or the devices of the GPU at this address."),
    Parameter("device_path", "Only devices of the GPU with this UUID."),
    Parameter("vendor_device_id", "Only devices of GPUs with this PCI id, as vendor:device."),
    _number("numa_node", "Only devices of GPUs on this NUMA node; -1: GPUs without one.", -1, MAX_NUMBER),
    _flag("unused", "Only devices that are free now."),
    cached=True, watchable=True,
)  # fmt: skip
GET_DEVICE: Operation[answers.DeviceDetails] = Operation(
    "get_device", "GET", "/v1/devices/{id}", "Get one MPS device, and the environment to use it",
    "DeviceDetails", _DEVICE, refusals=(404,), cached=True,
)  # fmt: skip
TERMINATE_DEVICE: Operation[answers.TerminationList] = Operation(
    "terminate_device", "POST", "/v1/devices/{id}/terminate",
    "Disconnect a device's clients from their MPS server, then terminate them", "TerminationList",
    _DEVICE, _SIGNALS, access=OWNER, refusals=(404, 409), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
GET_GPUS: Operation[answers.GpuList] = Operation(
    "get_gpus", "GET", "/v1/gpus", "List the GPUs of the host", "GpuList"
)
GET_POOLS: Operation[answers.PoolList] = Operation(
    "get_pools", "GET", "/v1/pools", "List the GPUs whose memory is leased in units", "PoolList",
    cached=True, watchable=True,
)  # fmt: skip
GET_STATUS: Operation[answers.Status] = Operation(
    "get_status", "GET", "/v1/status", "Get the state of the daemon, the devices and the control daemons",
    "Status",
)  # fmt: skip
GET_EVENTS: Operation[answers.EventList] = Operation(
    "get_events", "GET", "/v1/events", "List the events", "EventList",
    _number("after", "Only events with a higher id, oldest first; `since` is then ignored.",
            0, MAX_NUMBER),
    _number("before", "Only the newest events with a lower id.", 1, MAX_NUMBER),
    Parameter("since", "Only the newest events since this RFC 3339 time.", "time", 0),
    _number("limit", "Maximum number of events.", 1, MAX_EVENTS, 100),
    Parameter("kind", "Only events of this kind.", choices=EVENT_KINDS),
    _flag("severe_first", "Whether warnings and errors of the last day, or since `since`, fill the list of "
          "the newest events before others. It is in order all the same; `omitted` is how many of that time "
          "are left out. Ignored with `after`."),
    _number("wait_s", "If no event matches, wait up to this many seconds for one. Ignored if `after` is "
            "above the last id.", 0, MAX_EVENT_WAIT_S, 0),
    refusals=(409,),
)  # fmt: skip
GET_USAGE: Operation[answers.Usage] = Operation(
    "get_usage", "GET", "/v1/usage", "Get the usage of the last hour", "Usage",
    Parameter("gpu", "Only the GPU at this address, and its devices."),
    _flag("devices", "Whether to include devices, or only GPUs.", default=True),
)  # fmt: skip
GET_PLAN: Operation[answers.ChangeList] = Operation(
    "get_plan", "GET", "/v1/plan", "Show what a reload would change", "ChangeList",
    refusals=(409, 422), timeout_s=SLOW_S,
)  # fmt: skip
GET_CLIENTS: Operation[answers.ClientList] = Operation(
    "get_clients", "GET", "/v1/clients", "List MPS clients and servers", "ClientList",
    _flag("seen", "Whether to list only what the driver and the kernel report, without asking the control "
          "daemons."),
    refusals=(409,), timeout_s=SLOW_S,
)  # fmt: skip
RELOAD: Operation[answers.ChangeList] = Operation(
    "reload", "POST", "/v1/reload", "Read the configuration again, and apply the differences",
    "ChangeList",
    Parameter("mode", "What to do with MPS servers that still have old limits: `drain` admits no new "
              "clients; `now` ends them and their clients. By default, they run until they have no clients.",
              choices=RELOAD_MODES),
    Parameter("confirmation", "For `now`: the `confirmation` of the plan whose losses are accepted. If more "
              "would be lost now, the reload is refused with the code `not_confirmed`; a server that gets "
              "another client meanwhile ends after its clients."),
    access=ROOT, refusals=(409, 422), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
REEXEC: Operation[answers.Reexec] = Operation(
    "reexec", "POST", "/v1/reexec", "Run the installed version of the daemon in the same process", "Reexec",
    access=ROOT, refusals=(409,), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
TERMINATE_CLIENT: Operation[answers.Termination] = Operation(
    "terminate_client", "POST", "/v1/clients/{pid}/terminate",
    "Disconnect a client from its MPS server, then terminate it", "Termination",
    _CLIENT, _SIGNALS, access=OWNER, refusals=(404, 409), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
GET_LEASES: Operation[answers.LeaseList] = Operation(
    "get_leases", "GET", "/v1/leases", "List the leases and the queued requests", "LeaseList"
)
GET_LEASE: Operation[answers.LeaseDetails] = Operation(
    "get_lease", "GET", "/v1/leases/{lease}", "Get one lease", "LeaseDetails", _LEASE, refusals=(404,)
)
#: The members of the `holder` of a request.
HOLDER = (
    Parameter("kind", "What the lease is bound to: a process (the default), a container's first process, "
              "this connection, or a name with a time to live (the default with `name`).", choices=BINDINGS),
    _number("pid", "For `process` and `container`: another process of the caller's user.", 1, MAX_PID),
    Parameter("command", "The command line that the process is about to execute, for display only."),
    Parameter("name", "For `name`: the holder's name. For `container` without `pid`, by root: a name for a "
              "container that is about to start, and for its CDI device.", pattern=NAME, hint=_NAME_HINT),
    _number("ttl_s", "For `name`: the time to live after each renewal, at most `max_lease_ttl_s`; 0, by "
            "root: until it is released.", 0, MAX_TTL_S),
    _number("uid", "For `name` and `container`, by root: the user (uid) whose processes will use the "
            "devices. MPS serves one user at a time.", 0, MAX_UID),
)  # fmt: skip
TAKE_LEASE: Operation[answers.LeaseRecord] = Operation(
    "take_lease", "POST", "/v1/leases",
    "Lease devices to a process, a connection, a name or a container", "LeaseRecord",
    _number("count", "The number of devices.", 1, MAX_DEVICES_PER_LEASE, 1),
    _flag("across", "Whether to take each device from a different GPU, instead of all from one GPU."),
    _number("memory_mib", "The memory of each device, on a GPU that is divided by `memory_unit` or `slices`.",
            1, MAX_MIB),
    _number("memory_units", "Like `memory_mib`, in units of `gpu_memory_unit`.", 1, MAX_MIB),
    _number("thread_percentage", "With an amount of memory: the percentage of the SM threads of each device, "
            "on a GPU whose entry has `thread_percentage`; of a slice, at least this.", 1, 100),
    Parameter("devices", "Exactly these devices: ids, addresses, or unique prefixes of either; `all`: all "
              "devices of the host.", "array", minimum=1, maximum=MAX_DEVICES_PER_LEASE, pattern="^.+$",
              hint=_GIVE_ONE, example=("00:06.0-1",)),
    Parameter("gpu", "Only devices of this GPU: its UUID or address, or a unique prefix of either.",
              pattern="^.+$", hint=_GIVE_ONE, example="00:06.0"),
    Parameter("placement", "`binpack` prefers the GPU with the most memory leased, as a share of its total, "
              "`spread` the one with the least.", default=BINPACK, choices=PLACEMENTS),
    _flag("allow_unlimited", "Also GPUs that do not enforce budgets (time-sliced, or older than Volta)."),
    Parameter("reserved_for", "Also devices that are reserved for this; only root may request them.",
              choices=RESERVATIONS),
    _number("wait_s", "If no suitable device is free, wait in the queue for up to this many seconds.",
            0, MAX_WAIT_S, 0),
    _flag("cdi", "Publish the lease as the CDI device `yunion.io/mps=ID`."),
    _flag("dry_run", "Whether to only show what would be leased now."),
    Parameter("holder", "Who holds the lease, and what ends it; by default, the calling process.",
              "object", members=HOLDER),
    headers=(
        Parameter("Idempotency-Key", "A random string that identifies the request: a repetition returns the "
                  "same lease, or keeps the same position in the queue.", pattern=IDEMPOTENCY_KEY,
                  hint="write 16 to 64 random characters: letters, digits and -"),
    ),
    access=OWNER, refusals=(404, 409, 410, 423), creates=True,
)  # fmt: skip
END_LEASE: Operation[answers.LeaseRecord] = Operation(
    "end_lease", "DELETE", "/v1/leases/{lease}", "Release a lease", "LeaseRecord",
    _LEASE,
    _flag("terminate", "Whether to terminate its clients first, with SIGKILL if nothing else ends them."),
    access=OWNER, refusals=(404, 409), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
RENEW_LEASE: Operation[answers.LeaseRecord] = Operation(
    "renew_lease", "POST", "/v1/leases/{lease}/renew",
    "Renew a lease that was taken by name", "LeaseRecord",
    _LEASE, access=OWNER, refusals=(404, 409),
)  # fmt: skip
TERMINATE_LEASE: Operation[answers.TerminationList] = Operation(
    "terminate_lease", "POST", "/v1/leases/{lease}/terminate",
    "Disconnect a lease's clients from their MPS server, then terminate them", "TerminationList",
    _LEASE, _SIGNALS, access=OWNER, refusals=(404, 409), uninterruptible=True, timeout_s=SLOW_S,
)  # fmt: skip
BIND_LEASE: Operation[answers.LeaseRecord] = Operation(
    "bind_lease", "POST", "/v1/leases/{lease}/bind",
    "Bind a lease to a container; a lease that was taken by name is only checked", "LeaseRecord",
    _LEASE,
    _number("pid", "The container's first process; by default, the caller.", 1, MAX_PID),
    access=OWNER, refusals=(404, 409),
)  # fmt: skip
GET_DOCUMENT: Operation[Any] = Operation(
    "get_document", "GET", "/v1/openapi.json", "Get this document", "", cached=True
)
GET_METRICS: Operation[str] = Operation(
    "get_metrics", "GET", "/metrics", "Get the metrics, for Prometheus", "",
    media_types=("text/plain", OPENMETRICS),
)  # fmt: skip
GET_HEALTH: Operation[str] = Operation(
    "get_health", "GET", "/healthz", "Check that the daemon is alive", "", media_types=("text/plain",)
)
GET_READINESS: Operation[str] = Operation(
    "get_readiness", "GET", "/readyz",
    "Check whether devices can be leased or MPS is disabled: `ok`, or 503 with one line for each reason", "",
    media_types=("text/plain",),
)  # fmt: skip

OPERATIONS: tuple[Operation[Any], ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Operation)
)
#: The operations of each path by their methods; HEAD is answered as GET is.
ROUTES: dict[str, dict[str, Operation[Any]]] = {}
for _operation in OPERATIONS:
    _methods = ROUTES.setdefault(_operation.path, {})
    _methods.update({method: _operation for method in ("GET", "HEAD") if _operation.method == "GET"})
    _methods[_operation.method] = _operation
