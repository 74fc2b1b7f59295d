"""Requests: one, many at once, leases, and a scrape of the metrics with what others notice of it."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.programs import memory_mib
from bench.running import Daemon, Http, request_for, running
from bench.values import Aim, BenchError, Line, Rounds, Samples, Settings
from waiting import readable

_REQUEST_FLOOR = "an asyncio server that answers as many bytes"
TARGET = "/v1/devices"
CLIENTS = 50
REQUESTS = 10_000
_ECHO = Path(__file__).with_name("echo.py")


def request_lines(settings: Settings) -> Iterator[Line]:
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
        yield Line(what, rounds.of("daemon"), rounds.of("floor"), f"{_REQUEST_FLOOR} ({size:,})")


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


_LEASE_FLOOR = "/v1/devices twice, on such connections"
_WITHIN = "one client, one lease after another"


def lease_lines(settings: Settings) -> Iterator[Line]:
    """Two lines each for a kept connection and for new ones."""
    with running(1) as daemon, Http(daemon.socket) as kept:
        rounds = Rounds("us")
        steps: list[tuple[str, Callable[[], float]]] = [
            ("kept", partial(_lease_us, lambda target, method: kept.ask(target, method)[0])),
            ("kept floor", partial(_floor_us, lambda target, method: kept.ask(target, method)[0])),
            ("new", partial(_lease_us, partial(_ask_newly, daemon.socket))),
            ("new floor", partial(_floor_us, partial(_ask_newly, daemon.socket))),
        ]
        rounds.run(settings.rounds(1000, 200), steps)
    for name, where in (("kept", "on a kept connection"), ("new", "on new connections")):
        measured = rounds.of(name)
        yield Line(f"a lease taken and released {where}", measured, rounds.of(f"{name} floor"), _LEASE_FLOOR)
        a_second = Samples(tuple(1e6 / taken_us for taken_us in measured.values), "/s")
        yield Line(f"leases {where}", a_second, None, _WITHIN)


Ask = Callable[[str, str], bytes]


def _lease_us(ask: Ask) -> float:
    begin_s = time.perf_counter()
    lease = json.loads(ask("/v1/leases", "POST"))
    ask(f"/v1/leases/{lease['id']}", "DELETE")
    return (time.perf_counter() - begin_s) * 1e6


def _floor_us(ask: Ask) -> float:
    begin_s = time.perf_counter()
    for _ in range(2):
        ask("/v1/devices", "GET")
    return (time.perf_counter() - begin_s) * 1e6


def _ask_newly(path: str, target: str, method: str) -> bytes:
    with Http(path) as http:
        return http.ask(target, method)[0]


_METRICS = "/metrics"
#: GPUs, and devices of each.
_SIZES = ((1, 4), (64, 48))
#: Metrics are kept for a second, so the next one is asked for after it.
_EXPIRY_S = 1.1
_SCRAPE_FLOOR = "no floor: it is made each time"


def scrape_lines(settings: Settings) -> Iterator[Line]:
    """Three lines for a small host and for the largest."""
    for gpus, number in _SIZES:
        with running(gpus, number) as daemon:
            daemon.answered_ms()
            rounds = [_scrape(daemon) for _ in range(settings.rounds(10, 3) + 1)][1:]
            devices = f"{gpus * number:,} devices"
            took, beside = (Samples(tuple(each), "ms") for each in zip(*rounds))
            yield Line(f"a scrape, {devices}", took, None, _SCRAPE_FLOOR, Aim(1000, "ms"))
            yield Line(f"longest wait beside it, {devices}", beside, None, _SCRAPE_FLOOR, Aim(50, "ms"))
            time.sleep(_EXPIRY_S)  # what is kept for those who scrape within it does not stay
            resident = Samples((memory_mib(daemon.pid, "Rss"),), "MiB")
            yield Line(f"RSS after it, {devices}", resident, None, _SCRAPE_FLOOR, Aim(40, "MiB"))


def _scrape(daemon: Daemon) -> tuple[float, float]:
    """How long it took, and the longest of the answers to another client meanwhile, in ms."""
    time.sleep(_EXPIRY_S)
    longest_s = 0.0
    with Http(daemon.socket) as other, Http(daemon.socket) as scraper:
        begin_s = time.perf_counter()
        scraper.send(request_for(_METRICS))
        while not readable(scraper, 0):
            asked_s = time.perf_counter()
            other.ask("/v1/status")
            longest_s = max(longest_s, time.perf_counter() - asked_s)
        scraper.answer(_METRICS)
        return (time.perf_counter() - begin_s) * 1e3, longest_s * 1e3
