"""Many requests and reloads, and whether the daemon grows by them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from faults.scene import Scene, until

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
