"""Listeners that are opened, tried again and closed."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest
from yunion_mps.gateway.server import LIMITS, Listeners, listen
from yunion_mps.http.connection import Limits
from yunion_mps.http.messages import Answer, Request, Response

from integration.gateway_host import free_port


class Nothing:
    """Answers every request alike."""

    def answer(self, request: Request) -> Answer:
        return Response(200, "text/plain", request.target.encode())

    def hurry(self) -> None:
        """Nothing waits."""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use."""
    with listen("127.0.0.1:0") as other:
        yield int(other.getsockname()[1])


def answers(address: str) -> bool:
    """Whether the address is served."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET) as client:
        return client.connect_ex((host.strip("[]"), int(port))) == 0


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_a_port_in_use_is_said_once_however_often_it_is_tried(
    taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def try_thrice() -> None:
        listeners = Listeners({"metrics_listen": Nothing()})
        for _ in range(3):
            await listeners.follow({"metrics_listen": f"127.0.0.1:{taken}"})
        await listeners.follow({})

    asyncio.run(try_thrice())
    (said,) = errors(caplog)
    place = f"metrics_listen is 127.0.0.1:{taken}"
    assert said.startswith(f"{place}, where nothing can be served: Address already in use")


def test_another_trouble_is_said_as_well(taken: int, caplog: pytest.LogCaptureFixture) -> None:
    async def try_both() -> None:
        listeners = Listeners({"metrics_listen": Nothing()})
        await listeners.follow({"metrics_listen": f"127.0.0.1:{taken}"})
        await listeners.follow({"metrics_listen": "192.0.2.1:9434"})  # no host has this address (RFC 5737)
        await listeners.follow({})

    asyncio.run(try_both())
    assert [line.partition(": ")[2].partition(";")[0] for line in errors(caplog)] == [
        "Address already in use",
        "Cannot assign requested address",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_it_is_open_while_it_is_wanted(host: str) -> None:
    address = f"{host}:{free_port()}"
    seen = []

    async def open_and_close() -> None:
        listeners = Listeners({"metrics_listen": Nothing()})
        for wanted in ({"metrics_listen": address}, {"metrics_listen": address}, {}):
            await listeners.follow(wanted)
            seen.append(await asyncio.get_running_loop().run_in_executor(None, answers, address))
            for _ in range(5):  # the turns that asyncio takes to begin a connection, which it forgets else
                await asyncio.sleep(0)

    asyncio.run(open_and_close())
    assert seen == [True, True, False]


def test_a_key_without_a_handler_opens_nothing(taken: int) -> None:
    asyncio.run(Listeners({}).follow({"web_listen": f"127.0.0.1:{taken}"}))


@pytest.mark.parametrize("says", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"])
def test_connections_that_do_nothing_shut_no_client_out(says: bytes) -> None:
    """All users of this host are one client at 127.0.0.1; silent, half-open and idle connections give way."""

    async def crowd() -> list[bytes]:
        port = free_port()
        listeners = Listeners({"web_listen": Nothing()})
        await listeners.follow({"web_listen": f"127.0.0.1:{port}"})
        writers, lines = [], []
        for number in range(LIMITS.of_one_user + 20):
            is_served = number >= LIMITS.of_one_user
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" if is_served else says)
            if is_served:
                lines.append(await reader.readline())
            writers.append(writer)
        for writer in writers:
            writer.close()
        await listeners.follow({})
        return lines

    assert asyncio.run(crowd()) == [b"HTTP/1.1 200 \r\n"] * 20


def test_over_tcp_a_first_request_must_come_within_two_seconds() -> None:
    async def limits() -> Limits:
        listeners, key = Listeners({"web_listen": Nothing()}), "web_listen"
        await listeners.follow({key: f"127.0.0.1:{free_port()}"})
        found = listeners._open[key][1].pool.limits
        await listeners.follow({})
        return found

    assert asyncio.run(limits()).first_request_timeout_s == 2.0
