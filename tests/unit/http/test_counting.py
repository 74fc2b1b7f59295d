"""Answers are counted by route, and by nothing that an asker could invent."""

from __future__ import annotations

import asyncio
import re

import pytest
from yunion_mps.http.counting import OTHER, Counting, Counts, route_of
from yunion_mps.http.deferred import Deferred
from yunion_mps.http.openapi import document
from yunion_mps.http.query import Request, Response
from yunion_mps.http.routes import Answer, Router
from yunion_mps.service.metrics import BOUNDS_S
from yunion_mps.service.queries import Service

from unit.http import by_hand, snapshots


def ask(counting: Counting, target: str, method: str = "GET") -> Response:
    async def answer() -> Response:
        found: Answer = counting.answer(Request(method, target, 0))
        response = found if isinstance(found, Response) else await found
        await asyncio.sleep(0)  # what is called at its end comes a turn later
        return response

    return asyncio.run(answer())


def counting() -> tuple[Counting, Counts]:
    service = Service(snapshots.reference, 1788000000.25, 4200)
    parts = (by_hand.Changes(), by_hand.People(), by_hand.Giver(), by_hand.Meter())
    counts = Counts()
    return Counting(Router(service, Deferred(service, *parts)), counts), counts


@pytest.mark.parametrize("path", document()["paths"])
def test_each_path_of_the_api_is_a_route(path: str) -> None:
    target = re.sub(r"{\w+}", "4260", path)
    assert route_of(target) == path
    assert route_of(f"{target}?limit=4") == path


@pytest.mark.parametrize(
    "target", ["/", "/v1", "/v2/devices", "/v1/devices/", "/v1/devices/a/b", "/v1/leases/a/b/renew", "*", ""]
)
def test_all_else_is_one_route_together(target: str) -> None:
    assert route_of(target) == OTHER


def test_answers_are_counted_by_route_method_and_status() -> None:
    subject, counts = counting()
    for device in ("00:06.0-1", "00:06.0-2", "nothing"):
        ask(subject, f"/v1/devices/{device}")
    ask(subject, "/v1/events?limit=0")
    ask(subject, "/v1/status", "BREW")
    assert counts.counted().answers == {
        ("/v1/devices/{id}", "GET", 200): 2,
        ("/v1/devices/{id}", "GET", 404): 1,
        ("/v1/events", "GET", 400): 1,
        ("/v1/status", "other", 405): 1,
    }


def test_each_answers_time_is_in_one_bucket() -> None:
    subject, counts = counting()
    for _ in range(3):
        ask(subject, "/v1/clients")
    latency = counts.counted().latencies["/v1/clients"]
    assert len(latency.counts) == len(BOUNDS_S) + 1
    assert sum(latency.counts) == 3
    assert 0 < latency.sum_s < 60


def test_an_answer_whose_asker_went_away_is_not_counted() -> None:
    subject, counts = counting()

    troubles: list[object] = []

    async def go_away() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        task = asyncio.ensure_future(subject.answer(Request("GET", "/v1/clients", 0)))  # type: ignore[arg-type]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(go_away())
    assert troubles == []
    assert counts.counted().answers == {}
