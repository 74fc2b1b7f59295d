"""Listeners that are opened, tried again and closed, and the names under which they answer."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from pathlib import Path

import pytest
from yunion_mps.core.paths import Paths
from yunion_mps.gateway.server import LIMITS, HostNames, Listeners
from yunion_mps.http.listener import listen_on
from yunion_mps.http.messages import EventualResponse, Request, Response

from clocks import SkippingLoop
from integration.gateway_host import free_port


class Nothing:
    """Answers every request alike."""

    def handle(self, request: Request) -> EventualResponse:
        return Response(200, "text/plain", request.target.encode())


class Waits:
    """Answers every request alike, but for `/wait`, which waits for an event that never comes."""

    def handle(self, request: Request) -> EventualResponse:
        if request.target != "/wait":
            return Response(200, "text/plain", b"")
        request.await_event()
        return asyncio.get_running_loop().create_future()


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET) as client:
        return client.connect_ex((host.strip("[]"), int(port))) == 0


def test_an_address_in_use_is_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    async def follow() -> bool:
        listeners = Listeners({"metrics_listen": Nothing()})
        with listen_on("127.0.0.1:0") as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            # No host has the second address (RFC 5737), and no handler is for the other key.
            for address in (taken, taken, "192.0.2.1:9434", taken):
                await listeners.update({"metrics_listen": address, "web_listen": taken})
        await listeners.update({"metrics_listen": taken})
        is_open = await asyncio.get_running_loop().run_in_executor(None, answers, taken)
        await listeners.update({})
        return is_open

    assert asyncio.run(follow())
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [re.sub(r"127.0.0.1:\d+", "IT", line) for line in said] == [
        f"metrics_listen: cannot listen on {where}: {why}; trying again every 2 s. "
        "Choose another port in host.conf"
        for where, why in (
            ("IT", "Address already in use"),
            ("192.0.2.1:9434", "Cannot assign requested address"),
            ("IT", "Address already in use"),
        )
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_it_is_open_while_it_is_configured(host: str) -> None:
    address = f"{host}:{free_port()}"
    seen = []

    async def open_and_close() -> None:
        listeners = Listeners({"metrics_listen": Nothing()})
        for listening in ({"metrics_listen": address}, {"metrics_listen": address}, {}):
            await listeners.update(listening)
            seen.append(await asyncio.get_running_loop().run_in_executor(None, answers, address))
            for _ in range(5):  # the turns that asyncio takes to begin a connection, which it forgets else
                await asyncio.sleep(0)

    asyncio.run(open_and_close())
    assert seen == [True, True, False]


@pytest.mark.parametrize(
    "says",
    [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"GET /wait HTTP/1.1\r\nHost: here\r\n\r\n"],
    ids=["silent", "half-open", "idle", "waiting"],
)
def test_idle_connections_do_not_block_other_clients(says: bytes) -> None:
    """All users of this host are one client at 127.0.0.1; connections that do nothing give way."""

    async def crowd() -> list[bytes]:
        port = free_port()
        listeners = Listeners({"web_listen": Waits()})
        await listeners.update({"web_listen": f"127.0.0.1:{port}"})
        writers, lines = [], []
        for number in range(LIMITS.per_user + 20):
            is_served = number >= LIMITS.per_user
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" if is_served else says)
            if is_served:
                lines.append(await reader.readline())
            writers.append(writer)
        for writer in writers:
            writer.close()
        await listeners.update({})
        return lines

    assert asyncio.run(crowd()) == [b"HTTP/1.1 200 \r\n"] * 20


def test_over_tcp_a_first_request_must_come_within_two_seconds() -> None:
    async def half_a_request() -> tuple[bytes, float]:
        port, clock = free_port(), asyncio.get_running_loop()
        listeners = Listeners({"web_listen": Nothing()})
        await listeners.update({"web_listen": f"127.0.0.1:{port}"})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connected_s = clock.time()
        writer.write(b"GET / HTT")
        answer = await reader.readline()
        answered_s = clock.time()
        writer.close()
        await listeners.update({})
        return answer, answered_s - connected_s

    loop = SkippingLoop()
    answer, within_s = loop.run_until_complete(half_a_request())
    loop.close()
    assert answer == b"HTTP/1.1 408 \r\n"
    assert within_s == pytest.approx(2.0)


NODE = os.uname().nodename.lower()
HOSTS = f"""\
127.0.0.1 localhost localhost.localdomain
127.0.1.1 {NODE}.Example.COM {NODE}   # monitored.example
10.0.0.9  other.example
"""


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        (f"{NODE}:9434", True), (f"{NODE}.example.com:9434", True), ("localhost.localdomain", True),
        ("192.0.2.1:9434", True), ("[::1]:9434", True),
        (f"{NODE}.example.org", False), ("other.example", False), ("monitored.example", False),
        ("127.0.1.1.example", False), ("", False),
    ],
)  # fmt: skip
def test_names_of_this_host_are_its_own_and_those_beside_them_in_hosts(
    tmp_path: Path, host: str, is_ours: bool
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hosts").write_text(HOSTS)
    refusal = HostNames(Paths(str(tmp_path))).refusal(host, "the metrics are")
    assert (refusal and refusal.status) == (None if is_ours else 421)
