"""A domain's control daemon: a running one of ours is adopted, otherwise a new one is started.

Another program's control daemon is left alone, unless an operator ordered its adoption.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.errors import HostError, ShortageError
from yunion_mps.core.models import DomainPlan, Event, PlannedGpu
from yunion_mps.core.text import printable
from yunion_mps.host.proc import environment_of, started_ticks
from yunion_mps.host.processes import Process, Watchable, describe_exit, spawn, wake
from yunion_mps.mps import directories
from yunion_mps.mps.conversation import ANSWER_TIMEOUT_S, Conversation, Probe, peer_of
from yunion_mps.mps.directory_record import NO_RECORD, DirectoryRecord
from yunion_mps.mps.log_file import LOG_NAME, LogReader
from yunion_mps.mps.processes import (
    PROGRAM,
    AdoptionOrder,
    MpsProcess,
    adoption_order,
    control_environment,
    could_be_ours,
    forget,
    log_directory_in,
    our_processes,
    pipe_directory_in,
    record,
    running_servers,
    server_pids,
)

log = logging.getLogger(__name__)

#: Makes the control daemon serve all users with one server; unknown before 570.
#: Source: NVIDIA: Multi-Process Service, section "Provisioning Sequence", Server.
MULTIUSER = "-multiuser-server"


class ControlDaemon:
    """A domain's control daemon: its process, if any, its history and its log."""

    def __init__(
        self,
        plan: DomainPlan,
        program: str,
        emit: Callable[[Event], None],
        *,
        is_recorded: bool,
        directory_record: DirectoryRecord = NO_RECORD,
    ) -> None:
        """Neither find nor start a process yet.

        plan: what its next server is to have.
        program: the path of NVIDIA's control program.
        emit: called with each event that its log tells.
        is_recorded: whether the limits of its servers are recorded.
        directory_record: that of the directories that are created for it.
        """
        self.program = program
        #: The plan for its next server, with the GPUs in its own order.
        self.target = plan
        #: The order to adopt it, if another program has started it.
        self.order: AdoptionOrder | None = None
        #: Whether it ran before this daemon, and whether its servers may have limits that we set.
        self.was_adopted = False
        self.has_served = False
        #: Whether it replaces an unresponsive control daemon, and has not served yet.
        self.is_replacement = False
        self._had_process = False
        self._is_recorded = is_recorded
        self._directory_record = directory_record
        self._emit = emit
        self._known_servers: tuple[int, ...] = ()
        self._process: Process | None = None
        #: Its log, from its start or adoption on.
        self.log: LogReader

    @property
    def has_process(self) -> bool:
        """Whether there is a process, even if it has ended and was not reaped yet."""
        return self._process is not None

    @property
    def process(self) -> Process:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.status() is not None

    @property
    def is_unrecorded(self) -> bool:
        """Whether another program started it, and the limits of its servers were never recorded."""
        return self.order is not None and not self._is_recorded

    def use_program(self, program: str) -> None:
        """Run this program at the next start."""
        self.program = program

    def servers(self, *, at_last_tick: bool = False) -> tuple[int, ...]:
        """Return the PIDs of its servers: the last known ones if they cannot be read now, or suffice."""
        last_known = self._known_servers
        if at_last_tick:
            return last_known
        try:
            running = tuple(server_pids(self.pid)) if self.pid else ()
        except ShortageError as error:
            log.debug("%s", error)
            return last_known
        # A server that runs and is no longer its child is orphaned, which has not been noticed yet.
        lost = running_servers(pid for pid in last_known if pid not in running)
        self._known_servers = (*running, *lost)
        return self._known_servers

    def adopt_or_start(
        self, desired: DomainPlan, before: DomainPlan, ours: Sequence[MpsProcess] | None = None
    ) -> str:
        """Adopt the control daemon that serves the domain, or start one; returns which, as text.

        `before` is the recorded plan of its clients, `ours` as in `find`. Raises HostError if neither is
        possible.
        """
        if self._had_process:
            ours = ()  # no other can run: only the daemon with the lock starts them, and it had this one
        try:
            # First, because a running one does not need what a new one needs.
            running = find(desired, ours)
            self.target = with_recorded_limits(running.plan, before) if running else desired
            self.log = LogReader(self.target, self._emit, self.servers, is_new=running is None)
            self.has_served = self.was_adopted = running is not None
            self.order = running.order if running else None
            self._process = (
                running.process if running else start(self.program, desired, self._directory_record)
            )
        except HostError:
            self._is_recorded = False
            raise
        self._had_process = True
        if not running:
            return "started"
        record(self.target, running.process.pid)
        if running.plan.pipe_group == desired.pipe_group:
            try:
                set_pipe_access(desired, self._directory_record)
            except HostError as error:  # jobs continue
                log.error("domain %s: %s; %s", desired.name, error.message, error.hint)
        return f"adopted the running control daemon (PID {self.pid})"

    def change(self, plan: DomainPlan) -> None:
        """Make `plan` that of its next server."""
        self.target = in_running_order(plan, self.target)

    def note_served(self) -> None:
        self.has_served = True
        self._is_recorded = True
        self.is_replacement = False

    # -- its end

    def reap(self, *, was_replaced: bool) -> tuple[str, tuple[int, ...]]:
        """Forget the process, which has ended; returns how, as text, and the PIDs of its servers."""
        self.log.report()
        end = "was ended because it was not serving"
        self.is_replacement = was_replaced
        if not was_replaced:
            end = describe_exit(self.process.status() or 0)
        text = f"the control daemon (PID {self.process.pid}) {end}"
        forget(self.target)
        self._release()
        return text, self._take_servers()

    def detach(self) -> None:
        """Forget the process, and leave it running."""
        log.warning("domain %s: leaving the control daemon (PID %d) running", self.target.name, self.pid)
        self._release()

    def kill(self) -> tuple[int, ...]:
        """Kill it because it has no limits; returns the PIDs of its servers, which may have jobs."""
        self.process.kill()
        forget(self.target)
        self._process = None
        return self._take_servers()

    def _take_servers(self) -> tuple[int, ...]:
        servers = self._known_servers
        self._known_servers = ()
        return servers

    def _release(self) -> None:
        self.process.close()
        self._process = None
        self.order = None


