"""The running daemon keeps to the OpenAPI document that it serves, whatever it is asked.

What changes the daemon is asked for as well: without a changed file a reload changes nothing, and no process
is a client here. Only a re-exec is not asked for at random, because it ends connections: it has its own test.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from openapi_schema_validator import OAS31Validator
from requests.adapters import HTTPAdapter
from schemathesis.checks import load_all_checks
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi.checks import positive_data_acceptance
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool
from yunion_mps.http.openapi import document
from yunion_mps.http.operation import MAX_CHANGE_WAIT_S
from yunion_mps.http.operations import MAX_EVENT_WAIT_S, MAX_WAIT_S

from integration.daemon_host import Daemon, eventually
from simhost import SimHost

BASE = "http://localhost"
GPUS = [{"kind": "h100", "count": 2, "numa_node": 1}, {"kind": "tesla-p40", "virtual_number": 2}]
#: The same questions in every run: those at the boundaries, and a few at random for every operation.
SETTINGS: dict[str, Any] = {
    "seed": 1,
    "generation": {"mode": "all", "max-examples": 6, "deterministic": True, "database": "none"},
    "checks": {
        "enabled": True,
        "positive_data_acceptance": {"expected-statuses": ["2xx", "304", "403", "404", "409", "410", "423"]},
    },
    "cache": {"enabled": False},
    "analysis": {"constants": {"enabled": False}},
}

#: What is said of members that are right by themselves, but not together; a schema does not tell.
CONTRADICTION = re.compile("cannot be combined|mutually exclusive|requires|does not apply to kind name")

DOCUMENT: Any = document()
REEXEC = ("/v1/reexec", "post")
OPERATIONS = [
    (path, method)
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
    if (path, method) != REEXEC
]


@pytest.fixture(scope="module")
def daemon_of_three() -> Iterator[Daemon]:
    with SimHost.create(GPUS) as host, Daemon(host) as daemon:
        yield daemon.start().wait_ready()
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.fixture(scope="module")
def api() -> Any:
    return schemathesis.openapi.from_dict(DOCUMENT, config=schemathesis.Config.from_dict(SETTINGS))


@pytest.fixture(scope="module")
def session(daemon_of_three: Daemon) -> Iterator[requests.Session]:
    with unix_session(daemon_of_three.socket_path) as session:
        yield session


def unix_session(path: Path) -> requests.Session:
    """A session that asks the server on this socket, whatever the URL's host."""

    class Connection(HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(60)
            self.sock.connect(str(path))

    class Adapter(HTTPAdapter):
        def get_connection_with_tls_context(self, *_: Any, **__: Any) -> HTTPConnectionPool:
            return pool

    pool = HTTPConnectionPool("localhost")
    pool.ConnectionCls = Connection
    session = requests.Session()
    session.trust_env = False  # no proxy stands between us and the socket
    session.mount("http://", Adapter())
    return session


def errors(schema: str, value: Any) -> list[str]:
    whole = {"$ref": f"#/components/schemas/{schema}", **DOCUMENT}
    return [f"{error.json_path}: {error.message}" for error in OAS31Validator(whole).iter_errors(value)]


def test_the_daemon_serves_the_document_that_the_others_here_are_held_to(session: requests.Session) -> None:
    assert session.get(f"{BASE}/v1/openapi.json").json() == DOCUMENT


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_daemon_answers_every_request_as_its_document_says(
    api: Any, session: requests.Session, path: str, method: str
) -> None:
    """Do what `@api.parametrize()` does, which would cost each worker of pytest 1.5 s to collect."""
    load_all_checks()
    test = build_operation_test(
        config=api.config,
        operation=api[path][method],
        test_func=check_answer,
        given_kwargs={},
        feedback=FeedbackSources(),
    )
    test(session=session)


def check_answer(case: schemathesis.Case[Any], session: requests.Session) -> None:
    # No wait is as right as a long one, and a test does not wait a minute for nothing.
    if case.query and str(case.query.get("wait_s", "")).isdigit():
        longest_s = MAX_EVENT_WAIT_S if case.path == "/v1/events" else MAX_CHANGE_WAIT_S
        case.query["wait_s"] = 0 if int(case.query["wait_s"]) <= longest_s else case.query["wait_s"]
    body: Any = case.body
    if isinstance(body, dict) and body.get("wait_s") in range(1, MAX_WAIT_S + 1):
        body["wait_s"] = 0
    response = case.call(base_url=BASE, session=session)
    contradicts = response.status_code == 400 and CONTRADICTION.search(response.text)
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if contradicts else [])


def test_the_program_after_a_reexec_answers_as_the_document_says(daemon_of_three: Daemon) -> None:
    before, last = daemon_of_three.status(), daemon_of_three.get("/v1/events")[1]["last"]
    with unix_session(daemon_of_three.socket_path) as session:
        answer = session.post(f"{BASE}/v1/reexec")
    assert answer.status_code == 200
    assert errors("Reexec", answer.json()) == []
    assert answer.json()["pid"] == daemon_of_three.pid

    def is_ready() -> bool:
        events = daemon_of_three.get(f"/v1/events?after={last}&kind=daemon")[1]["events"]
        return any(event["what"].startswith("ready") for event in events)

    eventually(is_ready, "the new program", trouble=lambda: daemon_of_three.log)
    assert daemon_of_three.status()["domains"] == before["domains"]
    assert errors("Status", daemon_of_three.status()) == []
    assert errors("EventList", daemon_of_three.get("/v1/events?limit=1000")[1]) == []
