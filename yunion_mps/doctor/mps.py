"""MPS: our control daemons and others, the MPS servers, and which programs reach them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from yunion_mps.core.enums import READY
from yunion_mps.core.errors import HostError
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.reasons import (
    CLIENT_WAITING,
    CONTROL_DAEMON_ERROR,
    CONTROL_DAEMON_SILENT,
    OTHER_CONTROL_DAEMON,
    SERVER_FAILED,
    SERVER_START_FAILED,
    SERVERS_ORPHANED,
    hint_of,
)
from yunion_mps.core.text import count
from yunion_mps.doctor.checks import (
    Finding,
    Findings,
    Host,
    SkipError,
    finding_of,
    host_check,
    invisible,
    ok,
    problem,
    warning,
)
from yunion_mps.host.files import open_regular, read_text
from yunion_mps.host.proc import all_pids, environment_of, program_name, user_name
from yunion_mps.host.process_info import describe_process, uid_of
from yunion_mps.host.processes import readable
from yunion_mps.mps.control_daemon import find
from yunion_mps.mps.conversation import Probe, UnresponsiveError, connections, diagnose, front_end_at, peer_of
from yunion_mps.mps.log_file import LOG_NAME, SERVER_LOG, describe_failure
from yunion_mps.mps.log_lines import parse_lines, timestamp_parser
from yunion_mps.mps.processes import DEFAULT_PIPE_DIRECTORY, MARK, PROGRAM, orphaned_servers, server_pids
from yunion_mps.mps.server_history import FAILURES, NOT_STARTED, STARTED, Outcome, ServerHistory

#: A control daemon greets immediately; our daemon waits 5 s before it acts.
_GREETING_S = 2.0
_RESTART = "systemctl restart yunion-mps-daemon"
#: A probe or a query has ended by then.
_BETWEEN_POLLS_S = 0.2

_LAST_BYTES = 1 << 16
_RECENT_S = 3600.0


@host_check("control daemon", CONTROL_DAEMON_ERROR)
def control_daemons(host: Host) -> Findings:
    """Check whether clients in each directory reach the daemon's own control daemon."""
    return [_check_owner(host, domain) for domain in host.mps_domains()]


def _check_owner(host: Host, domain: DomainPlan) -> Finding:
    directory = domain.pipe_directory
    peer = peer_of(directory)
    known_pid = host.known_pids().get(domain.name)
    if peer is None and known_pid:
        text = f"the control daemon of domain {domain.name} (PID {known_pid}) has no socket in {directory}"
        return problem(f"{text}: it has been removed", _RESTART)
    if peer and known_pid == peer.pid:
        return ok(f"PID {peer.pid} serves domain {domain.name} in {directory}")
    is_own = peer is not None and uid_of(peer.pid) == os.geteuid()
    if os.geteuid() != 0 and not is_own:
        raise invisible(f"which control daemon serves {directory}")
    try:
        running = find(domain)
    except HostError as error:
        return problem(error.message, error.hint)
    if running is None:
        text = f"no control daemon serves {directory}"
        status = host.known_status()
        if status is not None and status["state"] != "disabled":
            return problem(text, _RESTART)
        return ok(f"{text}; the daemon will start one")
    pid = running.process.pid
    running.process.close()
    text = f"PID {pid} still serves {directory} with its limits, although the daemon is not running"
    if peer is None:
        text += ", but no new job can reach it because its socket has been removed"
    return warning(text, "start the daemon, which will adopt it: systemctl start yunion-mps-daemon")