class ControlTask:
    """An operation on a control daemon, with at most one conversation and one probe at a time.

    Subclasses have a `tick` that does what is due and returns when to call it again; nothing blocks.
    """

    def __init__(self, control: ControlDaemon) -> None:
        self._control = control
        self._plan = control.target
        self._conversation: Conversation | None = None
        self._probe: Probe | None = None

    def watched(self) -> list[Watchable]:
        watched: list[Watchable] = [self._probe] if self._probe and self._probe.is_connected else []
        return [*watched, self._conversation] if self._conversation else watched

    def close(self) -> None:
        for part in (self._probe, self._conversation):
            if part:
                part.close()
        self._probe = None
        self._conversation = None

    def _wake(self) -> None:
        wake([self._control.process.pid, *self._control.servers()])

    def _connect(self, now_s: float, timeout_s: float) -> Probe:
        """Begin a probe; raises UnresponsiveError and ShortageError."""
        self._probe = Probe(self._plan.pipe_directory, self._control.process.pid, now_s, timeout_s)
        return self._probe

    def _converse(
        self, commands: Sequence[str], now_s: float, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Conversation:
        """Begin a conversation; raises HostError if the front-end cannot be started."""
        place = self._plan.pipe_directory
        self._conversation = Conversation(self._control.program, place, commands, now_s, timeout_s)
        return self._conversation


def start_error(
    plan: DomainPlan,
    ours: Sequence[MpsProcess] | None = None,
    directory_record: DirectoryRecord = NO_RECORD,
) -> HostError | None:
    """Return the error that would keep a control daemon from being started or adopted.

    `ours` as in `find`; directories are created, and recorded in the `directory_record`.
    """
    try:
        running = find(plan, ours)
        if running:
            running.process.close()
        else:
            _prepare(plan, directory_record)
    except HostError as error:
        return error
    return None


# -- adoption


class RunningDaemon(NamedTuple):
    """A running control daemon of ours."""

    process: Process
    #: The plan that it serves.
    plan: DomainPlan
    #: The order to adopt it, if another program started it.
    order: AdoptionOrder | None = None


def find(plan: DomainPlan, ours: Sequence[MpsProcess] | None = None) -> RunningDaemon | None:
    """Find the control daemon that already serves the domain's directory, None if none does.

    `ours` are our processes if the caller knows them. Ours is found whether it answers or not; its GPUs may
    differ from the plan's if a GPU was lost or has returned since. Raises HostError, and leaves the control
    daemon alone, if we would not have started it or it serves no GPU of the plan.
    """
    path = plan.pipe_directory
    processes = our_processes() if ours is None else ours
    daemons = [daemon for daemon in processes if daemon.pipe_directory == path and not daemon.is_server]
    peer = peer_of(path)
    hint = f"once its jobs have ended: echo quit | CUDA_MPS_PIPE_DIRECTORY={path} {PROGRAM}"
    if not daemons:
        if peer is None:
            return None
        message = f"a control daemon (PID {peer.pid}, uid {peer.uid}) not started by yunion-mps serves {path}"
        if could_be_ours(peer.pid):
            hint += f"; or adopt it with its jobs: yunion-mps-daemon --adopt {peer.pid}"
        raise HostError(message, hint, reasons.ADOPTION_REFUSED)
    daemon = daemons[0]
    for listening in daemons:
        if peer is not None and listening.pid == peer.pid:
            daemon = listening
    order = adoption_order(daemon.pid)
    if order and not order.can_serve(plan):
        message = f"the control daemon (PID {daemon.pid}) that was adopted in {path}"
        why = "numbers its GPUs in an unknown order, and their memory limits differ"
        hint = "give its GPUs equal limits, or end it once its jobs have ended"
        raise HostError(f"{message} {why}", hint, reasons.ADOPTION_REFUSED)
    if not set(daemon.gpu_uuids) & set(plan.gpu_uuids):
        message = f"the control daemon (PID {daemon.pid}) that an earlier yunion-mps-daemon left in {path}"
        raise HostError(f"{message} serves none of the configured GPUs", hint, reasons.ADOPTION_REFUSED)
    process = Process.adopt(daemon.pid)
    if process is None:
        return None
    if started_ticks(daemon.pid) != daemon.started_ticks:  # it has ended, and its PID was reused
        process.close()
        return None
    log_directory = daemon.log_directory or plan.log_directory
    # Its servers have its groups (measured), so without the group they cannot enter a restricted directory.
    group = plan.pipe_group if directories.is_member(daemon.pid, plan.pipe_group) else ""
    served = plan._replace(log_directory=log_directory, pipe_group=group).for_gpus(daemon.gpu_uuids)
    return RunningDaemon(process, served, order)


def directories_in_use(pipe_directory: str) -> tuple[str, ...]:
    """Return the pipe and log directory of root's control daemon that serves there; empty if none does.

    It may be another program's. A socket there that only leads to another control daemon does not count: any
    user can make such a link.
    """
    peer = peer_of(pipe_directory)
    if peer is None or not could_be_ours(peer.pid):
        return ()
    environment = environment_of(peer.pid)
    if pipe_directory_in(environment) != pipe_directory:
        return ()
    return pipe_directory, log_directory_in(environment)


def in_running_order(plan: DomainPlan, running: DomainPlan) -> DomainPlan:
    """Return the plan with the GPUs in the running control daemon's order, which its limits refer to."""
    return plan._replace(
        pipe_directory=running.pipe_directory,
        log_directory=running.log_directory,
        pipe_group=running.pipe_group,  # fixed at its start
    ).for_gpus(running.gpu_uuids)


def with_recorded_limits(plan: DomainPlan, recorded: DomainPlan) -> DomainPlan:
    """Add the recorded limits of GPUs for which the plan has none, such as a lost GPU."""
    before = recorded.for_gpus(plan.gpu_uuids).gpus
    gpus: list[PlannedGpu] = []
    for planned, former in zip(plan.gpus, before):
        gpus.append(former if planned.memory_limit_mib is None else planned)
    return plan._replace(gpus=tuple(gpus))


def create_adoption_order(
    pid: int, environment: Mapping[str, str], host_gpus: Sequence[str | None], plan: DomainPlan
) -> AdoptionOrder:
    """Return the order to adopt another program's control daemon; raises HostError if it cannot be adopted.

    The caller knows that the process is NVIDIA's control program and listens in the directory of `plan`.

    environment: that of the process
    host_gpus: the UUIDs of all GPUs of the host in PCI order, None if unknown
    """
    directory = pipe_directory_in(environment)
    if directory != plan.pipe_directory:
        why = f"it was started for {printable(directory)}"
        raise _adoption_error(pid, f"{why}, and cuda_mps_pipe_directory is {plan.pipe_directory}")
    if plan.multiuser:
        raise _adoption_error(pid, "it was started with another value of cuda_mps_multiuser")
    gpu_uuids, in_order = _served_gpus(pid, environment, host_gpus)
    if set(gpu_uuids) != set(plan.gpu_uuids):
        raise _adoption_error(pid, "it does not serve exactly the GPUs that the configuration divides")
    order = AdoptionOrder(pid, started_ticks(pid) or 0, gpu_uuids, in_order, plan.pipe_directory)
    if not order.can_serve(plan):
        why = "its CUDA_DEVICE_ORDER is not PCI_BUS_ID, so its numbering of the GPUs is unknown"
        raise _adoption_error(pid, f"{why}, and their memory limits differ")
    if not order.started_ticks:
        raise _adoption_error(pid, "it has ended")
    return order


def _served_gpus(
    pid: int, environment: Mapping[str, str], host_gpus: Sequence[str | None]
) -> tuple[tuple[str, ...], bool]:
    """Return the UUIDs of its GPUs, and whether it numbers them in this order.

    CUDA_VISIBLE_DEVICES determines the order; without it, CUDA uses its own order, which is the PCI order
    only if CUDA_DEVICE_ORDER says so.

    Source: CUDA Programming Guide, section "CUDA Environment Variables".
    """
    host_uuids = tuple(uuid for uuid in host_gpus if uuid is not None)
    if len(host_uuids) < len(host_gpus):
        raise _adoption_error(pid, "a GPU of this host has no known UUID")
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return host_uuids, len(host_uuids) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    uuids = tuple(word.strip() for word in named.split(","))
    if not set(uuids) <= set(host_uuids):
        raise _adoption_error(pid, f"its CUDA_VISIBLE_DEVICES is {named!r}: only UUIDs identify GPUs")
    return uuids, True


def _adoption_error(pid: int, why: str) -> HostError:
    hint = "end it once its jobs have ended; yunion-mps then starts its own"
    message = f"the control daemon (PID {pid}) cannot be adopted: {why}"
    return HostError(message, hint, reasons.ADOPTION_REFUSED)


# -- start


def start(program: str, plan: DomainPlan, directory_record: DirectoryRecord = NO_RECORD) -> Process:
    """Start NVIDIA's control daemon in the foreground, appending to its log; raises HostError.

    Source: nvidia-cuda-mps-control(1), -f: what it logs goes to its standard output.
    """
    _prepare(plan, directory_record)
    with directories.use(plan.log_directory, directory_record) as directory:
        output = directories.open_log(directory, plan.log_directory, LOG_NAME)
    if plan.pipe_group:
        directories.join(plan.pipe_group)
    command = [program, "-f", MULTIUSER] if plan.multiuser else [program, "-f"]
    record(plan)
    try:
        environment = control_environment(plan, program)
        process = spawn(command, environment, stdin=None, stdout=output, stderr=output)
    except HostError:
        forget(plan)
        raise
    finally:
        os.close(output)
    record(plan, process.pid)
    return process


def _prepare(plan: DomainPlan, directory_record: DirectoryRecord) -> None:
    """Create both directories; raises HostError if they contain another user's files, or cannot be read."""
    set_pipe_access(plan, directory_record)
    for path in (plan.log_directory, plan.pipe_directory):
        with directories.use(path, directory_record) as directory:
            directories.check_entries(directory, path)


def set_pipe_access(plan: DomainPlan, directory_record: DirectoryRecord) -> None:
    """Create the pipe directory, and set its permissions as planned.

    Raises HostError if that is impossible.
    """
    path = plan.pipe_directory
    with directories.use(path, directory_record) as directory:
        directories.set_access(directory, path, plan.pipe_group, directory_record)
