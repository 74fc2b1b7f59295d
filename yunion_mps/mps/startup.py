"""How a domain gets its control daemon: one of ours that runs already is adopted, otherwise one is started.

Another program's control daemon is left alone, except for one that we were ordered to adopt.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from yunion_mps import reasons
from yunion_mps.errors import HostError
from yunion_mps.escaping import printable
from yunion_mps.host.proc import started_ticks
from yunion_mps.host.processes import Process, spawn
from yunion_mps.models import DomainPlan
from yunion_mps.mps import directories
from yunion_mps.mps.conversation import peer_of
from yunion_mps.mps.log_file import LOG_NAME
from yunion_mps.mps.processes import (
    PROGRAM,
    AdoptionOrder,
    MpsProcess,
    adoption_order,
    client_variables,
    control_environment,
    could_be_ours,
    forget,
    our_processes,
    pipe_directory_in,
    record,
    server_path,
)

#: Has the control daemon give all users one server; before 570 it is not known.
MULTIUSER = "-multiuser-server"

#: How long a control program is tried: it serves after some milliseconds, or later on a machine under load.
_TRIAL_S = 2.0
_TRIAL_POLL_MS = 5

#: What was found out, by a program's path, time of change and size.
_knows_multiuser: dict[tuple[str, int, int], bool] = {}


def obstacle(plan: DomainPlan, ours: Sequence[MpsProcess] | None = None) -> HostError | None:
    """What would keep a control daemon from being started or adopted; `ours` as `find` takes it."""
    try:
        found = find(plan, ours)
        if found:
            found.process.close()
        else:
            _prepare(plan)
    except HostError as error:
        return error
    return None


# -- adoption


class RunningDaemon(NamedTuple):
    """A control daemon of ours that runs already, and the domain as it serves it.

    `order` is the one to adopt it, if another program has started it.
    """

    process: Process
    plan: DomainPlan
    order: AdoptionOrder | None = None


def find(plan: DomainPlan, ours: Sequence[MpsProcess] | None = None) -> RunningDaemon | None:
    """The control daemon that serves the domain's directory already, None if none does.

    `ours` are our processes if the caller knows them. One of ours is found whether it answers or not; it may
    serve other GPUs than are planned, if one was lost or came back since. Raises HostError, and does nothing
    to it, if it is not one that we would have started, or serves no GPU of the plan.
    """
    place = plan.pipe_directory
    known = our_processes() if ours is None else ours
    here = [one for one in known if one.pipe_directory == place and not one.is_server]
    peer = peer_of(place)
    hint = f"when its jobs are done, end it with: echo quit | CUDA_MPS_PIPE_DIRECTORY={place} {PROGRAM}"
    if not here:
        if peer is None:
            return None
        what = f"a control daemon (PID {peer.pid}, uid {peer.uid}) not started by yunion-mps serves {place}"
        if could_be_ours(peer.pid):
            hint += f"; or adopt it with its jobs: yunion-mps-daemon --adopt {peer.pid}"
        raise HostError(what, hint, reasons.ADOPTION_REFUSED)
    one = next((one for one in here if peer and one.pid == peer.pid), here[0])
    order = adoption_order(one.pid)
    if order and not order.can_serve(plan):
        what = f"the control daemon (PID {one.pid}) that was adopted in {place}"
        why = "numbers its GPUs in an unknown order, and their memory limits differ"
        hint = "give its GPUs equal limits, or end it when its jobs are done"
        raise HostError(f"{what} {why}", hint, reasons.ADOPTION_REFUSED)
    if not set(one.gpu_uuids) & set(plan.gpu_uuids):
        what = f"the control daemon (PID {one.pid}) that an earlier yunion-mps-daemon left in {place}"
        raise HostError(f"{what} serves none of its GPUs", hint, reasons.ADOPTION_REFUSED)
    process = Process.adopt(one.pid)
    if process is None:
        return None
    if started_ticks(one.pid) != one.started_ticks:  # it has ended, and its PID is another's
        process.close()
        return None
    log_directory = one.log_directory or plan.log_directory
    # Its servers have its groups (measured), so one without the group cannot serve in a closed directory.
    group = plan.pipe_group if directories.is_member(one.pid, plan.pipe_group) else ""
    served = plan._replace(log_directory=log_directory, pipe_group=group).for_gpus(one.gpu_uuids)
    return RunningDaemon(process, served, order)


def as_served(plan: DomainPlan, running: DomainPlan) -> DomainPlan:
    """The plan with the GPUs in the running control daemon's own order, by which limits are named."""
    return plan._replace(
        pipe_directory=running.pipe_directory,
        log_directory=running.log_directory,
        pipe_group=running.pipe_group,  # as the running one has it from its start
    ).for_gpus(running.gpu_uuids)


def with_recorded(plan: DomainPlan, recorded: DomainPlan) -> DomainPlan:
    """The plan, with what is recorded of GPUs that it has no limit for: of one that is lost for now."""
    before = recorded.for_gpus(plan.gpu_uuids).gpus
    gpus = (was if now.memory_limit_mib is None else now for now, was in zip(plan.gpus, before))
    return plan._replace(gpus=tuple(gpus))


