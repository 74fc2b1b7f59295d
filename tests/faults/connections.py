"""Faults that come by the API's socket and the control daemon's: too many, too slow, silent; and a soak."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from faults.fault_table import CONNECTIONS, fault
from faults.scene import Scene, until
from integration.daemon_host import no_more_processes
from unit.http.server_host import as_user
from unit.mps.other_processes import silent_process
from waiting import readable

_GET = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _connect(scene: Scene) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(scene.daemon.socket_path))  # with a timeout it would not wait in a burst
        connection.settimeout(60)
    except BaseException:
        connection.close()
        raise
    return connection


def _answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


@contextlib.contextmanager
def _connections(scene: Scene, count: int) -> Iterator[list[socket.socket]]:
    """So many connections, for which this process gets the descriptors."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], min(4096, most[1])), most[1]))
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        yield [held.enter_context(_connect(scene)) for _ in range(count)]


@fault(CONNECTIONS, "1,000 connections at once, each with a request; meanwhile the control daemon is killed")
def thousand(scene: Scene) -> None:
    scene.serve()
    old = scene.control
    with _connections(scene, 1000) as connections:
        assert readable(connections[0], 60)  # others have its place: all are accepted
        scene.inject(lambda: os.kill(old, signal.SIGKILL), answers=False)
        for connection in connections:
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(_GET)
        answers = [_answer(connection) for connection in connections]
        refusals = [str(body["detail"]) for status, body in answers if status == 503]
        scene.words = f"to those above the limit: {refusals[0]}"
        assert {status for status, _ in answers} == {200, 503}
        assert answers[-1][0] == 200
        assert sum(status == 200 for status, _ in answers) >= 448
    scene.another_serves(old)


@fault(CONNECTIONS, "400 connections that send half a request each and then nothing", takes_s=11)
def half_open(scene: Scene) -> None:
    scene.serve()
    with ExitStack() as held:
        connections = [held.enter_context(_connect(scene)) for _ in range(400)]
        for connection in connections:
            connection.sendall(_GET[:20])
        scene.inject(lambda: None)
        assert scene.daemon.status()["devices"]["available"] == 4
        answers = [_answer(connection) for connection in connections]
        assert {status for status, _ in answers} == {408}
        scene.words = f"to each of them: {answers[0][1]['detail']}"
    scene.note_recovery()


@fault(CONNECTIONS, "1,000 connections of root with half a request each; then root and another user connect")
def half_open_of_root(scene: Scene) -> None:
    scene.serve()
    os.chmod(scene.daemon.socket_path, 0o666)
    with _connections(scene, 1000) as connections:
        for connection in connections:
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(_GET[:20])
        assert readable(connections[0], 60)  # others have its place: all are accepted
        scene.inject(lambda: None)
        for uid in (0, 65534, 0):
            with as_user(uid), _connect(scene) as another:
                another.sendall(_GET)
                assert _answer(another)[0] == 200
        status, answer = _answer(connections[0])
        assert status == 503
        scene.words = f"to those that were closed to make room: {answer['detail']}"
    scene.note_recovery()


@fault(CONNECTIONS, "a request that arrives at one byte per second", takes_s=11)
def byte_a_second(scene: Scene) -> None:
    scene.serve()
    with _connect(scene) as connection:
        scene.inject(lambda: None)
        for byte in _GET:
            with contextlib.suppress(BrokenPipeError):  # it was closed meanwhile
                connection.sendall(bytes([byte]))
            if readable(connection, 1):
                break
        status, answer = _answer(connection)
        assert status == 408
        scene.words = f"to the client: {answer['detail']}"
    assert scene.daemon.status()["devices"]["available"] == 4
    scene.note_recovery()


@fault(CONNECTIONS, "no file descriptors are left, and the control daemon is killed", takes_s=2)
def no_descriptors(scene: Scene) -> None:
    scene.serve()
    old = scene.control
    most = resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE)
    scene.remember_events()
    resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE, (3, most[1]))
    scene.inject(lambda: os.kill(old, signal.SIGKILL), answers=False)
    scene.daemon.wait_log("Too many open files")  # it cannot be asked
    scene.note("reported after {}")
    scene.repair(
        lambda: resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE, most), "some are free again"
    )
    scene.another_serves(old)
    scene.record_report("Too many open files")


