"""The API's OpenAPI 3.1 document, which the daemon serves at /v1/openapi.json."""

from __future__ import annotations

from yunion_mps import __version__
from yunion_mps.api.routes import LARGEST_LIMIT, LARGEST_NUMBER
from yunion_mps.api.schemas import Schema, example, ref, schemas
from yunion_mps.service import DEFAULT_LIMIT

_PROBLEMS = {
    400: "The request, or one of its parameters, is not as described.",
    404: "There is no such device, or more than one.",
    405: "The path can only be read; `Allow` says how.",
    408: "The request did not arrive in time.",
    413: "The request's body is too large.",
    431: "The request's head is too large.",
    501: "The request's body is in a transfer coding other than `chunked`.",
    503: "Too many connections are open.",
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
method other than GET and HEAD with 405, and a parameter that is not described with 400."""


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
            "schemas": schemas(),
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
    return {
        "/v1/devices": _path("Devices", "One page of the MPS devices", "DeviceList", _filters()),
        "/v1/devices/{id}": _path("Device", "One MPS device, and how to use it", "DeviceDetails", [device]),
        "/v1/gpus": _path("Gpus", "All GPUs of the host", "GpuList"),
        "/v1/status": _path("Status", "How all is", "Status"),
        "/v1/openapi.json": _path("Document", "This document", None),
    }


def _path(name: str, about: str, answer: str | None, parameters: list[Schema] | None = None) -> Schema:
    """A path that can be read; `answer` is None where it is any JSON object."""
    schema: Schema = ref(answer) if answer else {"type": "object"}
    content: Schema = {"schema": schema}
    if answer:
        content["example"] = example(schema)
    statuses = (*_ANY_REQUEST, 404) if answer == "DeviceDetails" else _ANY_REQUEST
    problems = {str(status): ref(str(status), "responses") for status in sorted(statuses)}
    empty = {str(status): {"description": _PROBLEMS[status]} for status in sorted(statuses)}
    get = {"200": {"description": f"{about}.", "content": {"application/json": content}}, **problems}
    head = {"200": {"description": "The head of GET's answer."}, **empty}
    path: Schema = {
        "get": {"operationId": f"get{name}", "summary": about, "responses": get},
        "head": {"operationId": f"head{name}", "summary": f"{about}, the head only", "responses": head},
    }
    if parameters:
        path["parameters"] = parameters
    return path


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
        "numa_node": ("Only GPUs at this NUMA node.", {**whole, "maximum": LARGEST_NUMBER}),
        "unused": ("Only devices that can be used now.", {"type": "boolean", "default": False}),
    }
    return [
        {"name": name, "in": "query", "description": about, "schema": schema}
        for name, (about, schema) in found.items()
    ]


def _problem(status: int, why: str) -> Schema:
    response: Schema = {
        "description": why,
        "content": {"application/problem+json": {"schema": ref("Problem")}},
    }
    if status == 405:
        response["headers"] = {"Allow": {"required": True, "schema": {"const": "GET, HEAD"}}}
    return response
