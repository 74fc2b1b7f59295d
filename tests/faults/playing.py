"""Playing a scenario from its start to its row."""

from __future__ import annotations

from faults.losses import lost
from faults.rows import Fault, Row
from faults.scene import Scene


def play(fault: Fault) -> Row:
    """Let the fault happen on a host of its own; fails where it costs what it may not."""
    with Scene(fault.gpus) as scene:
        fault.play(scene)
        cost = lost(scene)
        assert cost == fault.loses, f"{fault.name}: lost {cost}\n{scene.daemon.log}"
        assert scene.recovery, f"{fault.name}: nothing was measured"
        assert scene.words, f"{fault.name}: the operator saw nothing"
        return Row(fault.topic, fault.name, cost, scene.recovery, scene.words)
