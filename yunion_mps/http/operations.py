"""The table of the API's operations, each declared once: its parameters, its answer and its access.

The router, the checks of parameters, the OpenAPI document, the request counters and the client's calls are
derived from it. GET has its parameters in the query, POST in a JSON body. An operation's handler is the
method of `Handlers` with its name, and its answer's schema comes from the type of that name in answers.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from yunion_mps.errors import (
    BusyError,
    ConfigError,
    InfeasibleError,
    NotAllowedError,
    NotFoundError,
    NothingFreeError,
    YunionError,
)
from yunion_mps.http.parameters import (
    BadRequestError,
    MediaTypeError,
    Parameter,
    Value,
    body_arguments,
    query_arguments,
)
from yunion_mps.reasons import INVALID_REQUEST

if TYPE_CHECKING:
    from yunion_mps import answers

T = TypeVar("T")

MAX_NUMBER = (1 << 31) - 1
#: No host has more devices; an answer is never larger than this many of them.
MAX_LIMIT = 100_000
#: The default page size of the listing, as in Cloudpods.
DEFAULT_LIMIT = 20
MAX_EVENTS = 1000
MAX_EVENT_WAIT_S = 60
MAX_CHANGE_WAIT_S = 600
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

EVENT_KINDS = ("domain", "limit", "gpu", "compute_mode", "configuration", "client", "lease", "daemon")
SEVERITIES = ("info", "warning", "error")
PLACEMENTS = ("binpack", "spread")
RELOAD_MODES = ("drain", "now")
BINDINGS = ("process", "connection", "name", "container")

#: How long a client waits for an answer, in s, and for one that needs the driver: waking many GPUs takes
#: tens of seconds, and a call that hangs is abandoned after 60.
TIMEOUT_S = 30.0
SLOW_S = 150.0

#: The format of metrics that Prometheus asks for; others get text.
OPENMETRICS = "application/openmetrics-text"

#: Who has access: every user that can connect; the owner and root, which the handler checks; only root.
ANYONE, OWNER, ROOT = "anyone", "owner", "root"


class ConflictingParametersError(YunionError):
    """Each parameter is valid, but they cannot be combined."""

    exit_code = 2
    code = INVALID_REQUEST


#: The status of each class of errors, subclasses first; 409 for all others.
STATUSES: dict[type[YunionError], int] = {
    MediaTypeError: 415,
    BadRequestError: 400,
    NotAllowedError: 403,
    NotFoundError: 404,
    ConfigError: 422,
    InfeasibleError: 410,
    NothingFreeError: 423,
    BusyError: 503,
}


class EncodedRequest(NamedTuple):
    """The target, headers and body of a request."""

    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Operation(Generic[T]):
    """One method of one path, whose answer is a T."""

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
        """`answer` is the name of T, empty if it is not a type of answers.py, such as text.

        `refusals` are the statuses that are specific to this operation. A `cached` answer is made from the
        snapshot without waiting, and reused until the snapshot changes; others may wait, up to the parameter
        `wait_s` if there is one. An `uninterruptible` operation is finished even if the caller disconnects.
        One that `creates` something answers 201 with its `Location`, or 200 if it exists already. A
        `watchable` answer has an `ETag`, with which a caller can wait for a change. `media_types` are those
        of an answer that is not JSON.
        """
        self.name = name
        self.method = method
        self.path = path
        self.summary = summary
        self.answer = answer
        self.path_parameters = tuple(one for one in parameters if f"{{{one.name}}}" in path)
        others = tuple(one for one in parameters if one not in self.path_parameters)
        self.has_body = method == "POST"
        self.query_parameters = () if self.has_body else others
        self.members = others if self.has_body else ()
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
        """The parameters of the path, the query, the headers and the body."""
        return self.path_parameters + self.query_parameters + self.headers + self.members

    def arguments(self, query: str, headers: Mapping[str, str], body: bytes) -> dict[str, Value]:
        """The value of every parameter except the path's, from lower-case headers; raises BadRequestError."""
        found = query_arguments(query, self.query_parameters)
        for one in self.headers:
            text = headers.get(one.name.lower())
            found[one.argument] = one.default if text is None else one.value(text)
        if self.has_body:
            found.update(body_arguments(body, headers.get("content-type", ""), self.members))
        return found

    def encode(self, arguments: Mapping[str, Value]) -> EncodedRequest:
        """The request with these arguments; those that are None are left out."""
        given = {name: value for name, value in arguments.items() if value is not None}
        unknown = set(given) - {one.argument for one in self.parameters}
        if unknown:
            raise TypeError(f"{self.name} has no parameter {', '.join(sorted(unknown))}")
        path = self.path
        for one in self.path_parameters:
            path = path.replace(f"{{{one.name}}}", _text(given[one.name]))
        query = [f"{one.name}={_text(given[one.name])}" for one in self.query_parameters if one.name in given]
        headers = [(one.name, str(given[one.argument])) for one in self.headers if one.argument in given]
        body = {one.name: _without_none(given[one.name]) for one in self.members if one.name in given}
        if body:
            headers.append(("Content-Type", "application/json"))
        return EncodedRequest(
            f"{path}?{'&'.join(query)}" if query else path,
            tuple(headers),
            json.dumps(body).encode() if body else b"",
        )


#: The parameters of a watchable operation: one of the query, and a header.
WATCH_PARAMETERS = (
    Parameter("wait_s", "If the answer is what `If-None-Match` names, wait so many seconds for another.",
              "integer", 0, 0, MAX_CHANGE_WAIT_S),
    Parameter("If-None-Match", "The `ETag` of the answer that the caller has: 304 if nothing has changed.",
              example='"3f8a6c0d51b7e294"'),
)  # fmt: skip


def _without_none(value: Value) -> Value:
    if not isinstance(value, Mapping):
        return value
    return {name: one for name, one in value.items() if one is not None}


def _text(value: Value) -> str:
    return _quoted(str(value).lower() if isinstance(value, bool) else str(value))


def _quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._~-]*", text):
        return text
    from urllib.parse import quote  # 2 ms, which a plain `run` need not pay

    return quote(text, safe="", errors="surrogateescape")  # an argument need not be UTF-8


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
