"""What a fault has cost: every limit, job, event and compute mode is looked at, none is believed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from faults.rows import NOTHING
from faults.scene import FORMER_MODE, Scene, until
from integration.daemon_host import control_daemons, is_running
from simhost.mps import Client
from waiting import readable


def lost(scene: Scene) -> str:
    """End the jobs and the daemon; what the fault has cost, in words."""
    found = [*_jobs(scene), *_budgets(scene), *_leases(scene), *_events(scene), *_modes(scene)]
    return ", ".join(found) or NOTHING


def _jobs(scene: Scene) -> list[str]:
    return ["a job"] if any(not _is_attached(job) for job in scene.jobs) else []


def _is_attached(job: Client) -> bool:
    """Whether nothing has happened to the job since it was attached."""
    assert job._process.stdout is not None
    return is_running(job.pid) and not readable(job._process.stdout, 0)


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
    if {mode.lower() for mode in seen} != {FORMER_MODE}:
        found.append(f"a former compute mode ({seen})")
    return found


def _end_orphans(scene: Scene) -> bool:
    """End servers without control daemon and clients; whether a real one ends by itself is not known."""
    for pid in scene.stand_ins.servers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return False
