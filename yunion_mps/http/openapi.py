"""The API's OpenAPI 3.1 document, which the daemon serves at /v1/openapi.json: made from the operations."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from yunion_mps import __version__
from yunion_mps.http.messages import OPENMETRICS
from yunion_mps.http.operations import OPERATIONS, ROUTES, Operation, Parameter

Schema = Mapping[str, object]

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
`hint` if something can be done about it. Any other path is answered with 404, any other method with 405, and
a parameter that is not described with 400.

All of these users may read everything and take devices. Only root may change the daemon, and only root and
its owner may end a client or a lease. A change of the daemon that has begun is finished even if its client
disconnects; a request for devices ends with its connection."""


def document() -> dict[str, object]:
    """The document."""
    schemas: dict[str, Any] = json.loads(_SCHEMAS)
    paths: dict[str, dict[str, Schema]] = {}
    for operation in OPERATIONS:
        content: Schema = {"application/json": {"schema": {"type": "object"}}}
        if operation.is_text:
            content = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", OPENMETRICS)}
        elif operation.answer:
            example = schemas[operation.answer]["examples"][0]
            content = {"application/json": {"schema": _ref(operation.answer), "example": example}}
        answer = {"description": f"{operation.about}.", "content": content}
        refusals = sorted({*_ANY_REQUEST, *operation.refusals})
        refs = {str(status): _ref(str(status), "responses") for status in refusals}
        first, *others = operation.name.split("_")
        name = "".join(map(str.title, others))
        item = paths.setdefault(operation.path, {})
        item[operation.method.lower()] = _operation(operation, first + name, operation.about, answer, refs)
        if operation.method == "GET":
            without_body = {str(status): {"description": _PROBLEMS[status]} for status in refusals}
            head = {"description": "The head of GET's answer."}
            about = f"{operation.about}, the head only"
            item["head"] = _operation(operation, "head" + name, about, head, without_body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "yunion-mps",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost", "description": "Any host name does: it is a Unix socket."}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _problem(status, about) for status, about in _PROBLEMS.items()},
        },
    }


def _operation(
    operation: Operation[Any], name: str, about: str, answer: Schema, refusals: Mapping[str, Schema]
) -> Schema:
    return {
        "operationId": name,
        "summary": about,
        "parameters": [_parameter(one, "path") for one in operation.path_parameters]
        + [_parameter(one, "query") for one in operation.query_parameters],
        "responses": {"200": answer, **refusals},
    }


def _parameter(parameter: Parameter, place: str) -> Schema:
    schema: dict[str, object] = {"type": parameter.type}
    if parameter.type == "time":
        schema = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 0}]}
    if parameter.type == "integer":
        schema.update(minimum=parameter.lowest, maximum=parameter.highest)
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if parameter.pattern:
        schema["pattern"] = parameter.pattern
    if parameter.default is not None:
        schema["default"] = parameter.default
    found: dict[str, object] = {
        "name": parameter.name,
        "in": place,
        "description": parameter.about,
        "schema": schema,
    }
    if place == "path":
        found.update(required=True, example=parameter.example)
    return found


def _problem(status: int, about: str) -> Schema:
    response: dict[str, object] = {
        "description": about,
        "content": {"application/problem+json": {"schema": _ref("ProblemDetails")}},
    }
    if status == 405:
        allowed = sorted({", ".join(methods) for methods in ROUTES.values()})
        response["headers"] = {"Allow": {"required": True, "schema": {"enum": allowed}}}
    return response


def _ref(name: str, kind: str = "schemas") -> Schema:
    return {"$ref": f"#/components/{kind}/{name}"}
