"""The running daemon keeps to the OpenAPI document that it serves, whatever it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from yunion_mps.api.openapi import document

from integration.daemon_host import Daemon
from integration.unix_session import unix_session
from simhost import SimHost

BASE = "http://localhost"
GPUS = [{"kind": "h100", "count": 2, "numa_node": 1}, {"kind": "tesla-p40", "virtual_number": 2}]
#: The same questions in every run: those at the boundaries, and a few at random for every operation.
SETTINGS: dict[str, Any] = {
    "seed": 1,
    "generation": {"mode": "all", "max-examples": 20, "deterministic": True, "database": "none"},
    "checks": {"enabled": True, "max_response_time": 30},
    "cache": {"enabled": False},
    "analysis": {"constants": {"enabled": False}},
}

api = schemathesis.openapi.from_dict(document(), config=schemathesis.Config.from_dict(SETTINGS))


@pytest.fixture(scope="module")
def daemon_of_three() -> Iterator[Daemon]:
    """A daemon on a host with GPUs of two kinds."""
    with SimHost.create(GPUS) as host, Daemon(host) as daemon:
        yield daemon.start().wait_ready()
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.fixture(scope="module")
def session(daemon_of_three: Daemon) -> Iterator[requests.Session]:
    with unix_session(daemon_of_three.socket_path) as session:
        yield session


def test_the_daemon_serves_the_document_that_the_others_here_are_held_to(session: requests.Session) -> None:
    assert session.get(f"{BASE}/v1/openapi.json").json() == document()


@api.parametrize()
def test_the_daemon_answers_every_request_as_its_document_says(
    case: schemathesis.Case[Any], session: requests.Session
) -> None:
    case.call_and_validate(base_url=BASE, session=session)


def test_no_method_that_writes_changes_anything(daemon_of_three: Daemon, session: requests.Session) -> None:
    before = daemon_of_three.status()
    for path in document()["paths"]:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = session.request(method, BASE + path.replace("{id}", "00:06.0-1"), json={"a": 1})
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert daemon_of_three.status() == before
