"""Faults and what came of them: the registry of scenarios, and the rows of the table that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

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
    the daemon's own intervals, is played beside the others. `gpus` describes the host, and `bug` says what is
    still wrong.
    """

    topic: str
    name: str
    play: Callable[..., None]
    loses: str
    takes_s: int
    gpus: Any
    bug: str


#: The order of the table.
CONTROL_DAEMON = "The control daemon"
JOBS = "Jobs, servers, and what others change"
OURSELVES = "The daemon itself"
PLACES = "Files and disks"
GPUS = "GPUs and the driver"
CONNECTIONS = "Connections and descriptors"
TOPICS = (CONTROL_DAEMON, JOBS, OURSELVES, PLACES, GPUS, CONNECTIONS)

#: All faults; those of one topic in the order of the table.
FAULTS: list[Fault] = []

NOTHING = "nothing"


def fault(
    topic: str, name: str, *, loses: str = NOTHING, takes_s: int = 0, gpus: Any = None, bug: str = ""
) -> Callable[[Scenario], Scenario]:
    """Make a scenario of a function that gets a `Scene`; `name` is what the table calls the fault."""

    def register(play: Scenario) -> Scenario:
        FAULTS.append(Fault(topic, name, play, loses, takes_s, gpus, bug))
        return play

    return register
