"""The other end of a client: start it, tell it what to do, hear what it says, and what became of it.

Nothing waits without a deadline: a client that says nothing is how half of the questions are answered.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_check.processes import stat_of
from gpu_check.values import Surroundings, Trouble, seconds

_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")

Event = dict[str, Any]


class Client:
    """One client process; a context manager that ends it."""

    def __init__(
        self,
        around: Surroundings,
        name: str,
        *,
        pipe: str = "",
        environment: Mapping[str, str] | None = None,
        uid: int | None = None,
    ) -> None:
        """Start it: under MPS with the pipe directory `pipe`, else outside, whatever the host has running."""
        host = around.host
        self.name = name
        self.events: list[Event] = []
        self.started_s = time.monotonic()
        self._buffer = b""
        self._ended = False
        argv = [sys.executable, "-I", "-S", _MAIN, "--client", "--libcuda", host.libcuda]
        argv += ["--device", str(host.device)]
        if uid is not None:
            argv += ["--uid", str(uid)]
        self._errors = around.fresh("e")
        variables = {
            **host.environment,
            "CUDA_MPS_PIPE_DIRECTORY": pipe or f"{around.directory}/none",
            **(environment or {}),
        }
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=variables, bufsize=0
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        os.set_blocking(self._output.fileno(), False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def fileno(self) -> int:
        """What becomes readable when the client says something."""
        return self._output.fileno()

    # -- hearing

    def hear(self) -> bool:
        """Take in what it has said; False once it has closed its output."""
        while not self._ended:
            try:
                part = os.read(self._output.fileno(), 65536)
            except BlockingIOError:
                break
            self._ended = not part
            self._buffer += part
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self.events.append(json.loads(line))
        return not self._ended

    def first(self, *kinds: str) -> Event | None:
        """The first event of one of the kinds."""
        return next((event for event in self.events if event.get("event") in kinds), None)

    def beats(self) -> list[Event]:
        """All its beats."""
        return [event for event in self.events if event.get("event") == "beat"]

    def ready(self, timeout_s: float = 20.0) -> Event:
        """Its `ready` event; raises Trouble if that does not come in time, or an error comes instead."""
        event = self.outcome(timeout_s)
        if event is None:
            raise Trouble(f"client {self.name} was not ready within {seconds(timeout_s)}{self._complaint()}")
        if event["event"] == "error":
            raise Trouble(f"client {self.name} could not start: {describe(event)}")
        return event

    def outcome(self, timeout_s: float) -> Event | None:
        """`ready` or `error`, whichever came; None if neither did in time."""
        pump([self], time.monotonic() + timeout_s, lambda: self.first("ready", "error") is not None)
        found = self.first("ready", "error")
        if found is None and self._ended:
            name = f"it ended with status {self.process.wait()}{self._complaint()}"
            return {"event": "error", "t": time.monotonic(), "call": "its start", "code": -1, "name": name}
        return found

    def _complaint(self) -> str:
        try:
            with open(self._errors, encoding="utf-8", errors="replace") as file:
                text = file.read().strip()
        except OSError:
            text = ""
        return f" ({text.splitlines()[-1]})" if text else ""

    # -- telling

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command, and do not wait; a client that is gone does not hear it."""
        with contextlib.suppress(OSError):
            self._input.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def reply(self, to: str, timeout_s: float) -> Event:
        """The reply to a command given before; raises Trouble if it does not come."""

        def come() -> Event | None:
            return next((event for event in self.events if event.get("to") == to), None)

        pump([self], time.monotonic() + timeout_s, lambda: come() is not None)
        found = come()
        if found is None:
            gone = "it is gone" if self._ended else f"it said nothing for {seconds(timeout_s)}"
            raise Trouble(f"client {self.name} did not answer {to!r}: {gone}{self._complaint()}")
        self.events.remove(found)
        return found

    def ask(self, do: str, timeout_s: float = 20.0, **arguments: Any) -> Event:
        """Give a command and return the reply; raises Trouble if none comes."""
        self.tell(do, **arguments)
        return self.reply(do, timeout_s)

    # -- ending

    def close(self, patience_s: float = 3.0) -> int | None:
        """Let it end by itself, else end it; the exit status, None if even SIGKILL did not end it."""
        with contextlib.suppress(OSError):
            self._input.close()
        for number, wait_s in ((0, patience_s), (signal.SIGTERM, 0.5), (signal.SIGKILL, 3.0)):
            if number:
                self.process.send_signal(number)
            end_s = time.monotonic() + wait_s
            while self.process.poll() is None and time.monotonic() < end_s:
                self.hear()  # or its last words could fill the pipe, and it wait for us
                time.sleep(0.005)
            if self.process.poll() is not None:
                break
        self.hear()
        with contextlib.suppress(OSError):
            self._output.close()
        self._ended = True
        return self.process.poll()

    def __enter__(self) -> Client:  # noqa: PYI034 - typing.Self is not in 3.9
        return self

    def __exit__(self, *error: object) -> None:
        if not self._output.closed:
            self.close()


