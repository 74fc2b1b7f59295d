"""The API's OpenAPI 3.1 document, which the daemon serves at /v1/openapi.json."""

from __future__ import annotations

import json
import os
from typing import Any

from yunion_mps import __version__
from yunion_mps.http.deferred import LATEST_S, LONGEST_EVENT_WAIT_S, MOST_EVENTS
from yunion_mps.http.leases import BINDINGS, PLACEMENTS
from yunion_mps.http.query import LARGEST_NUMBER, OPENMETRICS
from yunion_mps.http.routes import LARGEST_LIMIT
from yunion_mps.leases.bounds import LONGEST_TTL_S, LONGEST_WAIT_S, MOST_DEVICES, MOST_MIB, NAME, REQUEST
from yunion_mps.service.queries import DEFAULT_LIMIT, EVENT_KINDS

Schema = dict[str, Any]

#: Made by scripts/schemas; read now, because after an upgrade it would be another program's.
with open(os.path.join(os.path.dirname(__file__), "schemas.json"), encoding="utf-8") as _file:
    _SCHEMAS = _file.read()

_PROBLEMS = {
    400: "The request, or one of its parameters, is not as described.",
    403: "The caller's user may not do this.",
    404: "There is no such thing, or more than one.",
    405: "The path takes other methods; `Allow` says which.",
    408: "The request did not arrive in time.",
    409: "It was refused, or did not work; nothing was changed.",
    413: "The request's body is too large.",
    422: "The configuration is not right, and nothing was changed; `detail` holds one problem a line.",
    410: "It could not be met even if everything were free (`code`: `infeasible`): do not wait.",
    423: "Nothing is free that would do; `detail` says what there is.",
    431: "The request's head is too large.",
    501: "The request's body is in a transfer coding other than `chunked`.",
    503: "Too many connections are open, or it cannot be done at this moment; try again.",
}
#: What any request may meet.
_ANY_REQUEST = (400, 408, 413, 431, 501, 503)

_ABOUT = """\
The GPUs of one host, divided by NVIDIA MPS into devices with a budget of memory and SM threads.

The API is served on the Unix socket /run/yunion-mps/yunion-mps.sock; root and the members of the group
yunion-mps may ask:

    curl --unix-socket /run/yunion-mps/yunion-mps.sock http://localhost/v1/devices

Memory is in MiB, percentages are of a GPU's SM threads. Every error is a problem detail (RFC 9457), with a
`hint` where there is something to do about it. What is at none of these paths is answered with 404, any
method other than those described with 405, and a parameter that is not described with 400.

What can be read, all of these users may read, and all may take devices. Only root may change the daemon,
and only root and its owner end a client or a lease. What a POST to change the daemon has begun is finished,
though whoever asked for it may go away meanwhile; a request for devices ends with its connection."""


