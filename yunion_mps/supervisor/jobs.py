"""The jobs on our GPUs, as NVML told last: so that a stop can say whom it waits for and whom it ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Optional

from yunion_mps.host.proc import command_of, started_ticks, uid_of, user_name
from yunion_mps.models import Event, Gpu
from yunion_mps.mps.domain import Domain
from yunion_mps.planning import enforces_budgets

log = logging.getLogger(__name__)

Processes = Mapping[str, Mapping[int, Optional[int]]]

_JUST_BEFORE_S = 0.1


class Jobs:
    """Processes that use a GPU of ours, the MPS servers themselves left out."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        self._last_look_s: float | None = None
        #: Those that had not ended when their time was over, in words.
        self.late: list[str] = []

    def note(
        self, domains: Iterable[Domain], processes: Processes, gpus: Iterable[Gpu], looked_s: float
    ) -> None:
        """Take note of who uses the GPUs (by UUID: PID and MiB), and tell each domain about its own.

        `looked_s` is when the look at them began.
        """
        found: set[int] = set()
        telling = {gpu.uuid for gpu in gpus if enforces_budgets(gpu) and gpu.uuid in processes}
        for domain in domains:
            listed = {pid for uuid in domain.plan.gpu_uuids for pid in processes.get(uuid, {})}
            servers = set(domain.server_pids())
            jobs = listed - servers
            found |= jobs
            # That there are none is believed only where NVML lists the servers themselves: before Volta it
            # lists no client of MPS, and in a container without the host's PIDs nobody.
            told = servers <= listed and telling >= set(domain.plan.gpu_uuids)
            domain.in_use = True if jobs else (False if told else None)
            domain.looked_s = looked_s
        self._started = {pid: ticks for pid in found if (ticks := started_ticks(pid)) is not None}

    @property
    def started(self) -> Mapping[int, int]:
        """Those that were there at the last look, by PID, with their start in clock ticks since the boot."""
        return self._started

    def forget(self, domains: Iterable[Domain]) -> None:
        """Nothing is known any more, for NVML does not answer."""
        for domain in domains:
            domain.in_use = None

    def end_within(self, wait_s: int, now_s: float) -> None:
        """They have so long: who still runs just before that is over is late."""
        jobs = self.running()
        if jobs:
            log.warning("running jobs have up to %d s to end: %s", wait_s, "; ".join(jobs))
        self._last_look_s = now_s + wait_s - _JUST_BEFORE_S

    def ended_by_force(self) -> Iterator[Event]:
        """Those that were late, as events and in the log."""
        for job in self.late:
            log.warning("%s did not end in time: its MPS server was ended", job)
            means = "its MPS server was ended, and its CUDA calls fail"
            what = f"{job} did not end in time"
            yield Event("warning", "client", "stop", what, "the daemon was stopped", means)

    def tick(self, now_s: float) -> float | None:
        """See who is late, once it is time for that; return when it is, None where nothing is to be seen."""
        if self._last_look_s is not None and now_s >= self._last_look_s:
            self._last_look_s, self.late = None, self.running()
        return self._last_look_s

    def running(self) -> list[str]:
        """Those of them that still run, in words: `train.py (PID 12, alice)`."""
        return [_named(pid) for pid, ticks in self._started.items() if started_ticks(pid) == ticks]


def _named(pid: int) -> str:
    uid = uid_of(pid)
    user = "" if uid is None else f", {user_name(uid)}"
    return f"{command_of(pid) or 'a process'} (PID {pid}{user})"
