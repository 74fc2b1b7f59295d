"""Listeners that are opened, tried again and closed."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest
from yunion_mps.api.connection import Limits
from yunion_mps.api.query import Request, Response
from yunion_mps.api.routes import Answer
from yunion_mps.gateway.doors import Doors, listen

from integration.gateway_host import free_port


class Nothing:
    """Answers every request alike."""

    def answer(self, request: Request) -> Answer:
        return Response(200, "text/plain", request.target.encode())

    def hurry(self) -> None:
        """Nothing waits."""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else has."""
    with listen("127.0.0.1:0") as other:
        yield int(other.getsockname()[1])


def answers(address: str) -> bool:
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET) as client:
        return client.connect_ex((host.strip("[]"), int(port))) == 0


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_a_port_in_use_is_said_once_however_often_it_is_tried(
    taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def try_thrice() -> None:
        doors = Doors({"metrics_listen": Nothing()})
        for _ in range(3):
            await doors.follow({"metrics_listen": f"127.0.0.1:{taken}"})
        await doors.follow({})

    asyncio.run(try_thrice())
    (said,) = errors(caplog)
    place = f"metrics_listen is 127.0.0.1:{taken}"
    assert said.startswith(f"{place}, where nothing can be served: Address already in use")


def test_another_trouble_is_said_as_well(taken: int, caplog: pytest.LogCaptureFixture) -> None:
    async def try_both() -> None:
        doors = Doors({"metrics_listen": Nothing()})
        await doors.follow({"metrics_listen": f"127.0.0.1:{taken}"})
        await doors.follow({"metrics_listen": "192.0.2.1:9434"})  # nobody has this address (RFC 5737)
        await doors.follow({})

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
        doors = Doors({"metrics_listen": Nothing()})
        for wanted in ({"metrics_listen": address}, {"metrics_listen": address}, {}):
            await doors.follow(wanted)
            seen.append(await asyncio.get_running_loop().run_in_executor(None, answers, address))
            for _ in range(5):  # the turns that asyncio takes to begin a connection, which it forgets else
                await asyncio.sleep(0)

    asyncio.run(open_and_close())
    assert seen == [True, True, False]


def test_a_key_that_nobody_answers_for_opens_nothing(taken: int) -> None:
    asyncio.run(Doors({}).follow({"web_listen": f"127.0.0.1:{taken}"}))


def test_one_address_cannot_take_the_connections_of_others() -> None:
    async def ask(source: str, port: int) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        return await reader.readline(), writer

    async def crowd() -> None:
        port, most = free_port(), Limits().of_one_user
        doors = Doors({"web_listen": Nothing()})
        await doors.follow({"web_listen": f"127.0.0.1:{port}"})
        told = [await ask("127.0.0.1", port) for _ in range(most + 1)]
        assert [line.split()[1] for line, _ in told] == [b"200"] * most + [b"503"]
        other = await ask("127.0.0.2", port)
        assert other[0].split()[1] == b"200"
        for _, writer in [*told, other]:
            writer.close()
        await doors.follow({})

    asyncio.run(crowd())
