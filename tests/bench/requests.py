"""One request to the daemon, on a kept and on a new connection, and 10,000 from 50 clients at once."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.asking import Http, request_for
from bench.running import running
from bench.values import BenchError, Line, Rounds, Settings

GROUP = "request"
FLOOR = "an asyncio server that answers as many bytes"
TARGET = "/v1/devices"
CLIENTS = 50
REQUESTS = 10_000
_ECHO = Path(__file__).with_name("echo.py")


def lines(settings: Settings) -> Iterator[Line]:
    with running(1) as daemon:
        with Http(daemon.socket) as http:
            body, size = http.ask(TARGET)
        with _echo(str(daemon.host.root / "echo.sock"), size) as echo:
            question = request_for(TARGET)
            servers = {"daemon": daemon.socket, "floor": echo}
            with Http(daemon.socket) as ours, Http(echo) as theirs:
                if not ours.exchange(question, size).endswith(body):
                    raise BenchError(f"{TARGET} was not answered the same twice")
                kept = Rounds("us")
                kept.run(
                    settings.rounds(5000, 1000),
                    [
                        ("daemon", partial(_kept_us, ours, question, size)),
                        ("floor", partial(_kept_us, theirs, question, size)),
                    ],
                )
            fresh = Rounds("us")
            fresh.run(
                settings.rounds(3000, 600),
                [(name, partial(_fresh_us, path, question, size)) for name, path in servers.items()],
            )
            many = Rounds("ms")
            many.run(
                settings.rounds(5, 1),
                [(name, partial(_many_ms, path, question, size)) for name, path in servers.items()],
            )
    for what, rounds in (
        (f"{TARGET} on a kept connection", kept),
        (f"{TARGET} on a new connection", fresh),
        (f"{REQUESTS:,} times {TARGET} from {CLIENTS} clients", many),
    ):
        yield Line(GROUP, what, rounds.of("daemon"), rounds.of("floor"), f"{FLOOR} ({size:,})")


def _kept_us(http: Http, question: bytes, size: int) -> float:
    begin_s = time.perf_counter()
    http.exchange(question, size)
    return (time.perf_counter() - begin_s) * 1e6


def _fresh_us(path: str, question: bytes, size: int) -> float:
    begin_s = time.perf_counter()
    with Http(path) as http:
        http.exchange(question, size)
    return (time.perf_counter() - begin_s) * 1e6


def _many_ms(path: str, question: bytes, size: int) -> float:
    """50 clients, each with its next question as soon as it has its answer; one thread serves them all."""
    left = {}
    missing = {}
    poll = select.epoll()
    with contextlib.ExitStack() as stack:
        stack.callback(poll.close)
        begin_s = time.perf_counter()
        clients: dict[int, socket.socket] = {}
        for _ in range(CLIENTS):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.connect(path)
            number = client.fileno()
            clients[number], left[number], missing[number] = client, REQUESTS // CLIENTS, size
            poll.register(number, select.EPOLLIN)
            client.sendall(question)
        while clients:
            for number, _ in poll.poll(60) or [(-1, 0)]:
                got = len(clients[number].recv(missing[number])) if number >= 0 else 0
                if not got:
                    raise BenchError(f"{path} does not answer every client")
                missing[number] -= got
                if missing[number]:
                    continue
                left[number] -= 1
                if left[number]:
                    missing[number] = size
                    clients[number].sendall(question)
                else:
                    poll.unregister(number)
                    del clients[number]
        return (time.perf_counter() - begin_s) * 1000


@contextlib.contextmanager
def _echo(path: str, size: int) -> Iterator[str]:
    argv = [sys.executable, "-I", str(_ECHO), path, str(size)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None or server.stdout.readline() != "listening\n":
                raise BenchError("the echo server did not start")
            yield path
        finally:
            server.kill()
