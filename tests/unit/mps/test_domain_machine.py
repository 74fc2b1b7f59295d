"""Faults, commands and time in any order, on NVIDIA's real control daemon, and what must always hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from yunion_mps.core.enums import APPLYING, READY, STOPPED, STOPPING
from yunion_mps.host.proc import all_pids, environment_of, parent_of, program_of
from yunion_mps.host.process_info import is_stopped
from yunion_mps.mps import limits
from yunion_mps.mps.conversation import Conversation, UnresponsiveError

from descriptors import open_descriptors
from simhost.mps import Client

from .domain_bench import Bench, DomainRun
from .other_processes import PATIENCE_S

#: Longer than every deadline there is: 10 s for clients, 2 s each for three steps, and orphans after them.
STOP_WITHIN_S = 10 + 3 * 2 + 2 * 2
MINUTES_S = 60.0


def control_daemons(place: str) -> list[int]:
    """The PIDs of the control daemons on the directory.

    Front-ends have no GPUs in their environment, and a child is about to become a server.
    """
    found = [
        pid
        for pid in all_pids()
        if program_of(pid).endswith("/nvidia-cuda-mps-control")
        and (environment := environment_of(pid)).get("CUDA_MPS_PIPE_DIRECTORY") == place
        and "CUDA_VISIBLE_DEVICES" in environment
    ]
    return [pid for pid in found if parent_of(pid) not in found]


class Faults(RuleBasedStateMachine):
    """One domain, and all that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        place = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="mps.")))
        place.chmod(0o755)
        bench = Bench(place, self.stack)
        self.plan, self.jobs = bench.plan, bench.jobs
        self.files = len(open_descriptors())
        self.running: list[Client] = []
        #: Whether another program may have changed the limits since they were last read.
        self.meddled = False
        #: Connections that say nothing, with the PID of the control daemon that they keep from all others.
        self.silent: dict[socket.socket, int | None] = {}
        #: Control daemons of daemons that died: children of this process still, as they would not be.
        self.lost: list[int] = []
        self.run = DomainRun(self.plan, self.jobs.program)

    @initialize()
    def begin(self) -> None:
        self.run.start()

    # -- time and commands

    # No rule has a precondition: what state it is in may differ by a millisecond from run to run.

    def let(self, seconds: float) -> None:
        """Let time pass as it does: in small steps, with what really happens in between."""
        end_s = self.run.now_s + seconds
        while True:
            due_s = self.run.domain.tick(self.run.now_s)
            self.settle()
            if self.run.now_s >= end_s:
                return
            step_s = 5.0 if due_s is None else max(due_s - self.run.now_s, 0.01)
            self.run.now_s = min(end_s, self.run.now_s + step_s)

    def settle(self) -> None:
        """Give real processes the time that they need, which is none of the test's own clock."""
        for _ in range(20):
            before = (self.run.state, len(self.run.events))
            time.sleep(0.001)
            self.run.tick()
            if (self.run.state, len(self.run.events)) == before and len(self.run.domain.watched()) <= 1:
                break
        if self.run.state == READY and "limit" in {event.kind for event in self.run.events[-5:]}:
            self.meddled = self.meddled and self.wrong() != []

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 12.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.let(seconds)

    @rule(percentage=st.sampled_from([25.0, 50.0, 12.5]), memory_mib=st.sampled_from([5760, 2880]))
    def change(self, percentage: float, memory_mib: int) -> None:
        gpus = tuple(gpu._replace(memory_limit_mib=memory_mib) for gpu in self.plan.gpus)
        self.plan = self.plan._replace(thread_percentage=percentage, gpus=gpus)
        self.run.domain.change(self.plan, self.run.now_s)
        self.let(0.5)

    @rule()
    def drain(self) -> None:
        self.run.domain.drain(self.run.now_s)
        self.let(1.0)

    @rule(may_end=st.sampled_from([lambda _: True, lambda _: False]), has_unlisted=st.booleans())
    def end_servers(self, *, may_end: Callable[[int], bool], has_unlisted: bool) -> None:
        servers = self.run.domain.server_pids() if has_unlisted else []
        self.run.domain.end_servers(self.run.now_s, may_end, servers)
        self.let(1.0)

    @rule(in_use=st.sampled_from([None, True, False]))
    def look_with_nvml(self, *, in_use: bool | None) -> None:
        """It never says that there are no jobs where there are."""
        self.run.domain.note_use(in_use=True if self.running and in_use is False else in_use)

    @rule()
    def stop(self) -> None:
        if self.run.state == STOPPED:
            return
        self.let_go()
        self.free_directory()
        self.run.stop()
        self.let(STOP_WITHIN_S)
        end_s = time.monotonic() + PATIENCE_S
        while self.run.state != STOPPED and time.monotonic() < end_s:
            self.settle()
        assert self.run.state == STOPPED, self.run.domain.reason
        assert control_daemons(self.plan.pipe_directory) == []
        assert self.jobs.servers() == []
        self.end_jobs()

    @rule()
    def start(self) -> None:
        if self.run.state != STOPPED:
            return
        self.run.start()
        self.let(0.5)

    # -- what others do

    @rule(number=st.sampled_from([signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM]))
    def signal_control_daemon(self, number: signal.Signals) -> None:
        pid = self.run.domain.status().pid
        if pid:
            os.kill(pid, number)
            self.settle()

    @rule(name=st.sampled_from(["control", "control_lock", "control_privileged", "log"]))
    def remove_socket(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.plan.pipe_directory}/{name}")

    @rule()
    def meddle(self) -> None:
        self.ask("set_default_active_thread_percentage 99")
        self.meddled = True

    @rule()
    def begin_job(self) -> None:
        if not os.path.exists(f"{self.plan.pipe_directory}/control"):
            return
        self.running.append(self.jobs.stand_ins.client(Path(self.plan.pipe_directory)))
        self.run.domain.note_use(in_use=True)
        self.settle()

    @rule()
    def end_jobs(self) -> None:
        for job in self.running:
            job.end()
        self.running.clear()
        self.settle()

    @rule()
    def keep_waiting(self) -> None:
        """Connect and say nothing, which keeps the control daemon from all others."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        self.silent[connection] = self.run.domain.status().pid
        with contextlib.suppress(OSError):
            connection.connect(f"{self.plan.pipe_directory}/control")

    @rule()
    def let_go(self) -> None:
        for connection in self.silent:
            connection.close()
        self.silent.clear()

    @rule()
    def lose_the_daemon(self) -> None:
        """Ours dies, and the next one begins with what was recorded."""
        self.run.domain.cancel_task()
        if self.run.domain.control.has_process:
            self.lost.append(self.run.pid)
            self.run.domain.control.process.close()
        was_running = self.run.state not in (STOPPED, STOPPING)
        self.run = DomainRun(self.plan, self.jobs.program, self.run.domain.limits_in_effect, self.run.now_s)
        if was_running or control_daemons(self.plan.pipe_directory):
            self.run.start()
            self.let(1.5)

    @rule()
    def block_directory(self) -> None:
        log = Path(self.plan.log_directory)
        if log.is_dir():
            shutil.rmtree(log)
            log.touch()

    @rule()
    def free_directory(self) -> None:
        log = Path(self.plan.log_directory)
        if log.is_file():
            log.unlink()

    # -- what holds

    def ask(self, *commands: str) -> list[str]:
        """The answer; empty if there is none, which is known without waiting if it cannot answer."""
        pid = self.run.domain.status().pid
        if pid is not None and (pid in self.silent.values() or is_stopped(pid)):
            return []
        place = self.plan.pipe_directory
        conversation = Conversation(self.jobs.program, place, commands, time.monotonic(), 1.0)
        try:
            while (answer := conversation.poll(time.monotonic())) is None:
                time.sleep(0.001)
        except UnresponsiveError:
            return []
        return answer

    def wrong(self) -> list[str]:
        """The limits that the next server would have, if they are not ours; empty if it does not answer."""
        answer = self.ask(*limits.get_commands(self.run.domain.desired))
        return [] if not answer or limits.match(self.run.domain.desired, answer) else answer

    @invariant()
    def one_control_daemon_at_most(self) -> None:
        assert len(control_daemons(self.plan.pipe_directory)) <= 1

    @invariant()
    def ready_means_that_the_limits_are_ours(self) -> None:
        if self.run.state == READY and not self.meddled:
            assert self.wrong() == []

    @invariant()
    def every_wait_has_an_end(self) -> None:
        due_s = self.run.domain.tick(self.run.now_s)
        assert self.run.state == STOPPED or due_s is not None

    @invariant()
    def servers_are_known_where_it_stops_or_serves(self) -> None:
        if self.run.state not in (READY, APPLYING, STOPPING):
            return
        self.let(1.0)
        if self.run.state == READY and not self.running:
            assert set(self.run.domain.server_pids()) >= set(self.jobs.servers())

    def teardown(self) -> None:
        self.let_go()
        for job in self.running:
            job.end()
        if Path(self.plan.log_directory).is_file():
            os.unlink(self.plan.log_directory)
        self.run.end()
        left = control_daemons(self.plan.pipe_directory)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in {*left, *self.lost}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        files = len(open_descriptors())
        self.stack.close()
        assert left == [], "a control daemon is left"
        assert files <= self.files, "a descriptor is left"
        with contextlib.suppress(ChildProcessError):
            assert os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, "a zombie is left"


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=8, stateful_step_count=18, deadline=None, derandomize=True)
