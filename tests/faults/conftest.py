"""The table of this run, what faults have cost, and the threads on which faults are played that wait."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.fault_table import NOTHING, Fault, Row
from faults.scene import FORMER_MODE, INTERRUPTED, Scene, until
from integration.daemon_host import control_daemons, is_running
from simhost.mps import Client

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


def lost(scene: Scene) -> str:
    """End the jobs and the daemon; what the fault has cost, in words."""
    found = [*_jobs(scene), *_budgets(scene), *_leases(scene), *_events(scene), *_modes(scene)]
    return ", ".join(found) or NOTHING


def _jobs(scene: Scene) -> list[str]:
    return ["a job"] if any(not _is_attached(job) for job in scene.jobs) else []


def _is_attached(job: Client) -> bool:
    """Whether nothing has happened to the job since it was attached."""
    return is_running(job.pid) and not job.has_news


def _budgets(scene: Scene) -> list[str]:
    places = [Path(domain["pipe_directory"]) for domain in scene.daemon.status()["domains"]]
    answers = [scene.limits(place) for place in places]
    return [] if all(answer == scene.budgets for answer in answers) else [f"a budget ({answers})"]


def _leases(scene: Scene) -> list[str]:
    return [] if scene.keeps_the_lease else ["a lease"]


def _events(scene: Scene) -> list[str]:
    """There is no gap, and those from before the fault are there as they were."""
    now = scene.events()
    ids = [event["id"] for event in now]
    kept = {event["id"]: event for event in now}
    same = all(kept.get(event["id"]) == event for event in scene.known_events if event["id"] >= ids[0])
    return [] if same and ids == list(range(ids[0], ids[-1] + 1)) else ["earlier events"]


def _modes(scene: Scene) -> list[str]:
    """After a stop, as nvidia-smi shows them; nothing else is left then either."""
    for job in list(scene.jobs):
        scene.end(job)
    found = [] if scene.daemon.stop() == 0 else [f"a clean stop: {scene.daemon.log}"]
    until(lambda: not scene.stand_ins.servers() or _end_orphans(scene), "the servers' end")
    if control_daemons(scene.host.root):
        found.append("track of a control daemon")
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    seen = scene.host.run(command, check=True).stdout.split()
    # With the change of its MIG mode, a GPU has lost the former one.
    if [mode.lower() for mode in seen] != ["default" if gpu.mig else FORMER_MODE for gpu in scene.host.gpus]:
        found.append(f"a former compute mode ({seen})")
    return found


def _end_orphans(scene: Scene) -> bool:
    """End servers without control daemon and clients; whether a real one ends by itself is not known."""
    for pid in scene.stand_ins.servers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return False