@host_check("control daemon answers", CONTROL_DAEMON_SILENT)
def responsiveness(host: Host) -> Findings:
    """Check whether each control daemon greets its clients, and why not."""
    findings: list[Finding] = []
    # Finding the owner of a connection means searching all processes' descriptors, for each domain.
    front_ends = any(_option_count(pid) == 0 for pid in all_pids())
    status = host.known_status()
    daemon = status["pid"] if status else 0
    for domain in host.domains():
        peer = peer_of(domain.pipe_directory)
        if peer is None:
            continue
        try:
            took_s = _greeting_time_s(domain.pipe_directory, peer.pid)
        except UnresponsiveError as error:
            cause = diagnose(peer.pid, domain.pipe_directory)
            text = f"the control daemon of domain {domain.name} (PID {peer.pid}): {error.message}"
            code = error.reason.code
            if cause:
                text += f"; {cause}"
                code = cause.code
            findings.append(problem(text, hint_of(code)))
            continue
        front_end = front_end_at(domain.pipe_directory, daemon) if front_ends else ""
        if front_end:
            text = f"an interactive {PROGRAM} ({front_end}) is connected to domain {domain.name} and blocks "
            text += "all other front-ends until it exits"
            findings.append(warning(text, "end it: the control daemon serves one front-end at a time"))
        else:
            findings.append(ok(f"domain {domain.name} answers within {max(took_s * 1000, 1):.0f} ms"))
    if not findings:
        raise SkipError("no control daemon is running")
    return findings


def _greeting_time_s(directory: str, pid: int) -> float:
    """Return the time until the greeting in s.

    Raises UnresponsiveError if there is none.
    """
    began_s = time.monotonic()
    probe = Probe(directory, pid, began_s, _GREETING_S)
    try:
        while not probe.poll(time.monotonic()):
            readable(probe.fileno(), 0.02)
    finally:
        probe.close()
    return time.monotonic() - began_s


class _OtherControlDaemon(NamedTuple):
    """A control daemon that belongs to none of our domains."""

    pid: int
    #: None if access was denied.
    pipe_directory: str | None
    #: Its CUDA_VISIBLE_DEVICES; None if access was denied.
    gpus: str | None
    in_container: bool

    def __str__(self) -> str:
        uid = uid_of(self.pid)
        user = "" if uid is None else user_name(uid)
        place = "in a container" if self.in_container else ""
        details = filter(None, (user, place, self.pipe_directory))
        return f"PID {self.pid} ({', '.join(details)})"


@host_check("other control daemons", OTHER_CONTROL_DAEMON, "no other control daemon is running")
def others(host: Host) -> Findings:
    """Other control daemons on this host: in NVIDIA's default directory, or for the same GPUs.

    Source: nvidia-cuda-mps-control(1), section "ENVIRONMENT", CUDA_MPS_PIPE_DIRECTORY; NVIDIA: Multi-Process
    Service, section "GPU Compute Modes".
    """
    for other in _others(host):
        directory = other.pipe_directory
        variable = f"CUDA_MPS_PIPE_DIRECTORY={directory or 'DIRECTORY'}"
        hint = f"once its jobs have ended: echo quit | {variable} {PROGRAM}"
        hint += "; then find what starts it: systemctl list-units '*mps*'; kubectl get pods -A"
        shares = _shares_gpus(host, other)
        if shares:
            text = (
                f"another control daemon, {other}, serves the same GPUs: only one of the two can use them "
                "at a time"
            )
            yield problem(f"{text}, and its clients have none of the configured limits", hint)
        elif directory == host.paths.under(DEFAULT_PIPE_DIRECTORY):
            text = f"another control daemon, {other}, serves the default pipe directory"
            yield warning(
                f"{text}: programs that set no other directory get none of the configured limits", hint
            )
        elif shares is None:
            if other.gpus is None:
                error = invisible("whether it serves the same GPUs")
                text = f"another control daemon, {other}, is running, but {error.message}"
                yield warning(text, f"{error.hint}; {hint}")
            else:
                text = f"another control daemon, {other}, may serve the same GPUs"
                yield warning(f"{text}: its CUDA_VISIBLE_DEVICES does not name them by UUID", hint)
        else:
            yield ok(f"another control daemon, {other}, serves other GPUs")