def pump(clients: Iterable[Client], end_s: float, enough: Callable[[], bool] = bool) -> None:
    """Hear all clients until `end_s`, or until it is enough, or none of them has anything more to say."""
    talking = [client for client in clients if client.hear()]
    while talking and not enough() and (left_s := end_s - time.monotonic()) > 0:
        for client in select.select(talking, [], [], min(left_s, 0.1))[0]:
            client.hear()
        talking = [client for client in talking if client.hear()]


def describe(event: Event) -> str:
    """An error in words."""
    return f"{event.get('name')} ({event.get('code')}) from {event.get('call')}"


#: A client that has not beaten for so long stands still; its kernels take a millisecond.
_STILL_S = 1.0


def start_beating(clients: Sequence[Client], around: Surroundings, for_s: float = 0.7) -> None:
    """Let ready clients launch small kernels without end, and watch them do it for a while."""
    host = around.host
    for client in clients:
        client.ready(30)
    for client in clients:
        client.tell("beat", blocks=host.small_blocks, iterations=host.gpu["iterations"])
    pump(clients, time.monotonic() + for_s)


def watch(clients: Sequence[Client], for_s: float) -> None:
    """Hear the clients for so long, or until each has got an error or ended, and a little more."""
    end_s = time.monotonic() + for_s
    pump(clients, end_s, lambda: all(_is_over(client) for client in clients))
    pump(clients, min(end_s, time.monotonic() + 0.3))


def _is_over(client: Client) -> bool:
    return client.first("error") is not None or stat_of(client.pid) is None


def fate(client: Client, since_s: float) -> dict[str, Any]:
    """What it did since a moment of the monotonic clock: launches, pauses, its error, its end."""
    client.hear()
    beats = client.beats()
    after = [beat for beat in beats if beat["t"] > since_s]
    before = [beat["launches"] for beat in beats if beat["t"] <= since_s]
    error = client.first("error")
    launches = max(
        [beat["launches"] for beat in after] + [error.get("launches", 0) if error else 0], default=0
    )
    last_s = after[-1]["t"] if after else (beats[-1]["t"] if beats else since_s)
    return {
        "client": client.name,
        "launches_after": max(0, launches - (before[-1] if before else 0)),
        "longest_pause_s": max((beat["gap"] for beat in after), default=0.0),
        "last_beat_after_s": round(last_s - since_s, 3),
        "silent_for_s": round(time.monotonic() - last_s, 3),
        "error": error,
        "error_after_s": round(error["t"] - since_s, 4) if error else None,
        "status": client.process.poll(),
    }


def in_words(found: dict[str, Any]) -> str:
    """One client's fate."""
    name = f"client {found['client']}"
    if found["error"]:
        return f"{name} got {describe(found['error'])} {_after(found['error_after_s'])}"
    if found["status"] is not None:
        return f"{name}'s process ended with status {found['status']} and told no error"
    if found["silent_for_s"] > _STILL_S:
        return (
            f"{name} stood still from {seconds(max(0.0, found['last_beat_after_s']))} after it on, "
            f"with no error in {seconds(found['silent_for_s'])}"
        )
    return (
        f"{name} went on ({found['launches_after']} launches, longest pause "
        f"{seconds(found['longest_pause_s'])})"
    )


def _after(value: float) -> str:
    return f"{seconds(value)} after it" if value >= 0 else f"{seconds(-value)} before it"


def fates(clients: Sequence[Client], since_s: float) -> tuple[list[dict[str, Any]], str]:
    """All clients' fates, and a sentence without its full stop."""
    found = [fate(client, since_s) for client in clients]
    return found, "; ".join(in_words(each) for each in found)


class Attempt(NamedTuple):
    """What a new client met with."""

    event: Event | None
    waited_s: float

    @property
    def works(self) -> bool:
        """Whether it ran a kernel."""
        return self.event is not None and self.event["event"] == "ready"

    @property
    def under_mps(self) -> bool:
        """Whether it ran a kernel, and the driver calls that shared by MPS."""
        return self.works and self.event is not None and self.event.get("mps") is True

    def words(self) -> str:
        """In words that follow `a new client`."""
        if self.event is None:
            return f"waited, neither served nor refused within {seconds(self.waited_s)}"
        if not self.works:
            return f"got {describe(self.event)} after {seconds(self.waited_s)}"
        mps = self.event.get("mps")
        how = "under MPS" if mps else "OUTSIDE MPS, with no limit"
        how = "whether under MPS this driver does not tell" if mps is None else how
        return f"ran a kernel after {seconds(self.waited_s)}, {how}"

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"words": self.words(), "seconds": round(self.waited_s, 4), "event": self.event}


def outcome_of(client: Client, timeout_s: float) -> Attempt:
    """What a client that was started meets with, counted from its start."""
    event = client.outcome(timeout_s)
    return Attempt(event, (event["t"] if event else time.monotonic()) - client.started_s)


def attempt(
    around: Surroundings,
    pipe: str,
    timeout_s: float = 5.0,
    *,
    environment: Mapping[str, str] | None = None,
    uid: int | None = None,
) -> Attempt:
    """Start a new client and end it again."""
    with Client(around, "new", pipe=pipe, environment=environment, uid=uid) as client:
        return outcome_of(client, min(timeout_s, around.left_s()))
