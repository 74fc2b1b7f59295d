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
from yunion_mps.http.messages import Request, Response
from yunion_mps.http.operations import OPERATIONS, Operation
from yunion_mps.http.router import OTHER, Handlers, Router
from yunion_mps.service.metrics import BOUNDS_S
from yunion_mps.service.queries import Queries

from unit.http import by_hand, snapshots

Problem = tuple[int, str, "str | None"]


def ask(router: Router, target: str, method: str = "GET", body_bytes: int = 0) -> Response:
    async def answer() -> Response:
        found = router.answer(Request(method, target, 0, os.getpid(), body_bytes=body_bytes))
        response = found if isinstance(found, Response) else await found
        await asyncio.sleep(0)  # what is called at its end comes a turn later
        return response

    return asyncio.run(answer())


def problem(response: Response) -> Problem:
    """Status, detail and hint."""
    told = json.loads(response.body)
    return response.status, told["detail"], told.get("hint")


@pytest.fixture(scope="module")
def shared() -> Router:
    """One for the tests that do not count."""
    return by_hand.router(Queries(snapshots.reference, 1788000000.25, 4200))


@pytest.fixture
def router() -> Router:
    return by_hand.router(Queries(snapshots.reference, 1788000000.25, 4200))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_each_path_of_the_api_is_a_route(router: Router, operation: Operation[Any]) -> None:
    target = re.sub(r"{\w+}", "4260", operation.path)
    for shown in (target, f"{target}?x=1", f"http://localhost{target}"):
        ask(router, shown, operation.method)
    assert {route for route, _, _ in router.counted().answers} == {operation.path}


@pytest.mark.parametrize(
    "target",
    [
        *("/", "/v1", "/v1/", "/v2/devices", "/v1/Status", "*", "http://[", "//[/v1/gpus", "http://]/"),
        *("/v1/devices/", "/v1/devices/a/b", "/v1/devices/{id}/", "/v1/leases/a/b/renew"),
        *(f"/v1/clients/{pid}/terminate" for pid in ("", "x", "-1", "1.5", "4260/x", "%34", "9" * 11)),
        f"/v1/clients/{'9' * 5000}/terminate",
    ],
)  # fmt: skip
def test_all_else_is_nowhere_and_one_route_together(router: Router, target: str) -> None:
    for method in ("GET", "POST", "BREW"):
        status, detail, hint = problem(ask(router, target, method))
        if "[" in target or "]" in target:
            found = (400, "the request's target is no URL that can be taken apart", None)
            assert (status, detail, hint) == found
        else:
            assert (status, hint) == (404, "the paths are in /v1/openapi.json")
            assert detail == f"there is nothing at {target[:200]!r}"
    assert set(router.counted().latencies) == {OTHER}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_each_operation_has_a_handler_that_takes_its_parameters(operation: Operation[Any]) -> None:
    signature = inspect.signature(getattr(Handlers, operation.name))
    named = {one.name for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY}
    assert named == {parameter.name for parameter in operation.parameters}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.name)
def test_the_type_of_an_answer_and_its_schema_have_one_name(operation: Operation[Any]) -> None:
    declared = operations.__annotations__[operation.name.upper()]
    untyped = "str" if operation.is_text else "Any"
    assert declared == f"Operation[{f'answers.{operation.answer}' if operation.answer else untyped}]"
    if operation.answer:
        handler = getattr(Handlers, operation.name)
        assert handler.__annotations__["return"] == f"answers.{operation.answer}"
        assert hasattr(answers, operation.answer)


def test_no_handler_is_without_an_operation() -> None:
    handlers = {name for name, one in vars(Handlers).items() if inspect.isfunction(one) and name[0] != "_"}
    assert handlers == {operation.name for operation in OPERATIONS}


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FETCH"])
@pytest.mark.parametrize("path", operations.ROUTES)
def test_other_methods_are_refused_with_the_ones_that_are_allowed(
    shared: Router, path: str, method: str
) -> None:
    refused = ask(shared, re.sub(r"{\w+}", "4260", path) + "?x#y", method)
    assert problem(refused) == (405, f"{method} is not supported here", None)
    allowed = set(operations.ROUTES[path])
    assert set(dict(refused.headers)["Allow"].split(", ")) == allowed


def whole(lowest: int, highest: int) -> str:
    return f"write a whole number from {lowest} to {highest}"


NO_QUERY, AS_PAIRS = "the query cannot be taken apart", "write it as name=value&name=value"
FILTERS = "addr, dev_type, device_path, limit, model, numa_node, offset, unused, vendor_device_id"
KINDS = "write one of domain, limit, gpu, compute_mode, configuration, client, lease, daemon"
A_TIME = "write an RFC 3339 time such as 2026-11-20T13:45:00Z, or seconds since 1970"
REQUEST = "write 16 to 64 letters, digits and -, at random"


