"""A domain's control daemon: found or started, what is under way with it, and its end; nothing waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Union

from yunion_mps.errors import HostError
from yunion_mps.host.processes import Process, describe_exit
from yunion_mps.models import DomainPlan, Event
from yunion_mps.mps import launch
from yunion_mps.mps.adoption import find, with_remembered
from yunion_mps.mps.applying import Applying, InForce
from yunion_mps.mps.ending import Ending
from yunion_mps.mps.news import NewsReader
from yunion_mps.mps.ownership import MpsProcess, forget, record
from yunion_mps.mps.taken_over import TakenOver
from yunion_mps.mps.watch import Watch
from yunion_mps.mps.wedge import Wedge

log = logging.getLogger(__name__)


Work = Union[launch.Starting, Applying, Watch, Wedge, Ending]


class ControlDaemon:
    """The process while there is one, what is known of its past, its log, and one work at a time with it."""

    def __init__(
        self,
        plan: DomainPlan,
        program: str,
        tell: Callable[[Event], None],
        servers: Callable[[], Sequence[int]],
        *,
        is_remembered: bool,
    ) -> None:
        """`servers` tells the PIDs of its servers; `is_remembered`: what these have was written down."""
        self.program = program
        #: What is under way with it.
        self.work: Work | None = None
        #: What its next server is to get, the GPUs in its own order.
        self.target = plan
        #: What is noted of it where somebody else has started it.
        self.taken_over: TakenOver | None = None
        #: Whether it ran before us, and whether it has served: then it may have jobs.
        self.was_found = self.has_served = False
        self._had_one = False
        self.is_remembered = is_remembered
        self._tell = tell
        self._servers = servers
        self._process: Process | None = None
        self._news = NewsReader(plan, tell, servers)

    @property
    def runs(self) -> bool:
        """Whether there is one; its end is to be noticed yet."""
        return self._process is not None

    @property
    def process(self) -> Process:
        """It; to be asked for only where there is one."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int | None:
        """Its PID, None where there is none."""
        return self._process.pid if self._process else None

    @property
    def took_over(self) -> bool:
        """Whether there is one that ran before us, and so may have jobs."""
        return self.was_found and self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended since it was held, and is to be let go of."""
        return self._process is not None and self._process.status() is not None

    @property
    def waits_for_somebody(self) -> bool:
        """Whether somebody else keeps it, which served before, from answering."""
        return self.has_served and isinstance(self.work, Applying) and bool(self.work.note)

    @property
    def is_replaced(self) -> bool:
        """Whether it is being ended because it did not serve."""
        return isinstance(self.work, Wedge) and self.work.ended

    def descriptors(self) -> list[int]:
        """What to watch for reading: its end, and the answers that are awaited."""
        end = [self._process.fileno()] if self._process else []
        return [*end, *self.work.descriptors()] if self.work else end

    def begin(self, wanted: DomainPlan, before: DomainPlan, ours: Sequence[MpsProcess] | None = None) -> str:
        """Take over one that serves the domain already, or start one; returns which, in words.

        `before` is what is remembered of its clients' plan, `ours` as `find` takes it. Raises HostError where
        neither can be done.
        """
        if self._had_one:
            ours = ()  # no other can run: only the daemon with the lock starts them, and it had this one
        try:
            found = find(wanted, ours)  # first, for one that serves needs nothing of what a new one needs
            self.target = with_remembered(found.plan, before) if found else wanted
            self._news = NewsReader(self.target, self._tell, self._servers)
            self.has_served = self.was_found = found is not None
            self.taken_over = found.taken_over if found else None
            self._process = found.process if found else launch.begin(self.program, wanted)
        except HostError:
            self.is_remembered = False
            raise
        self._had_one = True
        if found:
            record(self.target, found.process.pid)
            if found.plan.pipe_group == wanted.pipe_group:
                self._set_access(wanted)
        return f"took over the running control daemon (PID {self.pid})" if found else "started"

    def _set_access(self, plan: DomainPlan) -> None:
        """Set who may enter the pipe directory as planned; a failure is only logged, and jobs go on."""
        try:
            launch.set_access(plan)
        except HostError as error:
            log.error("domain %s: %s. %s", plan.name, error.message, error.hint)

    def await_answer(self, now_s: float) -> None:
        """Begin to wait for its first sign of life."""
        self.drop()
        self.work = launch.Starting(self.process, self.target, now_s)

    def apply(self, known: InForce, now_s: float, *, setting: bool, idle: bool) -> None:
        """Begin to bring its limits into force (see `Applying`); `known` is what is, as far as we know."""
        self.drop()
        strange = self.taken_over is not None and not self.is_remembered
        self.work = Applying(
            self.program, known, self.target, now_s, setting=setting, has_served=self.has_served, idle=idle,
            strange=strange,
        )  # fmt: skip

    def watch(self, now_s: float) -> None:
        """It serves: begin to look after it."""
        self.drop()
        self.has_served = self.is_remembered = True
        servers, pid = self._servers(), self.process.pid
        self.work = Watch(self.program, self.target, pid, servers, self._news.tell, now_s)

    def begin_anew(self, why: str, now_s: float) -> Wedge:
        """It does not serve, and may have jobs: have it serve again, or be ended without harm."""
        self.drop()
        work = Wedge(self.process, self.target, self.program, self._servers, why, now_s)
        self.work = work
        return work

    def end(self, plan: DomainPlan, now_s: float, *, timeout_s: int) -> None:
        """Begin to end it; its clients, which have what is in `plan`, have so long."""
        self.drop()
        self.work = Ending(self.process, plan, self.program, self._servers, now_s, timeout_s=timeout_s)

    def drop(self) -> None:
        """Leave off what is under way."""
        if self.work:
            self.work.close()
            self.work = None

    def bury(self) -> str:
        """Let go of one that has ended; returns how it did, in words."""
        self._news.tell()
        how = "did not serve, and was ended"
        if not self.is_replaced:
            how = describe_exit(self.process.status() or 0)
        what = f"the control daemon (PID {self.process.pid}) {how}"
        forget(self.target)
        self._let_go()
        return what

    def leave(self) -> None:
        """Let go of one that goes on."""
        log.warning("domain %s: the control daemon (PID %d) is left running", self.target.name, self.pid)
        self._let_go()

    def kill(self) -> None:
        """End one that has no jobs for good."""
        self.drop()
        self.process.kill()
        forget(self.target)
        self._process = None

    def _let_go(self) -> None:
        self.drop()
        self.process.close()
        self._process = self.taken_over = None
