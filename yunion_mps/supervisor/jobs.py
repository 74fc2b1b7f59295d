"""The jobs on our GPUs, as NVML told last: so that a stop can say whom it waits for and whom it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from yunion_mps.mps.domain import Domain
from yunion_mps.process import command_of, started_ticks, uid_of, user_name

_JUST_BEFORE_S = 0.1


class Jobs:
    """Processes that use a GPU of ours, the MPS servers themselves left out."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        self._last_look_s: float | None = None
        #: Those that had not ended when their time was over, in words.
        self.late: list[str] = []

    def note(self, domains: Iterable[Domain], processes: Mapping[str, Mapping[int, int | None]]) -> None:
        """Take note of who uses the GPUs (by UUID: PID and MiB), and tell each domain about its own."""
        found: set[int] = set()
        for domain in domains:
            known = [processes[uuid] for uuid in domain.plan.gpu_uuids if uuid in processes]
            servers = set(domain.server_pids())
            jobs = {pid for pids in known for pid in pids} - servers
            found |= jobs
            complete = len(known) == len(domain.plan.gpu_uuids)
            domain.in_use = True if jobs else (False if complete else None)
        self._started = {pid: ticks for pid in found if (ticks := started_ticks(pid)) is not None}

    def end_by(self, deadline_s: float) -> None:
        """They have until then: who still runs just before it is late."""
        self._last_look_s = deadline_s - _JUST_BEFORE_S

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
