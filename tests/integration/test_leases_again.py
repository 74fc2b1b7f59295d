"""Asking again for a lease: after a lost answer, a restart of the daemon, or a moment in which it cannot."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest
from yunion_mps.client import Client
from yunion_mps.core.errors import YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.host.store import Store
from yunion_mps.leases.storage import LeaseStorage

from integration.daemon_host import Daemon, eventually
from integration.lease_host import ADDRESSES, Connection, leased_addresses, restart, take

pytestmark = pytest.mark.gpus({"kind": "v100"})

#: What the request is called.
FIRST = "a" * 32
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\n"
    b'Content-Length: 43\r\n\r\n{"detail": "too many connections are open"}'
)


class Between:
    """Stands between clients and the daemon, and does something else with a question for a lease, or another.

    `instead` is given what the daemon answered to it and returns what the client gets.
    """

    def __init__(
        self, daemon: Daemon, instead: list[Callable[[Callable[[], bytes]], bytes]], method: bytes = b"POST"
    ) -> None:
        self._begin = method + b" /v1/leases"
        self._real = daemon.socket_path.with_name("real.sock")
        daemon.socket_path.rename(self._real)
        self._instead = instead
        self.questions: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(daemon.socket_path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            with client:
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        question = client.recv(1 << 16)
        if question.startswith(self._begin) and b'"dry_run"' not in question:
            self.questions.append(question.partition(b" HTTP")[0])
            if self._instead:
                client.sendall(self._instead.pop(0)(lambda: self._forward(question)))
                return
        client.sendall(self._forward(question))

    def _forward(self, question: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as real:
            real.connect(str(self._real))
            real.sendall(question)
            return b"".join(iter(lambda: real.recv(1 << 16), b""))


@pytest.fixture
def messages(ready_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("YUNION_MPS_ROOT", str(ready_daemon.host.root))
    return []


@pytest.mark.parametrize("query", ["", "holder.name=a&holder.ttl_s=600&"])
def test_the_same_request_has_one_lease_however_often_it_is_made(ready_daemon: Daemon, query: str) -> None:
    with contextlib.closing(Connection(ready_daemon)) as connection:
        request = "/v1/leases", f"{query}Idempotency-Key={FIRST}"
        status, lease = connection.ask("POST", *request)
        assert status == 201
        status, again = connection.ask("POST", *request)
        assert (status, again["id"]) == (200, lease["id"])
        status, problem = connection.ask("POST", "/v1/leases", f"{request[1]}&count=2&across=true")
        assert (status, problem["code"]) == (409, "lease_exists")
        restart(ready_daemon)
        connection.close()
        assert connection.ask("POST", *request)[1]["id"] == lease["id"]
        assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
        assert connection.ask("DELETE", f"/v1/leases/{lease['id']}")[0] == 200
        assert connection.ask("POST", *request)[1]["id"] != lease["id"]


def test_a_renewal_is_known_to_the_next_daemon(ready_daemon: Daemon) -> None:
    def kept() -> float:
        paths = Paths(str(ready_daemon.host.root))
        with contextlib.closing(Store(paths)) as store:
            (lease,) = LeaseStorage(store).read()
        return lease.ends_s or 0.0

    take(ready_daemon, "holder.name=a&holder.ttl_s=600")
    before_s = kept()
    assert ready_daemon.ask("POST", "/v1/leases/a/renew")[0] == 200
    assert kept() > before_s


def test_a_repeated_request_ties_the_lease_to_its_own_connection(ready_daemon: Daemon) -> None:
    request = "/v1/leases", f"holder.kind=connection&Idempotency-Key={FIRST}"
    with contextlib.closing(Connection(ready_daemon)) as connection:
        connection.ask("POST", *request)
        restart(ready_daemon)
        connection.close()
        assert connection.ask("POST", *request)[0] == 200
        assert leased_addresses(ready_daemon) == [ADDRESSES[0]]
    eventually(lambda: leased_addresses(ready_daemon) == [], "its end")


@pytest.mark.parametrize("crashes", [False, True], ids=["lost", "crashed"])
def test_an_answer_that_is_lost_costs_no_second_device(
    ready_daemon: Daemon, messages: list[str], crashes: bool
) -> None:
    def lost(answer: Callable[[], bytes]) -> bytes:
        assert answer().startswith((b"HTTP/1.1 200", b"HTTP/1.1 201"))
        if crashes:
            restart(ready_daemon)
        return b""

    with contextlib.closing(Between(ready_daemon, [lost])) as between:
        lease = Client(messages.append).lease(wait_s=60)
        assert len(between.questions) == (1 if crashes else 2), "the next daemon is asked itself"
        (record,) = Client().leases()
        assert (record.id, record.devices) == (lease.id, (ADDRESSES[0],))
        lease.release()


def test_a_waiting_client_retries_while_the_daemon_is_busy(ready_daemon: Daemon, messages: list[str]) -> None:
    busy = [lambda _: _BUSY] * 3
    with contextlib.closing(Between(ready_daemon, [*busy])) as between:
        with pytest.raises(Exception, match="too many connections are open"):
            Client().lease()
        with Client(messages.append).lease(wait_s=60):
            assert len(between.questions) == 4
    assert len(messages) == 1, messages


def test_a_lease_is_released_although_the_daemon_is_temporarily_unable(
    ready_daemon: Daemon, messages: list[str]
) -> None:
    lease = Client(messages.append).lease()
    busy = [lambda _: _BUSY] * 3
    with contextlib.closing(Between(ready_daemon, [*busy], b"DELETE")) as between:
        lease.release()
        assert len(between.questions) == 4
        assert Client().leases() == []
    assert len(messages) == 2, "that it retries, and that the daemon is responding again"


def test_a_lease_that_could_not_be_given_back_can_be_later(ready_daemon: Daemon, messages: list[str]) -> None:
    def refused(_: Callable[[], bytes]) -> bytes:
        return _BUSY.replace(b"503 Service Unavailable", b"500 Internal Server Error")

    lease = Client(messages.append).lease()
    with contextlib.closing(Between(ready_daemon, [refused], b"DELETE")):
        with pytest.raises(YunionError):
            lease.release()
        assert [one.id for one in Client().leases()] == [lease.id]
        lease.release()
        assert Client().leases() == []