def order_to_adopt(
    pid: int, environment: Mapping[str, str], host_gpus: Sequence[str | None], plan: DomainPlan
) -> AdoptionOrder:
    """What is to be recorded of another program's control daemon; raises HostError if it cannot be adopted.

    `host_gpus` are the UUIDs of all GPUs of the host in PCI order, None for one that is unknown. The caller
    knows that the process is NVIDIA's control program and listens in the directory of `plan`.
    """
    place = pipe_directory_in(environment)
    if place != plan.pipe_directory:
        why = f"it was started for {printable(place)}"
        raise _refusal(pid, f"{why}, and cuda_mps_pipe_directory is {plan.pipe_directory}")
    if plan.multiuser:
        raise _refusal(pid, "it was started with another value of cuda_mps_multiuser")
    gpu_uuids, in_order = _served(pid, environment, host_gpus)
    if set(gpu_uuids) != set(plan.gpu_uuids):
        raise _refusal(pid, "the GPUs that it serves are not those that the configuration divides")
    order = AdoptionOrder(pid, started_ticks(pid) or 0, gpu_uuids, in_order, plan.pipe_directory)
    if not order.can_serve(plan):
        why = "its CUDA_DEVICE_ORDER is not PCI_BUS_ID, so its numbering of the GPUs is unknown"
        raise _refusal(pid, f"{why}, and their memory limits differ")
    if not order.started_ticks:
        raise _refusal(pid, "it has ended")
    return order


def _served(
    pid: int, environment: Mapping[str, str], host_gpus: Sequence[str | None]
) -> tuple[tuple[str, ...], bool]:
    """The UUIDs of its GPUs, and whether it numbers them in this order (CUDA C++ Programming Guide).

    CUDA_VISIBLE_DEVICES numbers them as it names them; without it CUDA's own order counts, which is that of
    PCI only if CUDA_DEVICE_ORDER says so.
    """
    known = tuple(uuid for uuid in host_gpus if uuid is not None)
    if len(known) < len(host_gpus):
        raise _refusal(pid, "a GPU of this host has no known UUID")
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return known, len(known) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    uuids = tuple(word.strip() for word in named.split(","))
    if not set(uuids) <= set(known):
        raise _refusal(pid, f"its CUDA_VISIBLE_DEVICES is {named!r}: only UUIDs identify GPUs")
    return uuids, True


def _refusal(pid: int, why: str) -> HostError:
    hint = "it was left alone; end it when its jobs are done, and yunion-mps starts its own"
    what = f"the control daemon (PID {pid}) cannot be adopted: {why}"
    return HostError(what, hint, reasons.ADOPTION_REFUSED)


# -- start


def start(program: str, plan: DomainPlan) -> Process:
    """Start NVIDIA's control daemon in the foreground, its log behind what is there; raises HostError."""
    _prepare(plan)
    with directories.use(plan.log_directory) as directory:
        output = directories.open_log(directory, plan.log_directory, LOG_NAME)
    if plan.pipe_group:
        directories.join(plan.pipe_group)
    words = [program, "-f", MULTIUSER] if plan.multiuser else [program, "-f"]
    record(plan)
    try:
        environment = control_environment(plan, program)
        process = spawn(words, environment, stdin=None, stdout=output, stderr=output)
    except HostError:
        forget(plan)
        raise
    finally:
        os.close(output)
    record(plan, process.pid)
    return process


def _prepare(plan: DomainPlan) -> None:
    """Make both directories; raises HostError if another user's files lie there, or that is not known."""
    set_access(plan)
    for path in (plan.log_directory, plan.pipe_directory):
        with directories.use(path) as directory:
            directories.check_entries(directory, path)


def set_access(plan: DomainPlan) -> None:
    """Make the pipe directory, and set who may enter it as planned; raises HostError."""
    with directories.use(plan.pipe_directory) as directory:
        directories.set_access(directory, plan.pipe_directory, plan.pipe_group)


# -- one server for all users


def knows_multiuser(program: str, run_directory: str, deadline_s: float = _TRIAL_S) -> bool:
    """Whether the program can serve all users at once; may wait until the deadline, so it is for threads.

    Programs before 570 turn into a front-end at a flag that they do not know, and versions alone mislead:
    vendors carry changes back. So it is tried in a directory of its own below `run_directory`, whose path
    must be short, because it holds a socket. What was found out is remembered until the program changes.
    Raises HostError if it cannot be tried.
    """
    try:
        info = os.stat(program)
        key = (program, info.st_mtime_ns, info.st_size)
        if key in _knows_multiuser:
            return _knows_multiuser[key]
        knows = _try_multiuser(program, run_directory, deadline_s)
    except OSError as error:
        raise HostError(f"{program} cannot be run: {error.strerror}", "check the file system") from None
    if knows is not None:
        _knows_multiuser[key] = knows
    return knows is True


def _try_multiuser(program: str, run_directory: str, deadline_s: float) -> bool | None:
    # Not above: the daemon's start would pay several milliseconds for what few hosts ask for.
    import shutil
    import tempfile

    place = tempfile.mkdtemp(prefix="try.", dir=run_directory)
    try:
        variables = {
            **client_variables(place),
            "PATH": server_path(program),
            "CUDA_MPS_LOG_DIRECTORY": place,
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(os.devnull, "r+b") as null:
            output = null.fileno()
            process = spawn([program, "-f", MULTIUSER], variables, stdin=None, stdout=output, stderr=output)
        try:
            return _serves(process, place, deadline_s)
        finally:
            process.kill()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _serves(process: Process, place: str, deadline_s: float) -> bool | None:
    """Whether it serves there; None if it does neither that nor end, until the deadline."""
    end_s = time.monotonic() + deadline_s
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    while time.monotonic() < end_s:
        if process.status() is not None:
            return False
        peer = peer_of(place)
        if peer and peer.pid == process.pid:
            return True
        poll.poll(_TRIAL_POLL_MS)
    return None
