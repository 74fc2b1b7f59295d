"""Bringing limits into force: set, read back, and found out for which servers they do not count.

What is set counts for the next MPS server only. A control daemon that was found running is therefore asked
before it is told anything: what its servers have can be known only from what it says and what we remember.
"""

from __future__ import annotations

from typing import NamedTuple

from yunion_mps.errors import ControlError, ShortageError
from yunion_mps.models import DomainPlan
from yunion_mps.mps import limits
from yunion_mps.mps.adoption import as_served
from yunion_mps.mps.control import PROGRAM, Conversation, OccupiedError
from yunion_mps.mps.diagnosis import front_end_at
from yunion_mps.mps.servers import named

ANSWER_TIMEOUT_S = 5.0
#: How often a control daemon is asked again that turned us away, and for how long where it is a new one.
LOOK_AGAIN_S = 1.0
OCCUPIED_TIMEOUT_S = 10.0


class InForce(NamedTuple):
    """What a control daemon's clients get, and the servers (PIDs) for which that is not what is wanted."""

    plan: DomainPlan
    old_servers: tuple[int, ...] = ()


class Applying:
    """One application of limits to a control daemon; nothing here waits."""

    def __init__(
        self,
        program: str,
        now: InForce,
        target: DomainPlan,
        now_s: float,
        *,
        setting: bool,
        has_served: bool,
        idle: bool,
        strange: bool = False,
    ) -> None:
        """Begin; `now` is what is in force as far as we know.

        `setting`: the limits are set without asking first. `has_served`: it may have jobs, so where another
        front-end has its ear, it is asked again for good. `idle`: no job uses its GPUs, so a server that is
        in the way may be asked to end. `strange`: somebody else has started it, and nobody has noted what its
        servers have; where that is not what is wanted, they are taken for ones with other limits.
        """
        self._program = program
        self._known = now
        self._target = target
        self._setting = setting
        self._idle = idle
        self._first: list[str] = []
        self._has_served = has_served
        self._strange = strange
        self._give_up_s = None if has_served else now_s + OCCUPIED_TIMEOUT_S
        self._again_s = 0.0
        #: Why it takes longer than usual, empty where it does not.
        self.note = ""
        self._conversation: Conversation | None = None

    def descriptors(self) -> list[int]:
        """What to watch for reading."""
        return [self._conversation.fileno()] if self._conversation else []

    def tick(self, now_s: float) -> float | InForce:
        """What is in force, once that is read back; before that, when to be called again.

        Raises SilentError where there is no answer, ControlError where the limits are not in force, or where
        nobody knows which a running server has; ShortageError where a new one cannot be talked to.
        """
        if self._conversation is None and now_s < self._again_s:
            return self._again_s
        conversation = self._conversation or self._begin(now_s)
        if conversation is None:
            return self._again_s
        answer = conversation.poll(now_s)
        if answer is None:
            return conversation.deadline_s
        self._conversation = None
        if not answer:
            return self._turned_away(now_s)
        settled = self._settled(answer)
        if settled:
            return settled
        self._setting = True
        return self.tick(now_s)

    def close(self) -> None:
        """Give back what is held."""
        if self._conversation:
            self._conversation.close()
            self._conversation = None

    def _begin(self, now_s: float) -> Conversation | None:
        """Talk to it; None if no process can be started for that, and it may have jobs: it is tried again."""
        first = [*self._first, *limits.setting(self._target)] if self._setting else []
        # The servers are asked for after the limits were set: one that comes in between counts as an old one.
        commands = [*first, "get_server_list", *limits.asking(self._target)]
        place = self._target.pipe_directory
        try:
            self._conversation = Conversation(self._program, place, commands, now_s, ANSWER_TIMEOUT_S)
        except ShortageError as error:
            if not self._has_served:
                raise
            self.note = f"{error.message}; {error.hint}"
            self._again_s = now_s + LOOK_AGAIN_S
        return self._conversation

    def _turned_away(self, now_s: float) -> float:
        place = self._target.pipe_directory
        if self._give_up_s is not None and now_s >= self._give_up_s:
            raise OccupiedError(place, front_end_at(place))
        if not self.note:
            error = OccupiedError(place, front_end_at(place))
            self.note = f"{error.message}; {error.hint}"
        self._again_s = now_s + LOOK_AGAIN_S
        return self._again_s

    def _settled(self, answer: list[str]) -> InForce | None:
        """What is in force by the answer, None where the limits have to be set first."""
        if self._setting:
            limits.check_percentage(self._target, answer[0])
            answer = answer[1:]
        servers = tuple(limits.servers_in(answer))
        said = answer[len(servers) :]
        before = as_served(self._known.plan, self._target)
        old = tuple(pid for pid in self._known.old_servers if pid in servers)
        if self._setting:
            limits.check(self._target, said)
            if before != self._target or not self._has_served or self._strange:
                old = servers  # of a new control daemon too: a job may have come before the limits did
        elif not limits.match(self._target, said):
            if self._strange:
                return None
            if set(servers) - set(self._known.old_servers) and not limits.match(self._asked(before), said):
                self._make_way(servers)
            elif before == self._target:  # a change was taken back: the servers have what is wanted
                self._known = InForce(self._known.plan)
            return None
        return InForce(before, old) if old else InForce(self._target)

    def _asked(self, plan: DomainPlan) -> DomainPlan:
        """The plan's limits for the GPUs that are asked for: not for one that is wanted no more."""
        asked = {gpu.uuid for gpu in self._target.gpus if gpu.memory_limit_mib is not None}
        gpus = (gpu if gpu.uuid in asked else gpu._replace(memory_limit_mib=None) for gpu in plan.gpus)
        return plan._replace(gpus=tuple(gpus))

    def _make_way(self, servers: tuple[int, ...]) -> None:
        """Servers have limits that nobody knows; where they have no jobs, have them end."""
        if self._idle:
            self._first = [f"shutdown_server {pid}" for pid in servers]
            return
        command = f"echo shutdown_server {servers[0]}"
        raise ControlError(
            f"{named(servers)} keeps limits that neither this configuration nor the last one has",
            "it is ended once no job uses its GPUs; to have it end after its jobs, before others come: "
            f"{command} | CUDA_MPS_PIPE_DIRECTORY={self._target.pipe_directory} {PROGRAM}",
        )
