"""What the parts hand to each other: the host, a step's surroundings, and what a step reports."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Skip(Exception):  # noqa: N818 - it is no error
    """A step cannot be taken here; the text says why."""


class Trouble(Exception):  # noqa: N818 - its text is what a step failed with
    """A step cannot go on; the text says why."""


class Host(NamedTuple):
    """What was found on this machine; a program's path is empty if it is missing."""

    libcuda: str
    control: str
    server: str
    smi: str
    environment: dict[str, str]
    device: int
    gpu: dict[str, Any]
    """From the GPU's first client: name, uuid, memory_mib, multiprocessors, capability, cuda, iterations."""
    settings: dict[str, str]
    """From nvidia-smi, which may be missing: compute_mode, mig, driver, persistence."""

    @property
    def default_mode(self) -> bool:
        """Whether processes outside MPS may use the GPU beside others."""
        return self.settings.get("compute_mode", "Default") == "Default"

    @property
    def small_blocks(self) -> int:
        """A kernel of so many blocks leaves room for fifteen like it."""
        return max(1, int(self.gpu["multiprocessors"]) // 16)

    @property
    def large_blocks(self) -> int:
        """A kernel of so many blocks fills the GPU."""
        return int(self.gpu["multiprocessors"]) * 4


class Surroundings:
    """Where a step works: the host, the run's directory, and until when (monotonic seconds)."""

    def __init__(self, host: Host, directory: str, end_s: float) -> None:
        self.host = host
        self.directory = directory
        self.end_s = end_s
        self._numbers = 0

    def left_s(self) -> float:
        """How many seconds this step still has."""
        return max(0.0, self.end_s - time.monotonic())

    @property
    def patience_s(self) -> float:
        """How long to wait for a new client that may never be served: well beyond its usual start."""
        return 4.0 + 3.0 * float(self.host.gpu.get("seconds_until_ready", 0.0))

    def fresh(self, letter: str) -> str:
        """A path of its own in the run's directory, short enough for sockets below it."""
        self._numbers += 1
        return f"{self.directory}/{letter}{os.getpid()}.{self._numbers}"


class Report:
    """What a step found so far, told at once, so that it is kept whatever becomes of the step."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def answer(self, question: str, sentence: str) -> None:
        """The answer to one of the step's questions; the last one told counts."""
        self._tell("answer", [question, sentence])

    def raw(self, key: str, value: Any) -> None:
        """What was measured, for the JSON file alone."""
        self._tell("raw", [key, value])

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for the page."""
        cells = [[str(cell) for cell in row] for row in rows]
        self._tell("table", {"title": title, "header": list(header), "rows": cells})

    def verbatim(self, title: str, text: str) -> None:
        """What a program said, for the page as it is."""
        self._tell("verbatim", {"title": title, "text": text})

    def end(self, status: str, reason: str) -> None:
        """How the step ended."""
        self._tell("end", [status, reason])

    def _tell(self, kind: str, value: Any) -> None:
        line = json.dumps([kind, value], default=str).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


class Step(NamedTuple):
    """One thing to find out: `run` may take `deadline_s`, hang or raise, and the others go on."""

    name: str
    title: str
    run: Callable[[Surroundings, Report], None]
    deadline_s: float
    questions: Sequence[tuple[str, str]]
    """Each question's name, and its words for the page."""
    needs: frozenset[str] = frozenset()
    """Of `mps` (NVIDIA's two programs), `root`, `default_mode`."""


def seconds(value: float) -> str:
    """A time in words: milliseconds below one second."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
