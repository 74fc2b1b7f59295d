"""The other end of a client: start it with an environment of its own, tell it what to do, hear what it says.

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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
        """The PID of the process."""
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
        """Its `ready` event; raises Trouble where that does not come in time, or an error comes instead."""
        event = self.outcome(timeout_s)
        if event is None:
            raise Trouble(f"client {self.name} was not ready within {seconds(timeout_s)}{self._complaint()}")
        if event["event"] == "error":
            raise Trouble(f"client {self.name} could not start: {describe(event)}")
        return event

    def outcome(self, timeout_s: float) -> Event | None:
        """`ready` or `error`, whichever came; None where neither did in time."""
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
        """The reply to a command given before; raises Trouble where it does not come."""

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
        """Give a command and return the reply; raises Trouble where none comes."""
        self.tell(do, **arguments)
        return self.reply(do, timeout_s)

    # -- ending

    def close(self, patience_s: float = 3.0) -> int | None:
        """Let it end by itself, else end it; the exit status, None where even SIGKILL did not end it."""
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
