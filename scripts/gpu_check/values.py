"""Values that all modules share: the host, a step's context and its report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class StepSkipped(Exception):  # noqa: N818 - it is no error
    """A step cannot run on this host; the text says why."""


class StepError(Exception):
    """A step has failed; the text says why."""


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
        """Whether several processes outside MPS may share the GPU."""
        return self.settings.get("compute_mode", "Default") == "Default"

    @property
    def small_blocks(self) -> int:
        """The number of blocks of a kernel that occupies a sixteenth of the SMs."""
        return max(1, int(self.gpu["multiprocessors"]) // 16)

    @property
    def large_blocks(self) -> int:
        """The number of blocks of a kernel that fills the GPU."""
        return int(self.gpu["multiprocessors"]) * 4


class StepContext:
    """What a step is given: the host, the run's directory, and its deadline (monotonic seconds)."""

    def __init__(self, host: Host, directory: str, end_s: float) -> None:
        self.host = host
        self.directory = directory
        self.end_s = end_s
        self._numbers = 0

    def left_s(self) -> float:
        """Seconds until the step's deadline."""
        return max(0.0, self.end_s - time.monotonic())

    @property
    def patience_s(self) -> float:
        """How long to wait for a client that may never be served: much longer than its start takes."""
        return 4.0 + 3.0 * float(self.host.gpu.get("seconds_until_ready", 0.0))

    def fresh(self, letter: str) -> str:
        """Return a new path in the run's directory, short enough for a socket below it."""
        self._numbers += 1
        return f"{self.directory}/{letter}{os.getpid()}.{self._numbers}"


class Report:
    """A step's results, sent as soon as they are known, so that they survive a step that crashes or hangs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def answer(self, question: str, sentence: str) -> None:
        """Answer one of the step's questions; a later answer replaces an earlier one."""
        self._tell("answer", [question, sentence])

    def raw(self, key: str, value: Any) -> None:
        """Record raw values, for the JSON file only."""
        self._tell("raw", [key, value])

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table to the page."""
        cells = [[str(cell) for cell in row] for row in rows]
        self._tell("table", {"title": title, "header": list(header), "rows": cells})

    def verbatim(self, title: str, text: str) -> None:
        """Add a program's literal output to the page."""
        self._tell("verbatim", {"title": title, "text": text})

    def end(self, status: str, reason: str) -> None:
        """Record how the step ended."""
        self._tell("end", [status, reason])

    def _tell(self, kind: str, value: Any) -> None:
        line = json.dumps([kind, value], default=str).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


class Step(NamedTuple):
    """One measurement; if `run` exceeds `deadline_s`, hangs or raises, the other steps still run."""

    name: str
    title: str
    run: Callable[[StepContext, Report], None]
    deadline_s: float
    questions: Sequence[tuple[str, str]]
    """The name and the text of each question."""
    needs: frozenset[str] = frozenset()
    """What it needs of `mps` (NVIDIA's two programs), `root` and `default_mode`."""


def seconds(value: float) -> str:
    """Format a duration, below one second in milliseconds."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
