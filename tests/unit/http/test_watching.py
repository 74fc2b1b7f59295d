"""Devices are watchable: an answer has an ETag, and a request may wait for another answer."""

from __future__ import annotations

import pytest

from integration.daemon_host import eventually
from unit.http import snapshots
from unit.http.server_host import Answer, RawClient, ServerHost, request

DEVICES = "/v1/devices?limit=0"


def etag_of(host: ServerHost, target: str = DEVICES) -> str:
    return host.ask("GET", target).headers["etag"]


def known(etag: str) -> str:
    return f"If-None-Match: {etag}"


def change(host: ServerHost, *, state: str) -> None:
    """The domain goes into this state, as a tick of the daemon finds."""

    async def work() -> None:
        after = snapshots.snapshot(snapshots.P40, state=state)
        host.snapshot = after._replace(version=host.snapshot.version + 1)
        host.service.changes.notify()

    host.call(work())


def watching(host: ServerHost, wait_s: int = 60, count: int = 1) -> list[RawClient]:
    """Clients that have the devices, and wait for a change."""
    head = request(f"{DEVICES}&wait_s={wait_s}", "GET", known(etag_of(host)))
    clients = [host.connect().send(head) for _ in range(count)]
    eventually(lambda: len(host.service.changes.waiting) == count, f"{count} that wait")
    return clients


def states(answer: Answer) -> set[str]:
    assert answer.status == 200
    return {one["state"] for one in answer.json()["isolated_devices"]}


def test_devices_that_the_caller_has_are_not_sent_again(host: ServerHost) -> None:
    etag = etag_of(host)
    for header in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = host.ask("GET", DEVICES, known(header))
        assert (answer.status, answer.headers["etag"], answer.body) == (304, etag, b"")
    assert host.ask("HEAD", DEVICES, known(etag)).status == 304
    assert host.ask("GET", DEVICES, known('"other"')).status == 200
    assert host.ask("GET", "/v1/devices?limit=1", known(etag)).status == 200, "another page"


def test_a_connection_stays_usable_after_304(host: ServerHost) -> None:
    with host.connect() as client:
        assert client.ask(DEVICES, known("*")).status == 304
        assert client.ask("/v1/gpus").status == 200


def test_a_change_of_the_devices_is_answered_at_once(host: ServerHost) -> None:
    clients = watching(host, count=3)
    change(host, state="backoff")
    assert [states(client.answer()) for client in clients] == [{"unavailable"}] * 3
    (client,) = watching(host)
    change(host, state="ready")
    assert states(client.answer()) == {"free"}


def test_an_unchanged_snapshot_wakes_no_request(host: ServerHost) -> None:
    (client,) = watching(host, 1)
    change(host, state="ready")
    answer = client.answer()
    assert answer.status == 304


def test_without_an_etag_nothing_is_waited_for(host: ServerHost) -> None:
    assert host.ask("GET", f"{DEVICES}&wait_s=600").status == 200
    assert host.ask("GET", f"{DEVICES}&wait_s=600", known('"other"')).status == 200


@pytest.mark.parametrize("wait_s", ["-1", "601", "x", ""])
def test_a_wait_has_bounds(host: ServerHost, wait_s: str) -> None:
    answer = host.ask("GET", f"{DEVICES}&wait_s={wait_s}", known("*"))
    assert answer.problem[:2] == (400, f"invalid value for wait_s: {wait_s!r}")


def test_a_disconnected_client_stops_waiting(host: ServerHost) -> None:
    (client,) = watching(host)
    client.close()
    eventually(lambda: not host.service.changes.waiting, "that none waits")


def test_a_handover_answers_waiting_requests(host: ServerHost) -> None:
    (client,) = watching(host)

    async def end() -> None:
        host.service.changes.close()

    host.call(end())
    assert client.answer().status == 304
