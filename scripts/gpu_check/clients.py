"""Control a client process: start it, send it commands, read its events, and determine how it ended.

Every wait has a deadline, because a client that reports nothing is the answer to many questions.
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
from gpu_check.values import StepContext, StepError, seconds

_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")

Event = dict[str, Any]


class Client:
    """One client process; a context manager that ends it."""

    def __init__(
        self,
        context: StepContext,
        name: str,
        *,
        pipe: str = "",
        environment: Mapping[str, str] | None = None,
        uid: int | None = None,
    ) -> None:
        """Start it under MPS with the pipe directory `pipe`, or outside MPS even if the host runs MPS."""
        host = context.host
        self.name = name
        self.events: list[Event] = []
        self.started_s = time.monotonic()
        self._buffer = b""
        self._ended = False
        argv = [sys.executable, "-I", "-S", _MAIN, "--client", "--libcuda", host.libcuda]
        argv += ["--device", str(host.device)]
        if uid is not None:
            argv += ["--uid", str(uid)]
        self._errors = context.fresh("e")
        variables = {
            **host.environment,
            "CUDA_MPS_PIPE_DIRECTORY": pipe or f"{context.directory}/none",
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
        """The descriptor that becomes readable when the client reports an event."""
        return self._output.fileno()

    # -- events

    def hear(self) -> bool:
        """Read its new events; returns False once it has closed its output."""
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
        """Return its `ready` event; raises StepError at the timeout or if it reports an error instead."""
        event = self.outcome(timeout_s)
        if event is None:
            raise StepError(
                f"client {self.name} was not ready within {seconds(timeout_s)}{self._complaint()}"
            )
        if event["event"] == "error":
            raise StepError(f"client {self.name} could not start: {describe(event)}")
        return event

    def outcome(self, timeout_s: float) -> Event | None:
        """Return its `ready` or `error` event; None at the timeout."""
        pump([self], time.monotonic() + timeout_s, lambda: self.first("ready", "error") is not None)
        found = self.first("ready", "error")
        if found is None and self._ended:
            name = f"exit status {self.process.wait()}{self._complaint()}"
            return {"event": "error", "t": time.monotonic(), "name": name}
        return found

    def _complaint(self) -> str:
        try:
            with open(self._errors, encoding="utf-8", errors="replace") as file:
                text = file.read().strip()
        except OSError:
            text = ""
        return f" ({text.splitlines()[-1]})" if text else ""

    # -- commands

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting; a client that has ended does not get it."""
        with contextlib.suppress(OSError):
            self._input.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def reply(self, to: str, timeout_s: float) -> Event:
        """Return the reply to a command that was sent; raises StepError if there is none."""

        def come() -> Event | None:
            return next((event for event in self.events if event.get("to") == to), None)

        pump([self], time.monotonic() + timeout_s, lambda: come() is not None)
        found = come()
        if found is None:
            gone = "it has ended" if self._ended else f"no reply within {seconds(timeout_s)}"
            raise StepError(f"client {self.name} did not answer {to!r}: {gone}{self._complaint()}")
        self.events.remove(found)
        return found

    def ask(self, do: str, timeout_s: float = 20.0, **arguments: Any) -> Event:
        """Send a command and return the reply; raises StepError if there is none."""
        self.tell(do, **arguments)
        return self.reply(do, timeout_s)

    # -- ending

    def close(self, patience_s: float = 3.0) -> int | None:
        """Wait for it to end, or end it; returns its exit status, None if even SIGKILL did not end it."""
        with contextlib.suppress(OSError):
            self._input.close()
        for number, wait_s in ((0, patience_s), (signal.SIGTERM, 0.5), (signal.SIGKILL, 3.0)):
            if number:
                self.process.send_signal(number)
            end_s = time.monotonic() + wait_s
            while self.process.poll() is None and time.monotonic() < end_s:
                self.hear()  # otherwise its last events could fill the pipe, and it would wait for us
                time.sleep(0.005)  # a poll: its events have to be read meanwhile
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
    """Read all clients' events until `end_s`, until it is `enough`, or until all have closed their output."""
    talking = [client for client in clients if client.hear()]
    while talking and not enough() and (left_s := end_s - time.monotonic()) > 0:
        for client in select.select(talking, [], [], min(left_s, 0.1))[0]:
            client.hear()
        talking = [client for client in talking if client.hear()]