def _shares_gpus(host: Host, other: _OtherControlDaemon) -> bool | None:
    """Return None if unknown: numbers refer to the GPUs of its container, or to CUDA's order."""
    our_gpus: set[str] = set()
    for domain in host.domains():
        our_gpus.update(domain.gpu_uuids)
    if not our_gpus:
        return False
    if other.gpus is None or (other.in_container and not other.gpus):
        return None
    entries = [entry.strip() for entry in other.gpus.split(",") if entry.strip()]
    if not entries:
        return True
    if any(entry.isdigit() for entry in entries):
        return None
    prefixes = tuple(entries)
    return any(uuid.startswith(prefixes) for uuid in our_gpus)


def _others(host: Host) -> list[_OtherControlDaemon]:
    our_pids = {*host.control_pids(), *host.known_pids().values()}
    others = []
    for pid in all_pids():
        if pid in our_pids or not _option_count(pid):
            continue
        environment = environment_of(pid)
        directory = None
        gpus = None
        if environment:
            directory = environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY)
            gpus = environment.get("CUDA_VISIBLE_DEVICES", "")
        if host.foreign_root and not (directory or "").startswith(host.paths.root + "/"):
            continue
        peer = peer_of(directory) if directory else None
        if MARK in environment and not (peer and peer.pid == pid):
            continue  # one of ours in a test run, or about to end
        others.append(_OtherControlDaemon(pid, directory, gpus, _in_container(pid)))
    return others


def _option_count(pid: int) -> int | None:
    """Return the number of options of an nvidia-cuda-mps-control: 0 for a front-end, None for other programs.

    It is taken from the command line, which all users may read.

    Source: nvidia-cuda-mps-control(1), section "OPTIONS".
    """
    argv = read_text(f"/proc/{pid}/cmdline", 4096).split("\0")
    if os.path.basename(argv[0]) != PROGRAM:
        return None
    return sum(argument.startswith("-") for argument in argv[1:])


