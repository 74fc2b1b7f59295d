"""A control daemon that runs and does not serve: the safest steps first, and jobs before everything.

It and its servers, for which it waits, are told to go on, should one only have been stopped, and it is asked
again and again. Only when that does not help and it has no server with jobs at work, it is ended by signals,
so that another can be started in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from yunion_mps.errors import YunionError
from yunion_mps.host.processes import Process, wake
from yunion_mps.models import DomainPlan
from yunion_mps.mps.control import HEARD, Conversation
from yunion_mps.mps.ending import Ending
from yunion_mps.mps.probe import Probe
from yunion_mps.mps.servers import named

#: How long it has to answer once it was told to go on.
PATIENCE_S = 2.0
_PROBE_S = 0.5
_LOOK_AGAIN_S = 1.0


class Wedge:
    """The way out of a wedge; nothing here waits."""

    def __init__(
        self,
        process: Process,
        plan: DomainPlan,
        program: str,
        servers: Callable[[], Sequence[int]],
        why: str,
        now_s: float,
    ) -> None:
        """`servers` tells the PIDs of its servers, at any time; `why` it does not serve, in words."""
        self._process = process
        self._plan = plan
        self._program = program
        self._servers = servers
        self._why = why
        self._began_s = now_s
        self._deadline_s = now_s + PATIENCE_S
        self._look_s = now_s
        self._probe: Probe | None = None
        self._conversation: Conversation | None = None
        self._ending: Ending | None = None
        #: The servers for whose sake it is not ended.
        self.spared_for: tuple[int, ...] = ()
        wake([process.pid, *servers()])

    @property
    def ended(self) -> bool:
        """Whether it is being ended."""
        return self._ending is not None

    @property
    def reason(self) -> str:
        """What is wrong, and what it waits for."""
        pid = self._process.pid
        what = f"the control daemon (PID {pid}) does not serve: {self._why}"
        if not self.spared_for:
            return what
        until = f"it is replaced when {named(self.spared_for)}, which may have jobs, has ended"
        return f"{what}; {until} (not to wait, and risk them: kill -9 {pid})"

    def descriptors(self) -> list[int]:
        """What to watch for reading."""
        if self._conversation:
            return [self._conversation.fileno()]
        return [self._probe.fileno()] if self._probe and self._probe.watched else []

    def tick(self, now_s: float, *, in_use: bool | None, looked_s: float) -> float | None:
        """Do what is due; when to be called again, None once it answers.

        `in_use` tells whether other processes than servers used its GPUs when it was looked at `looked_s`,
        None where that is unknown.
        """
        if self._ending:
            return self._ending.tick(now_s)
        due_s = self._ask(now_s)
        if due_s is None:
            return None
        if now_s >= self._deadline_s:
            servers = self._servers()
            # A job may have come since a look from before.
            is_idle = in_use is False and looked_s >= self._began_s
            self.spared_for = () if is_idle else tuple(servers)
            if not self.spared_for:
                self.close()
                self._ending = Ending(
                    self._process, self._plan, self._program, self._servers, now_s, timeout_s=None
                )
                return self._ending.tick(now_s)
            wake([self._process.pid, *servers])
            self._deadline_s = now_s + _LOOK_AGAIN_S
        return min(due_s, self._deadline_s)

    def close(self) -> None:
        """Give back what is held."""
        for part in (self._probe, self._conversation, self._ending):
            if part:
                part.close()
        self._probe = self._conversation = None

    def _ask(self, now_s: float) -> float | None:
        """None once it has answered a probe, and then NVIDIA's front-end, which may look elsewhere for it."""
        try:
            if self._conversation:
                return self._conversation.deadline_s if self._conversation.poll(now_s) is None else None
            if self._probe is None and now_s >= self._look_s:
                self._look_s = now_s + _PROBE_S
                self._probe = Probe(self._plan.pipe_directory, self._process.pid, now_s, _PROBE_S)
            if self._probe is None:
                return self._look_s
            if not self._probe.poll(now_s):
                return self._probe.deadline_s
            self._probe.close()
            self._probe = None
            place = self._plan.pipe_directory
            self._conversation = Conversation(self._program, place, [HEARD], now_s, PATIENCE_S)
        except YunionError:
            self.close()
            self._look_s = max(self._look_s, now_s + _PROBE_S)
            return self._look_s
        return self._conversation.deadline_s
