"""A request finds its operation, or is told why not; answers are counted by route alone."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from typing import Any

import pytest
from yunion_mps import answers
from yunion_mps.http import operations
from yunion_mps.http.handlers import Handlers, RequestedHolder
from yunion_mps.http.messages import Request, Response
from yunion_mps.http.operation import WATCH_PARAMETERS, Operation
from yunion_mps.http.operations import OPERATIONS
from yunion_mps.http.router import OTHER, Router
from yunion_mps.service.queries import Queries

from request_bodies import request_body
from unit.http import fake_services, snapshots

Problem = tuple[int, str, "str | None"]


def ask(
    router: Router, target: str, method: str = "GET", body: bytes = b"", kind: str = "application/json"
) -> Response:
    async def answer() -> Response:
        found = router.handle(
            Request(method, target, 0, os.getpid(), headers={"content-type": kind}, body=body)
        )
        response = found if isinstance(found, Response) else await found
        await asyncio.sleep(0)  # what is called at its end comes a turn later
        return response

    return asyncio.run(answer())


def problem(response: Response) -> Problem:
    told = json.loads(response.body)
    return response.status, told["detail"], told.get("hint")


@pytest.fixture(scope="module")
def shared() -> Router:
    """One for the tests that do not count."""
    return fake_services.router(Queries(snapshots.reference, 1788000000.25, 4200))


@pytest.fixture
def router() -> Router:
    return fake_services.router(Queries(snapshots.reference, 1788000000.25, 4200))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_each_path_of_the_api_is_a_route(router: Router, operation: Operation[Any]) -> None:
    target = re.sub(r"{\w+}", "4260", operation.path)
    for shown in (target, f"{target}?x=1", f"http://localhost{target}"):
        ask(router, shown, operation.method)
    assert {route for route, _, _ in router.counter.counts().answers} == {operation.path}


@pytest.mark.parametrize(
    "target",
    [
        *("/", "/v1", "/v1/", "/v2/devices", "/v1/Status", "*", "http://[", "//[/v1/gpus", "http://]/"),
        *("/v1/devices/", "/v1/devices/a/b", "/v1/devices/{id}/", "/v1/leases/a/b/renew"),
        *(f"/v1/clients/{pid}/terminate" for pid in ("", "x", "-1", "1.5", "4260/x", "%34", "9" * 11)),
        f"/v1/clients/{'9' * 5000}/terminate",
    ],
)  # fmt: skip
def test_unknown_paths_share_one_route(router: Router, target: str) -> None:
    for method in ("GET", "POST", "BREW"):
        status, detail, hint = problem(ask(router, target, method))
        if "[" in target or "]" in target:
            found = (400, "the request's target cannot be parsed", "write a path such as /v1/devices")
            assert (status, detail, hint) == found
        else:
            assert (status, hint) == (404, "see the paths: /v1/openapi.json")
            assert detail == f"no such path: {target[:200]!r}"
    assert [route for (route,), *_ in router.counter.counts().latencies] == [OTHER]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_each_operation_has_a_handler_that_takes_its_parameters(operation: Operation[Any]) -> None:
    signature = inspect.signature(getattr(Handlers, operation.name))
    named = {one.name for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY}
    watchable = {one.argument for one in WATCH_PARAMETERS if operation.watchable}
    assert named == {parameter.argument for parameter in operation.parameters} - watchable


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_the_type_of_an_answer_and_its_schema_have_one_name(operation: Operation[Any]) -> None:
    declared = operations.__annotations__[operation.name.upper()]
    untyped = "str" if operation.media_types else "Any"
    assert declared == f"Operation[{f'answers.{operation.answer}Json' if operation.answer else untyped}]"
    if operation.answer:
        handler = getattr(Handlers, operation.name)
        returned = f"answers.{operation.answer}Json" + (" | CreatedResource" if operation.creates else "")
        assert handler.__annotations__["return"] == returned
        assert hasattr(answers, f"{operation.answer}Json")


def test_the_handler_knows_all_members_of_a_holder() -> None:
    assert set(RequestedHolder.__annotations__) == {member.argument for member in operations.HOLDER}


def test_no_handler_is_without_an_operation() -> None:
    handlers = {name for name, one in vars(Handlers).items() if inspect.isfunction(one) and name[0] != "_"}
    assert handlers == {operation.name for operation in OPERATIONS}


def whole(minimum: int, maximum: int) -> str:
    return f"write a whole number from {minimum} to {maximum}"


ADRESS = "unknown parameter 'adress'"
NO_QUERY, AS_PAIRS = "the query cannot be parsed", "write it as name=value&name=value"
FILTERS = "addr, dev_type, device_path, limit, model, numa_node, offset, unused, vendor_device_id, wait_s"
KINDS = "write one of domain, limit, gpu, compute_mode, mig, configuration, client, lease, daemon"
NO_PARAMETERS = "omit it: this operation has no parameters"
A_TIME = "write an RFC 3339 time such as 2026-11-20T13:45:00Z"
REQUEST = "write 16 to 64 random characters: letters, digits and -"


@pytest.mark.parametrize(
    ("method", "target", "detail", "hint"),
    [
        ("GET", "/v1/devices?limit=x", "invalid value for limit: 'x'", whole(0, 100000)),
        ("GET", "/v1/devices?limit=%D9%A3", "invalid value for limit: '٣'", whole(0, 100000)),
        ("GET", "/v1/devices?offset=2147483648", "invalid value for offset: '2147483648'",
         whole(0, 2147483647)),
        ("GET", "/v1/devices?numa_node=none", "invalid value for numa_node: 'none'", whole(-1, 2147483647)),
        ("GET", "/v1/devices?unused=1", "invalid value for unused: '1'", "write true or false"),
        ("GET", "/v1/devices?limit=1&limit=2", "parameter 'limit' is given twice",
         "give each parameter once"),
        ("GET", "/v1/devices?adress=00:06.0", ADRESS, f"use one of these parameters: {FILTERS}"),
        ("GET", "/v1/devices?limit", NO_QUERY, AS_PAIRS),
        ("GET", "/v1/devices?" + "&".join(f"x{n}=1" for n in range(33)), NO_QUERY, AS_PAIRS),
        *(
            ("GET", f"/v1/{path}?limit=1", "unknown parameter 'limit'", NO_PARAMETERS)
            for path in ("devices/00:06.0-1", "gpus", "status", "openapi.json", "plan")
        ),
        ("GET", "/v1/events?wait_s=61", "invalid value for wait_s: '61'", whole(0, 60)),
        ("GET", "/v1/events?since=2026", "invalid value for since: '2026'", A_TIME),
        ("GET", "/v1/events?after=x", "invalid value for after: 'x'", whole(0, 2147483647)),
        ("GET", "/v1/events?kind=gpus", "invalid value for kind: 'gpus'", KINDS),
        ("POST", "/v1/reload?mode=now", "unknown parameter 'mode'", NO_PARAMETERS),
        ("POST", "/v1/reexec?x", NO_QUERY, AS_PAIRS),
    ],
)  # fmt: skip
def test_a_bad_query_is_refused_by_name(
    shared: Router, method: str, target: str, detail: str, hint: str | None
) -> None:
    assert problem(ask(shared, target, method)) == (400, detail, hint)


AN_OBJECT = 'write a JSON object such as {"count": 2}'
BRACES = "write a JSON object: {…}"
A_NAME = "write letters, digits and ._:/@-, a letter or digit first, at most 360"
OMIT_IT = "omit it, or name one"
MEMBERS = (
    "use one of these members: across, allow_unlimited, cdi, count, devices, dry_run, gpu, holder, "
    "memory_mib, memory_units, placement, reserved_for, thread_percentage, wait_s"
)
OF_HOLDER = "use one of these members: command, kind, name, pid, ttl_s, uid"
INVALID = "the body is not valid JSON"


@pytest.mark.parametrize(
    ("body", "detail", "hint"),
    [
        ("{", f"{INVALID}: line 1, column 2: Expecting property name enclosed in double quotes", AN_OBJECT),
        ("count=2", f"{INVALID}: line 1, column 1: Expecting value", AN_OBJECT),
        ('{"count": NaN}', "NaN is not valid JSON", "write a number"),
        ('{"count": -Infinity}', "-Infinity is not valid JSON", "write a number"),
        ('{"count": ' + "[" * 100_000, "the body is nested too deeply", AN_OBJECT),
        ('{"count": 1, "count": 2}', "member 'count' is given twice", "give each member once"),
        ('{"holder": {"pid": 1, "pid": 1}}', "member 'pid' is given twice", "give each member once"),
        ("[]", "the body is not a JSON object: []", BRACES),
        ("null", "the body is not a JSON object: null", BRACES),
        ('{"cuont": 2}', "unknown member 'cuont' (did you mean count?)", MEMBERS),
        ('{"ttl": 2}', "unknown member 'ttl'", MEMBERS),
        ('{"holder": {"ttl": 2}}', "unknown member 'holder.ttl' (did you mean holder.ttl_s?)", OF_HOLDER),
        ('{"holder": 7}', "holder is not a JSON object: 7", BRACES),
        ('{"holder": {"ttl_s": "5"}}', 'invalid value for holder.ttl_s: "5"', whole(0, operations.MAX_TTL_S)),
        ('{"holder": {"kind": "hope"}}', 'invalid value for holder.kind: "hope"',
         "write one of process, connection, name, container"),
        ('{"holder": {"name": "a b", "ttl_s": 1}}', 'invalid value for holder.name: "a b"',
         A_NAME),
        *(
            (f'{{"count": {value}}}', f"invalid value for count: {value}", whole(1, 64))
            for value in ("0", "65", "-1", "1.5", '"2"', "true", "null", "[2]")
        ),
        ('{"count": 1e999}', "invalid value for count: Infinity", whole(1, 64)),
        ('{"across": 1}', "invalid value for across: 1", "write true or false"),
        ('{"placement": "best"}', 'invalid value for placement: "best"', "write one of binpack, spread"),
        ('{"devices": "00:06.0-1"}', 'invalid value for devices: "00:06.0-1"',
         "write a list of 1 to 64 strings"),
        ('{"devices": []}', "invalid value for devices: []", "write a list of 1 to 64 strings"),
        ('{"devices": ["00:06.0-1", 7]}', "invalid value for devices[1]: 7", OMIT_IT),
        ('{"gpu": ""}', 'invalid value for gpu: ""', OMIT_IT),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_with_the_path_of_the_member(
    shared: Router, body: str, detail: str, hint: str
) -> None:
    assert problem(ask(shared, "/v1/leases", "POST", body.encode())) == (400, detail, hint)


@pytest.mark.parametrize("body", [b"\xff", b'{"gpu": "\xc3"}', '{"gpu": "0"}'.encode("utf-16")])
def test_a_body_that_is_no_utf_8_is_refused(shared: Router, body: bytes) -> None:
    assert problem(ask(shared, "/v1/leases", "POST", body)) == (400, f"{INVALID} in UTF-8", AN_OBJECT)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("", "not given"), ("text/plain", "'text/plain'"), ("application/jsonp", "'application/jsonp'"),
     ("application/x-www-form-urlencoded", "'application/x-www-form-urlencoded'")],
)  # fmt: skip
def test_a_body_that_is_not_declared_as_json_is_refused(shared: Router, kind: str, shown: str) -> None:
    found = problem(ask(shared, "/v1/leases", "POST", b"{}", kind))
    hint = "send the header Content-Type: application/json"
    assert found == (415, f"the body's content type is {shown}", hint)


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
@pytest.mark.parametrize(
    "body", ["", "{}", '{"count": 1.0, "holder": {}}', '{"wait_s": 0, "devices": ["00"]}']
)
def test_a_new_lease_is_created_at_its_own_address(shared: Router, body: str, kind: str) -> None:
    answer = ask(shared, "/v1/leases", "POST", body.encode(), kind)
    lease = json.loads(answer.body)["id"]
    assert (answer.status, answer.headers) == (201, (("Location", f"/v1/leases/{lease}"),))
    assert json.loads(ask(shared, f"/v1/leases/{lease}").body)["id"] == lease


@pytest.mark.parametrize("key", ["", "short", "../../../../../etc/passwd", "a" * 65])
def test_an_idempotency_key_has_a_form(shared: Router, key: str) -> None:
    async def answer() -> Response:
        later = shared.handle(Request("POST", "/v1/leases", 0, headers={"idempotency-key": key}))
        return later if isinstance(later, Response) else await later

    assert problem(asyncio.run(answer())) == (400, f"invalid value for Idempotency-Key: {key!r}", REQUEST)


NAMED = "devices cannot be combined with count or memory"
TOGETHER = "memory_mib and memory_units are mutually exclusive"
NEEDS = "a holder of kind name requires both name and ttl_s"
SO = 'write "holder": {"name": "job-17", "ttl_s": 600}'
LEAVE_OUT = "omit one of them"
WITH_NAME = "holder.name requires kind name, or container without pid and command"
NOT_OF_CDI = "cannot be the name of a CDI device of a container"
CDI_NAME = "write lower-case letters, digits and - inside, at most 32"


@pytest.mark.parametrize(
    ("words", "detail", "hint"),
    [
        ("count=2&devices=00:06.0-1", NAMED, LEAVE_OUT),
        ("memory_mib=9&devices=00:06.0-1", NAMED, LEAVE_OUT),
        ("memory_mib=1&memory_units=1", TOGETHER, "use one of them"),
        (
            "thread_percentage=10",
            "thread_percentage requires memory_mib or memory_units",
            "add one of them, or omit thread_percentage",
        ),
        ("across=true", "across requires several devices, but count is 1", "set count to 2 or more"),
        ("holder.name=job", NEEDS, SO),
        ("holder.ttl_s=1&holder.kind=name", NEEDS, SO),
        (
            "holder.name=a&holder.ttl_s=9&holder.command=b",
            "holder.command does not apply to kind name",
            LEAVE_OUT,
        ),
        ("holder.name=a&holder.ttl_s=9&holder.pid=1", "holder.pid does not apply to kind name", LEAVE_OUT),
        ("holder.ttl_s=5", "holder.ttl_s requires kind name", LEAVE_OUT),
        ("holder.name=a&holder.kind=process", WITH_NAME, LEAVE_OUT),
        ("holder.name=a&holder.kind=container&holder.pid=1", WITH_NAME, LEAVE_OUT),
        ("holder.name=A1&holder.kind=container", f"holder.name: A1 {NOT_OF_CDI}", CDI_NAME),
        ("holder.name=all&holder.kind=container", f"holder.name: all {NOT_OF_CDI}", CDI_NAME),
        ("holder.kind=connection&holder.pid=1", "holder.pid requires kind process or container", LEAVE_OUT),
    ],
)
def test_members_of_a_lease_request_that_contradict_each_other_are_refused(
    shared: Router, words: str, detail: str, hint: str
) -> None:
    assert problem(ask(shared, "/v1/leases", "POST", request_body(words)[0])) == (400, detail, hint)


@pytest.mark.parametrize(
    "target",
    [
        "/v1/devices/00%3A06.0-1",
        "/v1/devices/00%3a06.0%2d1",
        "http://localhost/v1/devices/00:06.0-1",
        "http://yunion-mps/v1/devices/00:06.0-1?",
        "/v1/devices/00:06.0-1#fragment",
    ],
)
def test_a_target_may_be_spelt_in_every_way_that_http_has(shared: Router, target: str) -> None:
    answer = ask(shared, target)
    assert (answer.status, json.loads(answer.body)["addr"]) == (200, "00:06.0-1")


@pytest.mark.parametrize(
    "name", ["%FF", "%00", "%F0%9F%90%8D", "%", "%zz", "..%2f..", "a" * 8000, "%0a%1b[2J"]
)
def test_a_device_with_an_invalid_name_is_not_found(shared: Router, name: str) -> None:
    status, detail, _ = problem(ask(shared, f"/v1/devices/{name}"))
    assert status == 404
    assert len(detail) < 500
    assert detail.isprintable()


def test_a_device_s_name_may_hold_a_slash_that_is_written_as_a_part_of_it(shared: Router) -> None:
    found = problem(ask(shared, "/v1/devices/..%2F..%2Fx"))
    assert found[:2] == (404, "there is no device ../../x")


@pytest.mark.parametrize("model", ["Tesla%20P40", "Tesla+P40", "%54esla%20P40"])
def test_spaces_in_a_filter_may_be_written_both_ways(shared: Router, model: str) -> None:
    assert json.loads(ask(shared, f"/v1/devices?model={model}").body)["total"] == 4


def test_answers_are_counted_by_route_method_and_status(router: Router) -> None:
    for device in ("00:06.0-1", "00:06.0-2", "nothing"):
        ask(router, f"/v1/devices/{device}")
    ask(router, "/v1/events?limit=0")
    ask(router, "/v1/status", "BREW")
    assert router.counter.counts().answers == {
        ("/v1/devices/{id}", "GET", 200): 2,
        ("/v1/devices/{id}", "GET", 404): 1,
        ("/v1/events", "GET", 400): 1,
        ("/v1/status", "other", 405): 1,
    }


def test_each_answers_time_is_in_one_bucket(router: Router) -> None:
    for _ in range(3):
        ask(router, "/v1/clients")
    ((labels, buckets, sum_s),) = router.counter.counts().latencies
    assert labels == ("/v1/clients",)
    assert buckets[-1] == ("+Inf", 3)
    assert sum_s > 0


def test_an_answer_that_was_cancelled_is_not_counted(router: Router) -> None:
    errors: list[object] = []

    async def go_away() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        task = asyncio.ensure_future(router.handle(Request("GET", "/v1/clients", 0)))  # type: ignore[arg-type]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(go_away())
    assert errors == []
    assert router.counter.counts().answers == {}


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("reference", 200, "ok\n"),
        ("disabled", 200, "ok\n"),
        ("troubled", 503, None),
        ("gone", 503, f"GPU {snapshots.P40.uuid}: its GPU is no longer present\n"),
        ("lost", 503, "GPU 00:06.0 (Tesla P40): the GPU is lost\n"),
    ],
)
def test_readiness_is_the_state_of_the_host(name: str, status: int, text: str | None) -> None:
    router = fake_services.router(Queries(snapshots.ALL[name], 1788000000.25, 4200))
    assert ask(router, "/healthz")[::2] == (200, b"ok\n")
    response = ask(router, "/readyz")
    assert (response.status, response.content_type) == (status, "text/plain; charset=utf-8")
    lines = response.body.decode()
    if text is None:
        assert lines
        assert all(": " in line for line in lines.splitlines()), "each names what it is about"
    else:
        assert lines == text
