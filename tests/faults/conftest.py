"""The table of this run, and the threads on which faults are played that mostly wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from faults.losses import lost
from faults.rows import Fault, Row
from faults.scene import INTERRUPTED, Scene

#: Each is a host with its daemons; more at once would make each other late on a small machine.
_AT_ONCE = 12


def play(fault: Fault) -> Row:
    """Let the fault happen on a host of its own; fails if it costs what it may not."""
    with Scene(fault.gpus) as scene:
        fault.play(scene)
        cost = lost(scene)
        assert cost == fault.loses, f"{fault.name}: lost {cost}\n{scene.daemon.log}"
        assert scene.recovery, f"{fault.name}: nothing was measured"
        assert scene.words, f"{fault.name}: the operator saw nothing"
        return Row(fault.topic, fault.name, cost, scene.recovery, scene.words)


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    return []


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest) -> Iterator[Callable[[Fault], Row]]:
    """Play a fault; those that take long are begun with the first one, the longest before the others."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = [call["fault"] for call in calls if isinstance(call.get("fault"), Fault)]
    long = sorted((fault for fault in chosen if fault.takes_s), key=lambda fault: -fault.takes_s)
    INTERRUPTED.clear()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        begun = {fault.name: pool.submit(play, fault) for fault in long}
        try:
            yield lambda fault: begun[fault.name].result() if fault.takes_s else play(fault)
        finally:
            INTERRUPTED.set()
            for one in begun.values():
                one.cancel()


@pytest.fixture
def row(played: Callable[[Fault], Row], rows: list[Row]) -> Callable[[Fault], Row]:
    """Play a fault, and put its row into the table."""

    def add(fault: Fault) -> Row:
        rows.append(played(fault))
        return rows[-1]

    return add
