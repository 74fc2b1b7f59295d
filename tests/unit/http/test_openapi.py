"""The OpenAPI document says just what the API does."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from yunion_mps import __version__
from yunion_mps.core.models import Snapshot
from yunion_mps.http.messages import OTHER_STATUS, STATUSES, Request, Response
from yunion_mps.http.openapi import document
from yunion_mps.http.operations import OPERATIONS, ROUTES
from yunion_mps.service.queries import Queries

from unit.http import fake_services, snapshots

DOCUMENT: Any = document()
ANSWERS = {
    "/v1/devices": "DeviceList",
    "/v1/devices/00:06.0-1": "DeviceDetails",
    "/v1/gpus": "GpuList",
    "/v1/pools": "PoolList",
    "/v1/status": "Status",
    "/v1/events": "EventList",
    "/v1/plan": "ChangeList",
    "/v1/clients": "ClientList",
    "/v1/leases": "LeaseList",
}


def ask(snapshot: Snapshot, target: str, method: str = "GET", body: bytes = b"") -> tuple[int, Any]:
    async def answer() -> Response:
        service = Queries(lambda: snapshot, 1788000000.25, 4200)
        headers = {"content-type": "application/json"}
        asked = Request(method, target, 0, os.getpid(), headers=headers, body=body)
        found = fake_services.router(service).handle(asked)
        return found if isinstance(found, Response) else await found

    response = asyncio.run(answer())
    is_json = response.content_type.endswith("json")
    return response.status, json.loads(response.body) if is_json else response.body.decode()


def errors(schema: str, value: Any) -> list[str]:
    whole = {"$ref": f"#/components/schemas/{schema}", **DOCUMENT}
    found = OAS31Validator(whole, format_checker=OAS31Validator.FORMAT_CHECKER).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]


def objects(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object schema in the document, and where it stands."""
    if isinstance(schema, dict):
        if "properties" in schema and "type" in schema:
            yield place, schema
        for name, inner in schema.items():
            yield from objects(inner, f"{place}/{name}")


def test_the_document_is_valid_openapi_3_1() -> None:
    assert (DOCUMENT["openapi"], DOCUMENT["info"]["version"]) == ("3.1.0", __version__)
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


@pytest.mark.parametrize("target", ANSWERS)
@pytest.mark.parametrize("name", snapshots.ALL)
def test_every_answer_is_as_its_schema_says(name: str, target: str) -> None:
    status, answer = ask(snapshots.ALL[name](), target)
    if name == "disabled" and "00:06.0-1" in target:
        assert (status, errors("ProblemDetails", answer)) == (404, [])
    else:
        assert (status, errors(ANSWERS[target], answer)) == (200, [])


def test_no_object_may_have_fields_that_its_schema_does_not_name() -> None:
    found = dict(objects(DOCUMENT["components"]["schemas"]))
    assert len(found) > 8
    assert [place for place, schema in found.items() if schema["additionalProperties"] is not False] == []


def test_every_field_of_an_answer_is_required_but_a_problems_hint() -> None:
    optional = {
        place: sorted(set(schema["properties"]) - set(schema.get("required", ())))
        for place, schema in objects(DOCUMENT["components"]["schemas"])
        if set(schema["properties"]) != set(schema.get("required", ()))
    }
    assert optional == {"/ProblemDetails": ["hint"]}


@pytest.mark.parametrize("schema", DOCUMENT["components"]["schemas"])
def test_an_example_is_right_and_a_field_more_or_less_is_wrong(schema: str) -> None:
    example = fake_services.EXAMPLES[schema]
    assert errors(schema, example) == []
    assert errors(schema, {**example, "surplus": 1})
    for field in DOCUMENT["components"]["schemas"][schema].get("required", ()):
        assert errors(schema, {name: value for name, value in example.items() if name != field})


def test_the_examples_are_what_the_reference_case_answers() -> None:
    """All but the ids, which depend on the machine, the moments and PIDs, and what polls have measured."""
    status, answer = ask(snapshots.reference(), "/v1/devices/00:06.0-1")
    assert status == 200
    shown = fake_services.EXAMPLES["DeviceDetails"]
    assert {**answer, "id": shown["id"], "host_id": shown["host_id"]} == shown
    measured = dict.fromkeys(("memory_used_mib", "utilization", "temperature_c", "power_w", "power_limit_w"))
    (gpu,) = fake_services.EXAMPLES["GpuList"]["gpus"]
    assert ask(snapshots.reference(), "/v1/gpus")[1] == {"gpus": [{**gpu, **measured}], "total": 1}
    status_shown = fake_services.EXAMPLES["Status"]
    answer = fake_services.status_of(Queries(snapshots.reference, 1788000000.25, 4200))
    assert {**answer, "host_id": status_shown["host_id"]} == {**status_shown}


@pytest.mark.parametrize("path", DOCUMENT["paths"])
def test_every_path_takes_the_methods_that_are_described_and_no_others(path: str) -> None:
    described = {name.upper() for name in DOCUMENT["paths"][path]}
    assert described in ({"GET", "HEAD"}, {"GET", "HEAD", "POST"}, {"POST"}, {"GET", "HEAD", "DELETE"})
    target = path.replace("{id}", "00:06.0-1").replace("{pid}", "4260").replace("{lease}", "7c1f")
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
        status, answer = ask(snapshots.reference(), target, method)
        if method in described:
            assert status in (200, 201)
        else:
            detail = f"{method} is not supported here"
            assert (status, answer["detail"], errors("ProblemDetails", answer)) == (405, detail, [])


