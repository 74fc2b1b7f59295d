"""Answers are counted by route, and by nothing that an asker could invent."""

from __future__ import annotations

import asyncio
import inspect
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


def ask(router: Router, target: str, method: str = "GET") -> Response:
    async def answer() -> Response:
        found = router.answer(Request(method, target, 0, os.getpid()))
        response = found if isinstance(found, Response) else await found
        await asyncio.sleep(0)  # what is called at its end comes a turn later
        return response

    return asyncio.run(answer())


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
        *("/", "/v1", "/v2/devices", "/v1/devices/", "/v1/devices/a/b", "/v1/devices/{id}/"),
        *("/v1/leases/a/b/renew", "/v1/clients/x/terminate", "*", "http://["),
    ],
)
def test_all_else_is_one_route_together(router: Router, target: str) -> None:
    ask(router, target)
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
    assert declared == f"Operation[{operation.answer or untyped}]"
    if operation.answer:
        handler = getattr(Handlers, operation.name)
        assert handler.__annotations__["return"] == f"answers.{operation.answer}"
        assert hasattr(answers, operation.answer)


def test_no_handler_is_without_an_operation() -> None:
    handlers = {name for name, one in vars(Handlers).items() if inspect.isfunction(one) and name[0] != "_"}
    assert handlers - {"hurry"} == {operation.name for operation in OPERATIONS}


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
    troubles: list[object] = []

    async def go_away() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        task = asyncio.ensure_future(router.answer(Request("GET", "/v1/clients", 0)))  # type: ignore[arg-type]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(go_away())
    assert troubles == []
    assert router.counted().answers == {}
