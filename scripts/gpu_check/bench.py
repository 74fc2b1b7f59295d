"""What each question is given: processes of its own, and where its answers go."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_check.host import Host
from gpu_check.processes import Client, Control, wait_for

_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")


class Page(NamedTuple):
    """The file with the answers. It only grows: each answer is in it as soon as it is known."""

    path: str

    def write(self, text: str) -> None:
        """Add a paragraph."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")


class Bench:
    """What a question works with; `close` ends its processes."""

    def __init__(self, host: Host, directory: str, page: Page, question: str) -> None:
        self.host = host
        self._page = page
        self._directory = directory
        self._question = question
        self._clients: list[Client] = []
        self._closers: list[Callable[[], None]] = []
        self._count = 0

    def answer(self, sentence: str) -> None:
        """Give an answer, or a part of it."""
        self._page.write(f"- {sentence}")

    def show(self, title: str, text: str) -> None:
        """Show a program's literal output."""
        self._page.write(f"{title}:\n\n```\n{text.rstrip()}\n```")

    def fresh(self) -> str:
        """Return a new path, short enough for a socket below it."""
        self._count += 1
        return f"{self._directory}/{self._question}{self._count}"

    def at_close(self, close: Callable[[], None]) -> None:
        """Call this when the question is closed, before what was registered earlier."""
        self._closers.append(close)

    def control(self, *commands: str) -> Control:
        """Start a control daemon and send it these commands; raises QuestionError if it does not start."""
        control = Control(self.host, self.fresh())
        control.start()
        self.at_close(control.close)
        for command in commands:
            control.ask(command)
        return control

    def client(
        self,
        name: str,
        mode: str,
        *,
        pipe: str = "",
        number: int = 0,
        environment: Mapping[str, str] = {},
        prefix: Sequence[str] = (),
    ) -> Client:
        """Start a client in one of the modes of client.py, of the control daemon in `pipe`, or of none.

        `prefix` is a command that runs it, with the variables of `environment`.
        """
        program = [sys.executable, "-I", "-S", _MAIN, "--client", mode, self.host.libcuda, str(number)]
        variables = {**self.host.environment, "CUDA_MPS_PIPE_DIRECTORY": pipe or f"{self._directory}/none"}
        variables.update(environment)
        client = Client(name, [*prefix, *program], variables, self.fresh())
        self._clients.append(client)
        return client

    def beating(self, pipe: str, names: str) -> list[Client]:
        """Start a client for each letter, and wait until all launch kernels; raises QuestionError."""
        clients = [self.client(f"client {name}", "beat", pipe=pipe) for name in names]
        for client in clients:
            client.wait_event("beat")
        return clients

    def new_client(self, pipe: str) -> str:
        """Start a client, say what becomes of it, and let it end."""
        client = self.client("a new client", "hold", pipe=pipe)
        words = client.describe_start(6.0)
        client.close()
        return words

    def fates(self, clients: Sequence[Client], since_s: float, watch_s: float) -> str:
        """Watch clients, until all are over or for `watch_s`, and say what they have done since `since_s`."""
        wait_for(lambda: all(client.is_over() for client in clients), watch_s)
        time.sleep(0.1)  # so that the last events are written
        return "; ".join(client.fate(since_s) for client in clients)

    def close(self) -> None:
        """End the clients, all at once, then what was registered with `at_close`."""
        for client in self._clients:
            client.input.close()
        for client in self._clients:
            client.close()
        for close in reversed(self._closers):
            close()


Ask = Callable[[Bench], None]


class Question(NamedTuple):
    """A question and what answers it, in a process of its own, until its deadline."""

    name: str
    text: str
    ask: Ask
    deadline_s: float
    needs: list[str]
    """Words: NVIDIA's `programs`, `mps` if clients must run under it, `daemon` for what our daemon needs."""


def question(text: str, deadline_s: float, needs: str = "programs mps") -> Callable[[Ask], Question]:
    """Make a question of the function that answers it."""

    def make(ask: Ask) -> Question:
        return Question(ask.__name__, text, ask, deadline_s, needs.split())

    return make