def operations() -> Iterator[dict[str, Any]]:
    for item in DOCUMENT["paths"].values():
        yield from item.values()


def test_every_operation_is_in_the_document() -> None:
    described = {(path, name.upper()) for path, item in DOCUMENT["paths"].items() for name in item}
    assert described == {(path, method) for path, methods in ROUTES.items() for method in methods}
    assert {(one.path, one.method) for one in OPERATIONS} <= described


def test_every_status_of_an_error_is_described() -> None:
    declared = {status for operation in OPERATIONS for status in operation.refusals}
    described = {int(status) for status in DOCUMENT["components"]["responses"]}
    assert {*STATUSES.values(), OTHER_STATUS, *declared} <= described


def test_every_status_of_the_server_itself_is_in_the_document() -> None:
    for operation in operations():
        assert {"400", "408", "413", "431", "501", "503"} <= set(operation["responses"])


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [operation["operationId"] for operation in operations()]
    assert len(names) == len(set(names)) > 15


def test_fields_that_may_be_unknown_are_nullable() -> None:
    """The limit of a GPU that is not in the plan, and what a process or a server does not tell."""
    assert errors("Domain", {**fake_services.EXAMPLES["Domain"], "memory_limits_mib": [5760, None]}) == []
    assert errors("MpsClient", fake_services.ENDED_CLIENT) == []
    assert errors("MpsServer", {**fake_services.SERVER, "state": None}) == []


BODIES = [
    (path.replace("{pid}", "4260").replace("{lease}", "7c1f"), operation["requestBody"]["content"])
    for path, item in DOCUMENT["paths"].items()
    for operation in item.values()
    if "requestBody" in operation
]


def test_every_post_and_nothing_else_has_a_body() -> None:
    assert {path for path, _ in BODIES} == {
        re.sub(r"{pid}", "4260", one.path).replace("{lease}", "7c1f")
        for one in OPERATIONS
        if one.method == "POST"
    }


@pytest.mark.parametrize(("path", "content"), BODIES)
def test_a_body_may_have_just_the_members_that_the_document_says(path: str, content: Any) -> None:
    (schema,) = (one["schema"] for one in content.values())
    assert schema["additionalProperties"] is False
    for name, member in schema["properties"].items():
        for values, is_refused in zip(allowed(member), (False, True)):
            for value in values:
                body = json.dumps({**_REQUIRED.get(name, {}), name: value}).encode()
                status, answer = ask(snapshots.reference(), path, "POST", body)
                assert (status == 400) is is_refused, (body, answer)


#: Without these, others are refused: one device cannot be on several GPUs.
_REQUIRED = {"across": {"count": 2}, "thread_percentage": {"memory_mib": 1}}


def allowed(member: Any) -> tuple[list[Any], list[Any]]:
    """Values at the bounds of what a schema allows, and beyond; a holder's members are tried by hand."""
    if member["type"] == "integer":
        minimum, maximum = member["minimum"], member["maximum"]
        return [minimum, maximum, float(maximum)], [minimum - 1, maximum + 1, minimum + 0.5, "1", True, None]
    if member["type"] == "boolean":
        return [True, False], ["true", 1, None]
    if member["type"] == "array":
        return [["0"], ["0"] * member["maxItems"]], [[], ["0"] * (member["maxItems"] + 1), [""], [1], "0"]
    if member["type"] == "object":
        return [{}], [None, [], {"x": 1}]
    if "enum" in member:
        return member["enum"], ["", "x", None]
    return ["0"], [7, None, []]


def described(parameter: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Values at the bounds of what the document allows, and beyond."""
    schema = parameter["schema"]
    if schema.get("format") == "date-time":
        times = ["2026-11-20T13:45:00Z", "2026-11-20T13:45:00.123%2B01:00"]
        return times, ["", "-1", "x", "2026", "1795178707", "2026-11-20", "2026-11-20T13:45:00"]
    if schema["type"] == "integer":
        minimum, maximum = schema["minimum"], schema["maximum"]
        return [minimum, maximum], [minimum - 1, maximum + 1, "x", ""]
    if schema["type"] == "boolean":
        return ["true", "false"], ["1", ""]
    if "enum" in schema:
        return schema["enum"], ["", "x"]
    return [] if "pattern" in schema else ["", "x"], [""] if "pattern" in schema else []


QUERIES = [
    (method.upper(), path, parameter)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    for parameter in operation["parameters"]
    if parameter["in"] == "query"
]


@pytest.mark.parametrize(
    ("method", "path", "parameter"), QUERIES, ids=[f"{path}-{one['name']}" for _, path, one in QUERIES]
)
def test_a_parameter_may_be_just_what_the_document_says(
    method: str, path: str, parameter: dict[str, Any]
) -> None:
    target = re.sub(r"{\w+}", "4260", path) + "?"
    if path == "/v1/events" and parameter["name"] == "wait_s":
        target += "after=1&"  # which is beyond the last event, so that nothing is waited for
    for values, is_refused in zip(described(parameter), (False, True)):
        for value in values:
            status, answer = ask(snapshots.reference(), f"{target}{parameter['name']}={value}", method)
            assert (status == 400) is is_refused, (value, answer)


def test_a_page_of_the_listing_has_the_size_that_the_document_says() -> None:
    defaults = {
        one["name"]: one["schema"].get("default") for _, path, one in QUERIES if path == "/v1/devices"
    }
    answer = ask(snapshots.reference(), "/v1/devices")[1]
    assert (answer["limit"], answer["offset"]) == (defaults["limit"], defaults["offset"])
