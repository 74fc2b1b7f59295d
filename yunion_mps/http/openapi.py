"""The API's OpenAPI 3.1 document, which is served at /v1/openapi.json, generated from the operations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from yunion_mps import __version__
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import GET_READINESS, OPERATIONS, ROUTES
from yunion_mps.http.parameters import Parameter, members_schema

Schema = Mapping[str, object]

#: Written by scripts/schemas; read now, because an upgrade may replace the file while this program runs.
with open(os.path.join(os.path.dirname(__file__), "schemas.json"), encoding="utf-8") as _file:
    _SCHEMAS = _file.read()

_PROBLEMS = {
    400: "The request, or one of its parameters or members, is invalid; `detail` names it.",
    403: "The caller is not permitted to do this.",
    404: "The object does not exist, or the name is ambiguous.",
    405: "The path does not support this method; `Allow` lists those that it does.",
    408: "The request did not arrive in time.",
    409: "The request was refused or failed; nothing was changed.",
    413: "The request's body is too large.",
    415: "The request's body is not declared as `application/json`.",
    422: "The configuration is invalid, and nothing was changed; `detail` has one problem per line.",
    410: "The request could not be satisfied even if everything were free, so waiting is pointless.",
    423: "No suitable device is free; `detail` lists what exists.",
    431: "The request's header is too large.",
    501: "The request's body has a transfer coding other than `chunked`.",
    503: "Too many connections are open, or the daemon cannot do this right now; try again.",
}
_ETAG = {"ETag": {"required": True, "schema": {"type": "string"}}}
_LOCATION = {"Location": {"required": True, "schema": {"type": "string"}}}
#: The error statuses of any request.
_ANY_REQUEST = (400, 408, 413, 431, 501, 503)

_ABOUT = """\
The GPUs of one host, divided by NVIDIA MPS into devices with a budget of memory and SM threads.

The API is served on the Unix socket /run/yunion-mps/yunion-mps.sock, for root and the members of the group
yunion-mps:

    curl --unix-socket /run/yunion-mps/yunion-mps.sock http://localhost/v1/devices

Memory is in MiB, percentages are of a GPU's SM threads, and times are RFC 3339 in UTC. GET takes parameters
in the query string, and POST takes a JSON object whose members are all optional. Every error is a problem
detail (RFC 9457) with a reason `code`, and with a `hint` if something can be done about it. Unknown paths are
answered with 404, unsupported methods with 405, and unknown parameters or members with 400.

Every user with access to the socket may read everything and lease devices. Only root may reload or
re-execute the daemon. A client or lease may be ended only by its owner and root. A reload or re-exec that has
begun is completed even if the caller disconnects; a request for devices is cancelled when its connection is
closed."""


def document() -> dict[str, object]:
    """Return the document of all operations."""
    schemas: dict[str, Any] = json.loads(_SCHEMAS)
    paths: dict[str, dict[str, Schema]] = {}
    for operation in OPERATIONS:
        content = _content(operation, schemas)
        answers = _answers(operation, content)
        refusals = _refusals(operation)
        refs = {str(status): _ref(str(status), "responses") for status in refusals}
        if operation is GET_READINESS:
            refs["503"] = _problem(503, f"Not ready: one line for each reason. {_PROBLEMS[503]}", content)
        verb, *nouns = operation.name.split("_")
        subject = "".join(map(str.title, nouns))
        item = paths.setdefault(operation.path, {})
        item[operation.method.lower()] = _operation(
            operation, verb + subject, operation.summary, {**answers, **refs}
        )
        if operation.method == "GET":
            summary = f"{operation.summary} (headers only)"
            item["head"] = _operation(operation, "head" + subject, summary, _without_body(answers, refusals))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "yunion-mps",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost", "description": "Any host name works on a Unix socket."}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _problem(status, text) for status, text in _PROBLEMS.items()},
        },
    }


def _content(operation: Operation[Any], schemas: Mapping[str, Any]) -> Schema:
    if operation.media_types:
        return {kind: {"schema": {"type": "string"}} for kind in operation.media_types}
    if operation.answer:
        example = schemas[operation.answer]["examples"][0]
        return {"application/json": {"schema": _ref(operation.answer), "example": example}}
    return {"application/json": {"schema": {"type": "object"}}}


def _answers(operation: Operation[Any], content: Schema) -> dict[str, Schema]:
    """Return the responses of an operation that succeeds, by status."""
    answer: dict[str, Any] = {"description": f"{operation.summary}.", "content": content}
    answers: dict[str, Schema] = {"200": answer}
    if operation.creates:
        answers["201"] = {**answer, "description": "Created.", "headers": _LOCATION}
        answer["description"] = "The lease already exists from the same request, or `dry_run` is set."
    if operation.watchable:
        answer["headers"] = _ETAG
        answers["304"] = {"description": "Nothing has changed.", "headers": _ETAG}
    return answers


def _refusals(operation: Operation[Any]) -> list[int]:
    statuses = {*_ANY_REQUEST, *operation.refusals}
    if operation.has_body:
        statuses.add(415)
    return sorted(statuses)


def _without_body(answers: Mapping[str, Schema], refusals: Iterable[int]) -> dict[str, Schema]:
    """Return the responses to HEAD."""
    responses: dict[str, Schema] = {}
    for status, answer in answers.items():
        responses[status] = {**answer, "content": {}}
    for refusal in refusals:
        responses[str(refusal)] = {"description": _PROBLEMS[refusal]}
    return responses


def _operation(operation: Operation[Any], name: str, summary: str, responses: Mapping[str, Schema]) -> Schema:
    located = {
        "path": operation.path_parameters,
        "query": operation.query_parameters,
        "header": operation.headers,
    }
    parameters: list[Schema] = []
    for location, those in located.items():
        parameters += [_parameter(parameter, location) for parameter in those]
    item: dict[str, object] = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": responses,
    }
    if operation.has_body:
        schema = members_schema(operation.members)
        item["requestBody"] = {"required": False, "content": {"application/json": {"schema": schema}}}
    return item


def _parameter(parameter: Parameter, location: str) -> Schema:
    item: dict[str, object] = {
        "name": parameter.name,
        "in": location,
        "description": parameter.description,
        "schema": parameter.schema(),
    }
    if location == "path":
        item.update(required=True, example=parameter.example)
    return item


def _problem(status: int, description: str, extra_content: Schema = MappingProxyType({})) -> Schema:
    content = {"application/problem+json": {"schema": _ref("ProblemDetails")}, **extra_content}
    response: dict[str, object] = {"description": description, "content": content}
    if status == 405:
        allowed = sorted({", ".join(methods) for methods in ROUTES.values()})
        response["headers"] = {"Allow": {"required": True, "schema": {"enum": allowed}}}
    return response


def _ref(name: str, kind: str = "schemas") -> Schema:
    return {"$ref": f"#/components/{kind}/{name}"}