def _in_container(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/1/ns/mnt")
    except OSError:
        return False


@host_check("orphaned servers", SERVERS_ORPHANED, "every MPS server has its control daemon")
def orphans(host: Host) -> Findings:
    """MPS servers that have outlived their control daemon and still occupy their GPUs."""
    if os.geteuid() != 0:
        raise invisible("which control daemon an MPS server belongs to")
    for domain in host.mps_domains():
        pids = orphaned_servers(domain.pipe_directory)
        if pids:
            servers = f"{count(len(pids), 'MPS server')} (PID {', '.join(map(str, pids))})"
            text = (
                f"domain {domain.name} has {servers} without a control daemon, so no new one can use its GPUs"
            )
            hint = "list the jobs: yunion-mps who --clients; the daemon ends each once its jobs have ended"
            yield warning(text, hint)


@host_check("MPS servers", SERVER_FAILED, "none failed within the last hour")
def server_failures(host: Host) -> Findings:
    """Failures of servers within the last hour, in the control daemons' logs."""
    findings: list[Finding] = []
    is_logged = False
    status = host.known_status()
    states = {domain["name"]: domain["state"] for domain in status["domains"]} if status else {}
    for domain in host.mps_domains():
        path = os.path.join(domain.log_directory, LOG_NAME)
        try:
            outcomes = _recent_outcomes(path)
        except FileNotFoundError:
            continue
        except PermissionError:
            raise invisible(f"the log {path}") from None
        is_logged = True
        failures = [outcome for outcome in outcomes if outcome.kind in FAILURES]
        if not failures:
            continue
        failing = _failing_users(outcomes)
        fails_for_all = not all(failing.values())
        if status:  # the daemon knows whether servers start now
            fails_for_all = states.get(domain.name) != READY
        server_log = os.path.join(domain.log_directory, SERVER_LOG)
        text = (
            f"MPS servers of domain {domain.name} failed {count(len(failures), 'time')} within the last hour"
        )
        level = problem if fails_for_all else warning
        code = SERVER_START_FAILED if failing else SERVER_FAILED
        if failing and not fails_for_all:
            names: list[str] = []
            for uid in failing:
                names.append("an unknown user" if uid is None else user_name(uid))
            text += f", and do not start for {', '.join(sorted(names))} only"
        hint = f"see {server_log}, {path} and dmesg"
        findings.append(level(f"{text}; the last one {describe_failure(failures[-1], domain)}", hint, code))
    if not is_logged:
        raise SkipError("there are no logs yet")
    return findings


def _failing_users(outcomes: Iterable[Outcome]) -> dict[int | None, bool]:
    """Return the users whose last server did not start, and whether one of another user has started since."""
    failing: dict[int | None, bool] = {}
    for outcome in outcomes:
        if outcome.kind == NOT_STARTED:
            failing.setdefault(outcome.uid, False)
        elif outcome.kind == STARTED:
            failing.pop(outcome.uid, None)
            failing = dict.fromkeys(failing, True)
    return failing


def _recent_outcomes(path: str) -> list[Outcome]:
    """Return what became of servers in the last hour, as far as the end of the log shows it."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        outcomes = ServerHistory().follow(parse_lines(file.read()))
    now_s = time.time()
    seconds = timestamp_parser(now_s)
    recent = []
    for outcome in outcomes:
        with contextlib.suppress(ValueError):  # not a valid time
            if seconds(outcome.time) >= now_s - _RECENT_S:
                recent.append(outcome)
    return recent


@host_check("user switching", CLIENT_WAITING, "no client waits for another user's jobs")
def user_switching(host: Host) -> Findings:
    domains = host.mps_domains()
    if domains and all(domain.multiuser for domain in domains):
        yield ok("every control daemon serves all users at once")
        return
    if host.known_status():
        for condition in host.conditions_of_processes(CLIENT_WAITING):
            yield finding_of(condition)
        return
    if os.geteuid() != 0:
        raise invisible("which clients are waiting")
    yield from _waiting_for_others(host, domains, {os.getpid()})


def _waiting_for_others(host: Host, domains: Iterable[DomainPlan], our_pids: set[int]) -> Iterator[Finding]:
    """Yield the clients that wait for the jobs of another user; `our_pids` are the PIDs of yunion-mps.

    Source: NVIDIA: Multi-Process Service, sections "Limitations" and "Provisioning Sequence", Server.
    """
    servers: dict[DomainPlan, list[int]] = {}
    for domain in domains:
        control_pid = None if domain.multiuser else host.control_pid(domain)
        pids = server_pids(control_pid) if control_pid else []
        if control_pid and pids:
            servers[domain] = list(pids)
            our_pids.update((control_pid, *pids))
    # Owners are looked up for all domains together, because that searches all processes.
    directories = [domain.pipe_directory for domain in servers]
    if our_pids.issuperset(connections(*directories)):
        return
    for domain, pids in servers.items():
        serving = {uid for uid in map(uid_of, pids) if uid is not None}
        users = ", ".join(user_name(uid) for uid in sorted(serving))
        for pid in _waiting_clients(domain, our_pids, serving):
            text = f"{describe_process(pid)} is waiting for the jobs of {users} to end"
            text += f": domain {domain.name} serves one user at a time"
            yield warning(text, hint_of(CLIENT_WAITING))


def _waiting_clients(domain: DomainPlan, our_pids: set[int], serving: set[int]) -> list[int]:
    """Return the waiting clients: they stay connected to the control daemon until they have a server.

    A process that only makes a query is no longer connected the second time.
    """
    first = _connected_clients(domain, our_pids, serving)
    if first:
        time.sleep(_BETWEEN_POLLS_S)
    return sorted(first & _connected_clients(domain, our_pids, serving)) if first else []


def _connected_clients(domain: DomainPlan, our_pids: set[int], serving: set[int]) -> set[int]:
    clients: set[int] = set()
    for pid in connections(domain.pipe_directory):
        is_other_user = uid_of(pid) not in (None, *serving)
        if pid not in our_pids and is_other_user and program_name(pid) != PROGRAM:
            clients.add(pid)
    return clients