def document() -> Schema:
    """The document; true to `routes` and `service`, which the tests hold it to."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "yunion-mps",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost", "description": "Any host name does: it is a Unix socket."}],
        "paths": _paths(),
        "components": {
            "schemas": json.loads(_SCHEMAS),
            "responses": {str(status): _problem(status, why) for status, why in _PROBLEMS.items()},
        },
    }


def _paths() -> Schema:
    device = {
        "name": "id",
        "in": "path",
        "required": True,
        "description": "Its id, its address, or a unique beginning of either.",
        "schema": {"type": "string", "minLength": 1},
        "example": "00:06.0-1",
    }
    client = {
        "name": "pid",
        "in": "path",
        "required": True,
        "description": "The client's PID.",
        "schema": {"type": "integer", "minimum": 0, "maximum": 9_999_999_999},
        "example": 4260,
    }
    lease = {
        "name": "lease",
        "in": "path",
        "required": True,
        "description": "The lease's id, its first 8 or more characters, or the name of the caller's lease.",
        "schema": {"type": "string", "minLength": 1},
        "example": "7c1f0e7a-8a52-4f0e-8b5e-3f9d2a6c1b44",
    }
    late = (409,)
    return {
        "/v1/devices": _read("Devices", "One page of the MPS devices", "DeviceList", (), _filters()),
        "/v1/devices/{id}": _read(
            "Device", "One MPS device, and how to use it", "DeviceDetails", (404,), [device]
        ),
        "/v1/gpus": _read("Gpus", "All GPUs of the host", "GpuList"),
        "/v1/status": _read("Status", "How all is", "Status"),
        "/v1/events": _read("Events", "What happened", "EventList", late, _which_events()),
        "/v1/usage": _read("Usage", "What was used in the last hour", "Usage", (), _which_usage()),
        "/v1/plan": _read("Plan", "What a reload would change", "ChangeList", (*late, 422)),
        "/v1/clients": _read(
            "Clients",
            "Who uses the GPUs through MPS",
            "ClientList",
            late,
            [_switch("seen", "Only tell what the driver and the kernel see: no control daemon is asked.")],
        ),
        "/v1/reload": _change(
            "reload",
            "Read the configuration again, and bring into force what differs",
            "ChangeList",
            (403, *late, 422),
            [
                _switch("drain", "Give MPS servers that keep old limits no new clients."),
                _switch("now", "End MPS servers that keep old limits, with their clients."),
            ],
        ),
        "/v1/reexec": _change("reexec", "Run the daemon's program anew", "Reexec", (403, *late)),
        "/v1/clients/{pid}/terminate": _change(
            "terminateClient",
            "End a client: its server lets go of it first",
            "Termination",
            (403, 404, *late),
            [client, _switch("force", "End it by SIGKILL where nothing else helps.")],
        ),
        "/v1/leases": {
            **_read("Leases", "Who has which devices, and who waits", "LeaseList"),
            "post": {
                **_operation(
                    "takeLease",
                    "Take devices, for as long as a process, a connection or a name lives",
                    "LeaseRecord",
                    (403, 404, 410, *late, 423),
                ),
                "parameters": _lease_request(),
            },
        },
        "/v1/leases/{lease}": {
            "delete": _operation("endLease", "Give devices back", "LeaseRecord", (403, 404, *late)),
            "parameters": [lease],
        },
        "/v1/leases/{lease}/renew": _change(
            "renewLease",
            "Let a lease of a name live for its whole time from now",
            "LeaseRecord",
            (403, 404, *late),
            [lease],
        ),
        "/v1/leases/{lease}/bind": _change(
            "bindLease",
            "Let a lease end with a container; one of a name is only looked at",
            "LeaseRecord",
            (403, 404, *late),
            [
                lease,
                _number(
                    "pid", "The container's first process; the caller itself where it is left out.", 9_999_999
                ),
            ],
        ),
        "/v1/openapi.json": _read("Document", "This document", None),
        "/metrics": _metrics(),
    }


def _read(
    name: str,
    about: str,
    answer: str | None,
    refusals: tuple[int, ...] = (),
    parameters: list[Schema] | None = None,
) -> Schema:
    """A path that can be read; `answer` is None where it is any JSON object."""
    get = _operation(f"get{name}", about, answer, refusals)
    empty = {
        status: {"description": _PROBLEMS[int(status)]} for status in get["responses"] if status != "200"
    }
    head = {"200": {"description": "The head of GET's answer."}, **empty}
    path: Schema = {
        "get": get,
        "head": {"operationId": f"head{name}", "summary": f"{about}, the head only", "responses": head},
    }
    return path if parameters is None else {**path, "parameters": parameters}


def _metrics() -> Schema:
    """The one path that is no JSON."""
    path = _read("Metrics", "The metrics, for Prometheus", None)
    text = {"schema": {"type": "string"}}
    path["get"]["responses"]["200"]["content"] = {"text/plain": text, OPENMETRICS: text}
    return path


def _change(
    name: str,
    about: str,
    answer: str,
    refusals: tuple[int, ...],
    parameters: list[Schema] | None = None,
) -> Schema:
    """A path that changes something."""
    path: Schema = {"post": _operation(name, about, answer, refusals)}
    return path if parameters is None else {**path, "parameters": parameters}


def _operation(name: str, about: str, answer: str | None, refusals: tuple[int, ...]) -> Schema:
    schema: Schema = ref(answer) if answer else {"type": "object"}
    content: Schema = {"schema": schema}
    if answer:
        content["example"] = json.loads(_SCHEMAS)[answer]["examples"][0]
    problems = {str(status): ref(str(status), "responses") for status in sorted({*_ANY_REQUEST, *refusals})}
    done = {"description": f"{about}.", "content": {"application/json": content}}
    return {"operationId": name, "summary": about, "responses": {"200": done, **problems}}


def _switch(name: str, about: str) -> Schema:
    schema = {"type": "boolean", "default": False}
    return {"name": name, "in": "query", "description": about, "schema": schema}


def _number(name: str, about: str, highest: int) -> Schema:
    schema = {"type": "integer", "minimum": 1, "maximum": highest}
    return {"name": name, "in": "query", "description": about, "schema": schema}


def _which_events() -> list[Schema]:
    whole = {"type": "integer", "minimum": 0}
    found = {
        "after": (
            "Only events with a higher id, the oldest first; `since` does not count then.",
            {**whole, "maximum": LARGEST_NUMBER},
        ),
        "since": (
            "Only the newest from this moment on, in seconds since 1970.",
            {**whole, "maximum": LATEST_S, "default": 0},
        ),
        "limit": ("The most events.", {**whole, "minimum": 1, "maximum": MOST_EVENTS, "default": 100}),
        "kind": ("Only events of this kind.", {"type": "string", "enum": list(EVENT_KINDS)}),
        "wait": (
            "Where there are none, wait so many seconds for one; not where `after` is beyond the last.",
            {**whole, "maximum": LONGEST_EVENT_WAIT_S, "default": 0},
        ),
    }
    return [
        {"name": name, "in": "query", "description": about, "schema": schema}
        for name, (about, schema) in found.items()
    ]


def _which_usage() -> list[Schema]:
    about_gpu = "Only the GPU at this address, and its devices."
    about_devices = "With false only GPUs, and none of their devices."
    return [
        {"name": "gpu", "in": "query", "description": about_gpu, "schema": {"type": "string"}},
        {**_switch("devices", about_devices), "schema": {"type": "boolean", "default": True}},
    ]


def _lease_request() -> list[Schema]:
    """Which devices are wanted, for whom, and for how long one would wait."""
    whole = {"type": "integer", "minimum": 1}
    text = {"type": "string"}
    truth = {"type": "boolean", "default": False}
    found: dict[str, tuple[str, Schema]] = {
        "count": ("How many devices.", {**whole, "maximum": MOST_DEVICES, "default": 1}),
        "memory": (
            "So many MiB of a GPU that the configuration opens for it (memory_unit, or slices).",
            {**whole, "maximum": MOST_MIB},
        ),
        "units": ("The same, in units of `gpu_memory_unit`.", {**whole, "maximum": MOST_MIB}),
        "device": (
            "Just this device: id, address, or a unique beginning of either; `all` for all of the host.",
            {**text, "minLength": 1},
        ),
        "gpu": (
            "Devices of this GPU: UUID, address, or a unique beginning of either.",
            {**text, "minLength": 1},
        ),
        "across": ("Each on another GPU, and not all on one.", truth),
        "placement": (
            "Of the GPU with the fewest free devices that will do, or with the most.",
            {"type": "string", "enum": list(PLACEMENTS), "default": PLACEMENTS[0]},
        ),
        "enforced": ("Only of GPUs that hold their clients to the budget: from Volta on.", truth),
        "binding": (
            "What ends it: a process, a container's first one, this connection, or a name's time to live.",
            {"type": "string", "enum": list(BINDINGS), "default": BINDINGS[0]},
        ),
        "pid": (
            "With binding `process` or `container`: another process of the caller's user.",
            {**whole, "maximum": 9_999_999},
        ),
        "command": ("The command line that the process is about to execute, for people.", text),
        "name": ("With binding `name`: whose devices they are.", {"type": "string", "pattern": NAME}),
        "ttl": (
            "With binding `name`: time to live in s after each renewal, at most `max_lease_ttl_s`.",
            {**whole, "maximum": LONGEST_TTL_S},
        ),
        "wait": (
            "Where nothing is free, wait so many seconds: first come, first served.",
            {**whole, "minimum": 0, "maximum": LONGEST_WAIT_S, "default": 0},
        ),
        "request": (
            "A random name. Who asks again with it has what it was given, or its place in the queue.",
            {"type": "string", "pattern": REQUEST},
        ),
        "cdi": ("Have container engines find it: device `yunion.io/mps=` and the lease's id.", truth),
        "dry": ("Only tell what would be given now.", truth),
    }
    return [
        {"name": name, "in": "query", "description": about, "schema": schema}
        for name, (about, schema) in found.items()
    ]


def _filters() -> list[Schema]:
    whole = {"type": "integer", "minimum": 0}
    text = {"type": "string"}
    found = {
        "limit": (
            "Devices a page; 0 for all.",
            {**whole, "maximum": LARGEST_LIMIT, "default": DEFAULT_LIMIT},
        ),
        "offset": ("Devices to pass over.", {**whole, "maximum": LARGEST_NUMBER, "default": 0}),
        "dev_type": ("Only this type.", text),
        "model": ("Only this model of GPU.", text),
        "addr": ("Only this device, or the devices of the GPU at this address.", text),
        "device_path": ("Only devices of the GPU with this UUID.", text),
        "vendor_device_id": ("Only this kind of GPU, as vendor:device.", text),
        "numa_node": (
            "Only GPUs at this NUMA node; -1: GPUs without one.",
            {**whole, "minimum": -1, "maximum": LARGEST_NUMBER},
        ),
        "unused": ("Only devices that can be used now.", {"type": "boolean", "default": False}),
    }
    return [
        {"name": name, "in": "query", "description": about, "schema": schema}
        for name, (about, schema) in found.items()
    ]


def _problem(status: int, why: str) -> Schema:
    response: Schema = {
        "description": why,
        "content": {"application/problem+json": {"schema": ref("ProblemDetails")}},
    }
    if status == 405:
        response["headers"] = {
            "Allow": {
                "required": True,
                "schema": {"enum": ["GET, HEAD", "GET, HEAD, POST", "POST", "DELETE"]},
            }
        }
    return response


def ref(name: str, kind: str = "schemas") -> Schema:
    """A reference to one of the document's components."""
    return {"$ref": f"#/components/{kind}/{name}"}
