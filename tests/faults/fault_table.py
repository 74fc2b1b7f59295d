"""Faults and what came of them: the registry of scenarios, and the tables in docs/faults.md.

The tables are written on demand, and compared with what was seen.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from simhost.environment import CHECKOUT

PAGE = CHECKOUT / "docs/faults.md"
WRITE_VARIABLE = "YUNION_MPS_WRITE_RELIABILITY"
_BEGIN, _END = "<!-- from here on written by tests/faults -->", "<!-- up to here -->"
_HEAD = "| fault | lost | recovery | what the operator saw first |\n|---|---|---|---|\n"

Scenario = TypeVar("Scenario", bound=Callable[..., None])


class Row(NamedTuple):
    """One line of the table. `lost` and `saw` are what a run must repeat, `recovery` has times in it."""

    topic: str
    fault: str
    lost: str
    recovery: str
    saw: str


class Fault(NamedTuple):
    """One scenario: `play` injects the fault on a scene and shows what comes of it.

    `loses` is what the fault costs, which is checked. One that takes about `takes_s`, because it waits for
    the daemon's own intervals, is played beside the others. `gpus` describes the host.
    """

    topic: str
    name: str
    play: Callable[..., None]
    loses: str
    takes_s: int
    gpus: Any


#: The order of the table.
CONTROL_DAEMON = "The control daemon"
JOBS = "Jobs, servers, and changes by other programs"
OURSELVES = "The daemon itself"
PLACES = "Files and disks"
GPUS = "GPUs and the driver"
SHARING = "MIG and time-slicing"
CONNECTIONS = "Connections and descriptors"
TOPICS = (CONTROL_DAEMON, JOBS, OURSELVES, PLACES, GPUS, SHARING, CONNECTIONS)

#: All faults; those of one topic in the order of the table.
FAULTS: list[Fault] = []

NOTHING = "nothing"


def fault(
    topic: str, name: str, *, loses: str = NOTHING, takes_s: int = 0, gpus: Any = None
) -> Callable[[Scenario], Scenario]:
    """Make a scenario of a function that gets a `Scene`; `name` is what the table calls the fault."""

    def register(play: Scenario) -> Scenario:
        FAULTS.append(Fault(topic, name, play, loses, takes_s, gpus))
        return play

    return register


# -- the table


def render(rows: Iterable[Row]) -> str:
    """All rows in the order of the scenarios, a table for each topic."""
    by_fault = {row.fault: row for row in rows}
    kernel = ".".join(platform.release().split(".")[:2])
    text = f"One run on {os.cpu_count()} cores, Linux {kernel}.\n"
    topic = ""
    for fault in sorted(FAULTS, key=lambda fault: TOPICS.index(fault.topic)):
        row = by_fault.get(fault.name)
        if row is None:
            continue
        if row.topic != topic:
            topic = row.topic
            text += f"\n### {topic}\n\n{_HEAD}"
        text += "| " + " | ".join(cell.replace("|", "\\|") for cell in row[1:]) + " |\n"
    return text


def write(rows: Iterable[Row]) -> None:
    """Put the rows in the place of the page's."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{before}{_BEGIN}\n{render(rows)}{_END}{rest.partition(_END)[2]}")


def fixed(text: str) -> list[Sequence[str]]:
    """What each line of the tables says but for times: the fault, what was lost, what was seen."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault ")]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(fault, lost, saw) for fault, lost, _, saw in cells]


def on_page() -> str:
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