@fault(CONNECTIONS, "the process limit is reached, and the control daemon is killed", takes_s=2)
def no_processes(scene: Scene) -> None:
    scene.serve()
    old = scene.control
    with ExitStack() as limited:
        limited.enter_context(no_more_processes(scene.daemon.pid))
        scene.inject(lambda: os.kill(old, signal.SIGKILL))
        scene.expect_report("cannot be started: Resource temporarily unavailable")
        scene.repair(limited.close, "the limit is raised")
    scene.another_serves(old)


@fault(CONNECTIONS, "a process connects to the control daemon's socket and sends nothing", takes_s=16)
def silent(scene: Scene) -> None:
    _connect_and_say_nothing(scene)


@fault(CONNECTIONS, "the same, and the process is called `\\nSTOPPING=1\\nx`", takes_s=16)
def silent_with_a_hostile_name(scene: Scene) -> None:
    """Any user can choose that (PR_SET_NAME, prctl(2)), and sd_notify(3) ends an assignment at a line end."""
    name = 'import ctypes; ctypes.CDLL(None).prctl(15, b"\\nSTOPPING=1\\nx", 0, 0, 0)'
    _connect_and_say_nothing(scene, name)
    assert "STOPPING=1" not in scene.daemon.notifications
    assert "\nSTOPPING" not in scene.daemon.log


def _connect_and_say_nothing(scene: Scene, first: str = "") -> None:
    scene.serve()
    with silent_process(str(scene.pipe_directory), first):
        scene.inject(lambda: None)
        scene.expect_report("is connected to it but sends nothing")
    scene.repair(lambda: None, "it is gone")
    scene.serves_again(lambda: scene.control)


@fault(CONNECTIONS, "a soak of 50,000 requests and 500 reloads", takes_s=25)
def soaked(scene: Scene) -> None:
    scene.serve()
    scene.note_recovery(soak(scene))
    scene.record_report("-> 4 x 4096 MiB")


_REQUESTS, _RELOADS, _CONNECTIONS, _AT_ONCE = 50_000, 500, 4, 25
_WARM_UP = 100
_MAX_GROWTH_KIB = 1024
_TARGETS = ("/v1/devices", "/v1/status", "/v1/events?limit=5", "/v1/gpus")


def soak(scene: Scene) -> str:
    """Ask and reload; fails if one is not answered as it should be, or if the daemon grows."""
    _round(scene, _REQUESTS * _WARM_UP // _RELOADS, _WARM_UP)
    before_kib = _resident_kib(scene)
    descriptors = _descriptors(scene)
    _round(scene, _REQUESTS, _RELOADS)
    grown_kib = _resident_kib(scene) - before_kib
    assert grown_kib < _MAX_GROWTH_KIB, f"it has grown by {grown_kib} KiB"
    until(lambda: _descriptors(scene) <= descriptors, "no more descriptors than before")
    return "serves throughout; its memory grows by less than 1 MiB"


def _round(scene: Scene, requests: int, reloads: int) -> None:
    errors: list[str] = []

    def ask(number: int) -> None:
        try:
            _ask_many(scene, requests // _CONNECTIONS // _AT_ONCE, _TARGETS[number % len(_TARGETS)])
        except (OSError, AssertionError) as error:
            errors.append(repr(error))

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(_CONNECTIONS)]
    for asker in askers:
        asker.start()
    for number in range(reloads):
        scene.host.divide(4 if number % 2 else 2)
        status, answer = scene.daemon.ask("POST", "/v1/reload")
        assert status == 200, answer
    for asker in askers:
        asker.join()
    assert errors == []
    scene.all_available()


def _ask_many(scene: Scene, times: int, target: str) -> None:
    """So many times a number of requests at once, on one connection that is kept."""
    request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * _AT_ONCE
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(scene.daemon.socket_path))
        for _ in range(times):
            connection.sendall(request)
            good = 0
            rest = b""
            while good < _AT_ONCE or rest:
                came = connection.recv(1 << 18)
                assert came, "it closed the connection"
                rest += came
                while rest:
                    head, found, body = rest.partition(b"\r\n\r\n")
                    if not found:
                        break
                    assert head.startswith(b"HTTP/1.1 200"), head
                    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                    if len(body) < length:
                        break
                    good, rest = good + 1, body[length:]


def _resident_kib(scene: Scene) -> int:
    text = Path(f"/proc/{scene.daemon.pid}/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Rss:")).split()[1])


def _descriptors(scene: Scene) -> int:
    return len(list(Path(f"/proc/{scene.daemon.pid}/fd").iterdir()))
