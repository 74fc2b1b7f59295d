"""The place of a fault: a simulated host with both daemons and jobs; and what is measured there.

with Scene(None) as scene:
    job = scene.serve().job()
    scene.inject(lambda: os.kill(scene.control, signal.SIGKILL))
    scene.serves_again()
    scene.record_report("was killed by signal 9")
    row = Row(..., lost(scene), scene.recovery, scene.words)
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from integration.daemon_host import Daemon, control_daemons, is_running
from simhost import Description, SimHost
from simhost.host import Closes
from simhost.mps import CONTROL, Client, StandIns
from waiting import pause

T = TypeVar("T")

#: One GPU that enforces budgets, divided by four.
ONE_GPU: Description = [{"kind": "v100"}]
#: The GPUs' compute mode before the daemon: not the driver's own, so that only a remembered one is right.
FORMER_MODE = "prohibited"
#: So long that only something that never comes is missed: the limits are read back every 60 s.
PATIENCE_S = 120.0
#: Set when the tests are interrupted: no scene waits any longer.
INTERRUPTED = threading.Event()


def until(look: Callable[[], T], what: str, trouble: Callable[[], str] = str, pause_s: float = 0.1) -> T:
    """Return what `look` returns once that is true, looked at again after `pause_s` at most.

    Raises AssertionError with `what` if it never is.
    """
    begun_s = time.monotonic()
    while not (found := look()):
        if time.monotonic() > begun_s + PATIENCE_S or INTERRUPTED.is_set():
            raise AssertionError(f"{what} did not come about\n{trouble()}")
        pause(begun_s, pause_s)
    return found


class SceneDaemon(Daemon):
    """A daemon that may run in a mount namespace of its own."""

    #: Where its root directory is to be found.
    namespace = ""

    @property
    def socket_path(self) -> Path:
        return Path(f"{self.namespace}{super().socket_path}")


class Scene(Closes):
    """One host on which one fault happens; nothing of it is left at the end. A context manager."""

    def __init__(self, gpus: Description | None) -> None:
        #: What is to be closed at the end, the last one first.
        self.stack = ExitStack()
        self.host = self.stack.enter_context(SimHost.create(gpus or ONE_GPU))
        self.stand_ins = self.stack.enter_context(StandIns(self.host))
        self.daemon = SceneDaemon(self.host)
        self.stack.enter_context(self.daemon)
        #: What each domain has as its limits.
        self.budgets = ["4G", "25.0"]
        self.words = ""
        self.recovery = ""
        for gpu in self.host.gpus:
            gpu.compute_mode = FORMER_MODE
        #: The jobs that must live on.
        self.jobs: list[Client] = []
        self._shown: set[int] = set()
        #: The events that must stay.
        self.known_events: list[dict[str, Any]] = []
        #: The lease that must stay: this process has it.
        self.lease = ""
        self._fault_s = 0.0

    # -- before the fault

    def serve(self, **environment: str) -> Scene:
        self.daemon.start(**environment).wait_ready()
        self.all_available()
        self.hold_a_lease()
        return self

    def hold_a_lease(self) -> None:
        """This process has a device from now on, if it has none yet."""
        if not self.lease:
            self.lease = self.daemon.ask("POST", "/v1/leases", f"holder.pid={os.getpid()}")[1]["id"]

    @property
    def keeps_the_lease(self) -> bool:
        return self.lease in [lease["id"] for lease in self.daemon.get("/v1/leases")[1]["leases"]]

    def job(self, uid: int | None = None) -> Client:
        """A job that is attached to its MPS server, and that the driver shows on the first GPU."""
        job = self.waiting_job(uid)
        assert job.says() == "attached"
        self._show_processes()
        return job

    def waiting_job(self, uid: int | None = None) -> Client:
        """A job that has asked for a server, and gets none yet."""
        job = self.stand_ins.client(self.pipe_directory, uid)
        assert job.says() == "asking"
        self.jobs.append(job)
        self._show_processes()
        return job

    def end(self, job: Client) -> None:
        self.jobs.remove(job)
        job.end()
        self._show_processes()

    def forget(self, job: Client) -> None:
        """Not to expect of a job that it lives on, which may have ended."""
        self.jobs.remove(job)
        self._show_processes()

    @property
    def pipe_directory(self) -> Path:
        return Path(self.daemon.status()["domains"][0]["pipe_directory"])

    @property
    def control(self) -> int:
        return int(self.domain["pid"] or 0)

    @property
    def domain(self) -> dict[str, Any]:
        return dict(self.daemon.status()["domains"][0])

    @property
    def control_program(self) -> Path:
        """What the daemon starts as the control daemon; may be replaced."""
        return self.stand_ins.folder / CONTROL

    def limits(self, place: Path | None = None) -> list[str]:
        """The defaults of a domain, asked through NVIDIA's front-end: what the next server gets."""
        return self.ask(
            "get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage", place=place
        )

    def ask(self, *questions: str, place: Path | None = None) -> list[str]:
        """What a control daemon tells NVIDIA's front-end; asked again until one serves there."""
        place = place or self.pipe_directory

        def answer() -> list[str]:
            with contextlib.suppress(AssertionError):
                return self.daemon.control(*questions, pipe_directory=place)
            return []

        return until(answer, "the control daemon's answer", self.trouble)

    # -- the fault

    def inject(self, fault: Callable[[], object], *, answers: bool = True) -> None:
        """Let the fault happen, and begin to measure; `answers` is whether the daemon can be asked before."""
        if answers:
            self.remember_events()
        self._fault_s = time.monotonic()
        fault()

    def repair(self, action: Callable[[], object], what: str) -> None:
        """Do what the operator has to do, and measure again from then on."""
        self.note_recovery(f"after {what}: ")
        self._fault_s = time.monotonic()
        action()

    def serves_again(self, also: Callable[[], object] = lambda: True) -> None:
        """Wait until every device is served (and `also` holds), and note how long that took."""
        self.all_available(also)
        self.note("serves again after {}")

    def another_serves(self, old: int) -> None:
        """As `serves_again`, by another control daemon than this one."""
        self.serves_again(lambda: self.control not in (0, old))

    def kill_control_daemon(self) -> None:
        """Let its death (SIGKILL) be the fault, and wait until another serves."""
        old = self.control
        self.inject(lambda: os.kill(old, signal.SIGKILL))
        self.another_serves(old)

    def expect_report(self, text: str) -> None:
        """Wait until the operator can read `text`, keep its line for the table, and note the time."""
        self.record_report(text)
        self.note("reported after {}")

    @property
    def elapsed_s(self) -> float:
        """How long ago the fault, or its repair, was."""
        return time.monotonic() - self._fault_s

    def record_report(self, text: str) -> None:
        """Keep the first line with `text` that the operator could read for the table."""
        self.words = until(lambda: self.find(text), f"{text!r} in status, log or events", self.trouble)

    def find(self, text: str) -> str:
        return next((shown(line, self.host) for line in readable(self.daemon) if text in line), "")

    def note_recovery(self, what: str = "serves throughout") -> None:
        """Add to the recovery in the table; `what` ends with a space if the next note continues it."""
        if self.recovery and not self.recovery.endswith(" "):
            self.recovery += "; "
        self.recovery += what

    def all_available(self, also: Callable[[], object] = lambda: True) -> None:
        """Wait until every device is served, which is asked once `also` holds: before, it is old news.

        Some may be pending: a scene keeps its lease while it divides the GPU in another way.
        """
        until(lambda: also() and self._is_whole(), "all devices served", self.trouble)

    def unavailable(self) -> None:
        until(lambda: not self._devices()["available"], "no device available", self.trouble)

    def control_daemons(self) -> list[int]:
        """The PIDs of the control daemons that run, without front-ends."""
        return [pid for pid in control_daemons(self.host.root) if _is_control_daemon(pid)]

    # -- what is to be compared afterwards

    def remember_events(self) -> None:
        """Take note of the events that there are, which must never go."""
        if self.daemon.running:
            self.known_events = self.events()

    def events(self) -> list[dict[str, Any]]:
        return events_of(self.daemon)

    def trouble(self) -> str:
        with contextlib.suppress(OSError, AssertionError):
            return f"{self.daemon.status()}\n{self.daemon.log}"
        return self.daemon.log

    def close(self) -> None:
        self.host.clear()
        self.stack.close()

    # -- its own

    def _devices(self) -> dict[str, int]:
        try:
            return dict(self.daemon.status()["devices"])
        except OSError:
            return {"total": 0, "available": 0}

    def _show_processes(self) -> None:
        """Have the driver show the jobs and servers that there are, as clients of MPS and as processes."""
        now = {job.pid: "M+C" for job in self.jobs if is_running(job.pid)}
        now.update((pid, "C") for pid in self.stand_ins.servers())
        for pid in self._shown - set(now):
            self.host.gpus[0].remove_process(pid)
        for pid in set(now) - self._shown:
            self.host.gpus[0].add_process(pid, 100, now[pid])
        self._shown = set(now)

    def _is_whole(self) -> bool:
        if self._shown:
            self._show_processes()
        devices = self._devices()
        return 0 < devices["total"] == devices["available"] + devices["pending"]

    def note(self, words: str) -> None:
        self.note_recovery(words.format(shown_s(self.elapsed_s)))