@pytest.mark.parametrize(
    ("method", "target", "detail", "hint"),
    [
        *(
            ("GET", f"/v1/devices?limit={text}", f"limit is {shown!r}", whole(0, 100000))
            for text, shown in zip(
                ("x", "-1", "100001", "1.0", "", "%D9%A3"), ("x", "-1", "100001", "1.0", "", "٣")
            )
        ),
        ("GET", "/v1/devices?offset=2147483648", "offset is '2147483648'", whole(0, 2147483647)),
        ("GET", "/v1/devices?numa_node=none", "numa_node is 'none'", whole(-1, 2147483647)),
        ("GET", "/v1/devices?numa_node=-2", "numa_node is '-2'", whole(-1, 2147483647)),
        ("GET", "/v1/devices?unused=1", "unused is '1'", "write unused=true or unused=false"),
        ("GET", "/v1/devices?limit=1&limit=2", "a parameter is given twice", None),
        ("GET", "/v1/devices?adress=00:06.0", "'adress' is no parameter", f"the parameters are {FILTERS}"),
        ("GET", "/v1/devices?limit", NO_QUERY, AS_PAIRS),
        ("GET", "/v1/devices?" + "&".join(f"x{n}=1" for n in range(33)), NO_QUERY, AS_PAIRS),
        *(
            ("GET", f"/v1/{path}?limit=1", "'limit' is no parameter", "there are none here")
            for path in ("devices/00:06.0-1", "gpus", "status", "openapi.json", "plan")
        ),
        ("GET", "/v1/events?wait=61", "wait is '61'", whole(0, 60)),
        ("GET", "/v1/events?limit=0", "limit is '0'", whole(1, 1000)),
        ("GET", "/v1/events?limit=1001", "limit is '1001'", whole(1, 1000)),
        ("GET", "/v1/events?since=-1", "since is '-1'", A_TIME),
        ("GET", "/v1/events?after=x", "after is 'x'", whole(0, 2147483647)),
        ("GET", "/v1/events?kind=gpus", "kind is 'gpus'", KINDS),
        ("GET", "/v1/events?kind=", "kind is ''", KINDS),
        ("POST", "/v1/reload?force=true", "'force' is no parameter", "the parameters are drain, now"),
        ("POST", "/v1/reload?now=1", "now is '1'", "write now=true or now=false"),
        ("POST", "/v1/reexec?x", NO_QUERY, AS_PAIRS),
        ("POST", "/v1/clients/1/terminate?force=", "force is ''", "write force=true or force=false"),
        ("POST", "/v1/leases?count=0", "count is '0'", whole(1, 64)),
        ("POST", "/v1/leases?placement=best", "placement is 'best'", "write one of binpack, spread"),
        ("POST", "/v1/leases?binding=hope", "binding is 'hope'",
         "write one of process, connection, name, container"),
        ("POST", "/v1/leases?name=a%20b&ttl=1", "name is 'a b'", operations._NAME_HINT),
        *(
            ("POST", f"/v1/leases?request={text}", f"request is {text!r}", REQUEST)
            for text in ("", "short", "../../../../../etc/passwd", "a" * 65)
        ),
    ],
)  # fmt: skip
def test_a_bad_query_is_refused_by_name(
    shared: Router, method: str, target: str, detail: str, hint: str | None
) -> None:
    assert problem(ask(shared, target, method)) == (400, detail, hint)


TOGETHER = "count, device, memory and units exclude each other"
NEEDS = "a lease of a name needs both its name and its time to live"
LEAVE_OUT = "leave one of them out"


@pytest.mark.parametrize(
    ("query", "detail", "hint"),
    [
        ("count=2&device=00:06.0-1", TOGETHER, "give one"),
        ("memory=1&units=1", TOGETHER, "give one"),
        ("across=true", "across wants several devices, and count is 1", "write count=2 or more"),
        ("name=job", NEEDS, "write name=job-17&ttl=600, in seconds"),
        ("ttl=1&binding=name", NEEDS, "write name=job-17&ttl=600, in seconds"),
        ("name=a&ttl=9&command=b", "command does not go with binding=name", LEAVE_OUT),
        ("ttl=5", "ttl goes with binding=name only", LEAVE_OUT),
        ("name=a&binding=process", "name goes with binding=name only", LEAVE_OUT),
        ("binding=connection&pid=1", "pid goes with binding=process only", None),
    ],
)
def test_parameters_of_a_lease_that_contradict_each_other_are_refused(
    shared: Router, query: str, detail: str, hint: str | None
) -> None:
    assert problem(ask(shared, f"/v1/leases?{query}", "POST")) == (409, detail, hint)


def test_a_lease_is_not_asked_for_in_a_body(shared: Router) -> None:
    found = problem(ask(shared, "/v1/leases", "POST", body_bytes=9))
    assert found == (400, "a body is not read here", "write it as parameters: /v1/leases?name=a&ttl=60")


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
def test_a_device_of_a_strange_name_is_not_there(shared: Router, name: str) -> None:
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
    assert router.counted().answers == {
        ("/v1/devices/{id}", "GET", 200): 2,
        ("/v1/devices/{id}", "GET", 404): 1,
        ("/v1/events", "GET", 400): 1,
        ("/v1/status", "other", 405): 1,
    }


def test_each_answers_time_is_in_one_bucket(router: Router) -> None:
    for _ in range(3):
        ask(router, "/v1/clients")
    latency = router.counted().latencies["/v1/clients"]
    assert len(latency.counts) == len(BOUNDS_S) + 1
    assert sum(latency.counts) == 3
    assert 0 < latency.sum_s < 60


def test_an_answer_that_was_cancelled_is_not_counted(router: Router) -> None:
    errors: list[object] = []

    async def go_away() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        task = asyncio.ensure_future(router.answer(Request("GET", "/v1/clients", 0)))  # type: ignore[arg-type]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(go_away())
    assert errors == []
    assert router.counted().answers == {}