def describe(event: Event) -> str:
    """Describe an error: of CUDA with its code and call, or the exit status of a client."""
    if "code" not in event:
        return str(event.get("name"))
    return f"{event.get('name')} ({event['code']}) from {event.get('call')}"


#: A client without a beat for this long has stalled; its kernels take a millisecond.
_STILL_S = 1.0


def start_beating(clients: Sequence[Client], context: StepContext, for_s: float = 0.7) -> None:
    """Let ready clients launch small kernels continuously, and watch them for a while."""
    host = context.host
    for client in clients:
        client.ready(30)
    for client in clients:
        client.tell("beat", blocks=host.small_blocks, iterations=host.gpu["iterations"])
    pump(clients, time.monotonic() + for_s)


def watch(clients: Sequence[Client], for_s: float) -> None:
    """Read the clients' events for some time, or until shortly after all have failed or ended."""
    end_s = time.monotonic() + for_s
    pump(clients, end_s, lambda: all(_is_over(client) for client in clients))
    pump(clients, min(end_s, time.monotonic() + 0.3))


def _is_over(client: Client) -> bool:
    return client.first("error") is not None or stat_of(client.pid) is None


def fate(client: Client, since_s: float) -> dict[str, Any]:
    """What a client has done since `since_s` (monotonic seconds): launches, pauses, error and exit status."""
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
    """Describe what a client has done."""
    name = f"client {found['client']}"
    if found["error"]:
        return f"{name} got {describe(found['error'])} {_after(found['error_after_s'])}"
    if found["status"] is not None:
        return f"{name} exited with status {found['status']} without reporting an error"
    if found["silent_for_s"] > _STILL_S:
        return (
            f"{name} stalled {seconds(max(0.0, found['last_beat_after_s']))} later, "
            f"without an error for {seconds(found['silent_for_s'])}"
        )
    return (
        f"{name} continued ({found['launches_after']} launches, longest pause "
        f"{seconds(found['longest_pause_s'])})"
    )


def _after(value: float) -> str:
    return f"{seconds(value)} later" if value >= 0 else f"{seconds(-value)} earlier"


def fates(clients: Sequence[Client], since_s: float) -> tuple[list[dict[str, Any]], str]:
    """What all clients have done, and a sentence about it without a full stop."""
    found = [fate(client, since_s) for client in clients]
    return found, "; ".join(in_words(each) for each in found)


class Attempt(NamedTuple):
    """The outcome of starting a new client."""

    event: Event | None
    waited_s: float

    @property
    def works(self) -> bool:
        """Whether it ran a kernel."""
        return self.event is not None and self.event["event"] == "ready"

    @property
    def under_mps(self) -> bool:
        """Whether it ran a kernel, under MPS according to the driver."""
        return self.works and self.event is not None and self.event.get("mps") is True

    def words(self) -> str:
        """Describe it, to follow the words `a new client`."""
        if self.event is None:
            return f"was neither served nor refused within {seconds(self.waited_s)}"
        if not self.works:
            return f"failed after {seconds(self.waited_s)} with {describe(self.event)}"
        mps = self.event.get("mps")
        how = "under MPS" if mps else "OUTSIDE MPS, without a limit"
        how = "but this driver does not report whether under MPS" if mps is None else how
        return f"ran a kernel after {seconds(self.waited_s)}, {how}"

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"words": self.words(), "seconds": round(self.waited_s, 4), "event": self.event}


def outcome_of(client: Client, timeout_s: float) -> Attempt:
    """Wait for the outcome of a client, counted from its start."""
    event = client.outcome(timeout_s)
    return Attempt(event, (event["t"] if event else time.monotonic()) - client.started_s)


def attempt(
    context: StepContext,
    pipe: str,
    timeout_s: float = 5.0,
    *,
    environment: Mapping[str, str] | None = None,
    uid: int | None = None,
) -> Attempt:
    """Start a new client, wait for its outcome, and end it."""
    with Client(context, "new", pipe=pipe, environment=environment, uid=uid) as client:
        return outcome_of(client, min(timeout_s, context.left_s()))