def _is_control_daemon(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return os.readlink(f"/proc/{pid}/exe").endswith(CONTROL) and b"-f" in words
    return False


def readable(daemon: Daemon) -> list[str]:
    """What an operator can read: the events, the status, the GPUs, the log.

    They are read in the opposite order, so that what is in two of them is always found in the same one.
    """
    log = [re.sub(r"^<\d>", "", line) for line in daemon.log.splitlines()]
    if not daemon.running:
        return log
    with contextlib.suppress(OSError, AssertionError):
        gpus = [gpu["reason"] for gpu in daemon.get("/v1/gpus")[1]["gpus"]]
        status = daemon.status()
        lines = [status["notice"], *daemon.warnings()]
        for domain in status["domains"]:
            lines += [domain["reason"], domain["pending"]]
        return [*map(_sentence, events_of(daemon)), *lines, *gpus, *log]
    return log


def events_of(daemon: Daemon) -> list[dict[str, Any]]:
    """The newest events (1,000), oldest first."""
    status, answer = daemon.get("/v1/events?limit=1000")
    assert status == 200, answer
    return list(answer["events"])


def _sentence(event: dict[str, Any]) -> str:
    cause = f" ({event['cause']})" if event["cause"] else ""
    means = f": {event['consequence']}" if event["consequence"] else ""
    return f"{event['subject']}: {event['what']}{cause}{means}"


def shown(line: str, host: SimHost) -> str:
    """The line as it would be on any host: without the root, and N for what is another number each time."""
    text = line.replace(str(host.root), "")
    text = re.sub(r"\b(PIDs?) \d+(, \d+)*", r"\1 N", text)
    text = re.sub(r"\b(kill -\w+) \d+", r"\1 N", text)
    text = re.sub(r"\b(lease) [0-9a-f]{8}\b", r"\1 ID", text)
    text = re.sub(r"\bhas \d+ connections", "has N connections", text)
    # A queue that is filled from the start may be full before or after the domain is ready.
    text = re.sub(r"\b(applying|ready) (-> wedged .*its queue is full)", r"… \2", text)
    return re.sub(r"GPU-[0-9a-f-]{36}", "GPU-…", text)


def shown_s(elapsed_s: float) -> str:
    """A time as the table has it, so rough that it is nearly the same each time."""
    if elapsed_s < 0.1:
        return "under 0.1 s"
    return f"{elapsed_s:.1f} s" if elapsed_s < 2 else f"{elapsed_s:.0f} s"
