"""The MPS servers: whether they start, and whose clients wait for them."""

from __future__ import annotations

import contextlib
import os
import re
import time

from yunion_mps.doctor.finding import Finding, Findings, ok, problem, skipped, warning
from yunion_mps.doctor.host import DEFAULT_PIPE_DIRECTORY, Host
from yunion_mps.errors import YunionError
from yunion_mps.host.proc import environment_of, name_of, program_of, uid_of, user_name
from yunion_mps.models import DomainPlan
from yunion_mps.mps.diagnosis import holders, peers
from yunion_mps.mps.log_file import LOG_NAME, SERVER_LOG, timestamp_parser
from yunion_mps.mps.processes import PROGRAM, server_pids
from yunion_mps.planning import max_clients

_LAST_BYTES = 1 << 16
_RECENT_S = 3600.0
#: From this share of the limit on, it is worth a warning.
_NEARLY = 0.9
#: A probe or a question is over by then.
_BETWEEN_LOOKS_S = 0.2

#: `[2026-04-28 18:20:41.704 Control  3511] Server 17 exited with status 1`
_LINE = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.\d+ \w+\s+\d+\] (.*)$")
_FAILED = re.compile(r"Server (\d+) exited with status ([1-9]\d*)")
_FAULT = "Server encountered a fatal exception"
_STARTED = re.compile(r"Server \S* ?has started|: Server already exists")


def starts(host: Host) -> Findings:
    """Whether servers failed within the last hour, by the control daemons' own logs."""
    found: list[Finding] = []
    read = 0
    for domain in host.domains():
        path = os.path.join(domain.log_directory, LOG_NAME)
        try:
            told = _recent(path)
        except FileNotFoundError:
            continue
        except PermissionError:
            return [skipped(f"you may not read {path}", "run it as root")]
        read += 1
        failures = [text for text in told if _FAILED.search(text) or _FAULT in text]
        if not failures:
            continue
        last = [text for text in told if text in failures or _STARTED.search(text)][-1]
        exits = sum(bool(_FAILED.search(text)) for text in failures)
        what = (
            f"MPS servers of domain {domain.name} failed {exits or len(failures)} times within the last hour"
        )
        why = _last_words(os.path.join(domain.log_directory, SERVER_LOG))
        remedy = f"see {domain.log_directory}/{SERVER_LOG}, {path} and dmesg"
        judge = problem if last in failures else warning
        found.append(judge(f"{what}: {why or last}", remedy))
    if found or read:
        return found or [ok("none failed within the last hour")]
    return [skipped("there is no log yet")]


def _recent(path: str) -> list[str]:
    """What was logged within the last hour, as far as the log's end tells."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        text = file.read().decode(errors="replace")
    now_s = time.time()
    seconds = timestamp_parser(now_s)
    found = []
    for match in filter(None, (_LINE.match(line.lstrip("\0")) for line in text.splitlines())):
        with contextlib.suppress(ValueError):  # no such time
            if seconds(match[1]) >= now_s - _RECENT_S:
                found.append(match[2])
    return found


def _last_words(path: str) -> str:
    """The last line of the server's own log that speaks of a failure."""
    try:
        lines = _recent(path)
    except OSError:
        return ""
    return next((text for text in reversed(lines) if re.search(r"(?i)fail|error|exception", text)), "")


def client_limit(host: Host) -> Findings:
    """How many clients each GPU has of those that MPS allows there."""
    ours = [gpu for gpu in host.our_gpus() if gpu.uuid and not gpu.reason]
    driver, override = host.inventory().driver, host.config()[0].cuda_mps_max_clients
    users = host.users()
    found: list[Finding] = []
    most = 0
    for gpu in ours:
        limit = max_clients(gpu, driver, override)
        number = sum(not _is_server(pid) for pid in users.get(gpu.uuid or "", {}))
        most = max(most, number)
        if number >= limit:
            what = f"GPU {gpu.address} has {number} clients, and MPS allows {limit}: the next one is refused"
            found.append(problem(what, "end some (yunion-mps clients), or give each job fewer processes"))
        elif number >= limit * _NEARLY:
            what = f"GPU {gpu.address} has {number} clients of the {limit} that MPS allows"
            found.append(warning(what, "see who they are: yunion-mps clients"))
    if found or not ours:
        return found or [skipped("no GPU is divided here")]
    return [ok(f"at most {most} on a GPU, of {min(max_clients(gpu, driver, override) for gpu in ours)}")]


def user_switching(host: Host) -> Findings:
    """Whether clients of one user wait for the end of another's jobs."""
    if host.config()[0].cuda_mps_multiuser:
        return [ok("cuda_mps_multiuser: all users are served at once, where NVIDIA's program knows that")]
    if os.geteuid() != 0:
        return [skipped("only root sees who waits", "run it as root")]
    busy = {}
    for domain in host.domains():
        pid = host.control_pid(domain)
        servers = server_pids(pid) if pid else []
        if servers and pid:
            busy[domain] = (pid, *servers)
    known = {os.getpid(), _daemon_pid(host), *(pid for pids in busy.values() for pid in pids)}
    found: list[Finding] = []
    # Who holds a connection is looked up for all domains at once: that searches all processes.
    if set(holders({inode for domain in busy for inode in peers(domain.pipe_directory)})) - known:
        for domain, (_, *servers) in busy.items():
            serving = {uid for server in servers if (uid := uid_of(server)) is not None}
            found += [_told(pid, domain, serving) for pid in _waiting(domain, known, serving)]
    return found or [ok("nobody waits for another user's jobs")]


def _told(pid: int, domain: DomainPlan, serving: set[int]) -> Finding:
    who = ", ".join(user_name(uid) for uid in sorted(serving))
    what = f"{_named(pid)} waits until the jobs of {who} are done"
    remedy = "run all jobs as one user, or write cuda_mps_multiuser: true (release 570 and later)"
    return warning(f"{what}: domain {domain.name} serves one user at a time", remedy)


def _waiting(domain: DomainPlan, known: set[int], serving: set[int]) -> list[int]:
    """Who waits for a server: a client is connected to the control daemon only until it has one.

    Whoever only asks something is not connected any more at the second look.
    """
    first = _strangers_at(domain, known, serving)
    if first:
        time.sleep(_BETWEEN_LOOKS_S)
    return sorted(first & _strangers_at(domain, known, serving)) if first else []


def _strangers_at(domain: DomainPlan, known: set[int], serving: set[int]) -> set[int]:
    return {
        pid
        for pid in holders(set(peers(domain.pipe_directory)))
        if pid not in known
        and uid_of(pid) not in (None, *serving)
        and program_of(pid).rpartition("/")[2] != PROGRAM
    }


def _daemon_pid(host: Host) -> int:
    try:
        return int(host.status()["pid"])
    except YunionError:
        return 0


def strangers(host: Host) -> Findings:
    """Programs that use a GPU of ours, and not through MPS or not through ours."""
    users = host.users()
    places = [domain.pipe_directory for domain in host.domains()]
    found: list[Finding] = []
    seen = unread = 0
    for gpu in host.our_gpus():
        for pid in users.get(gpu.uuid or "", {}):
            variables = environment_of(pid)
            if _is_server(pid) or uid_of(pid) is None:
                continue
            seen += 1
            if not variables:
                unread += 1
                continue
            place = variables.get("CUDA_MPS_PIPE_DIRECTORY", host.paths.under(DEFAULT_PIPE_DIRECTORY))
            if not any(same_place(pid, place, ours) for ours in places):
                what = f"{_named(pid)} uses GPU {gpu.address} past our MPS (it looks in {place})"
                remedy = f"start it with: yunion-mps run -- COMMAND; why: yunion-mps doctor --pid {pid}"
                found.append(warning(f"{what}: it has no limits", remedy))
    if found or not unread:
        return found or [ok(f"{seen} programs use our GPUs, each through MPS" if seen else "no program does")]
    return [skipped(f"only root sees how {unread} of {seen} programs use our GPUs", "run it as root")]


def same_place(pid: int, seen: str, ours: str) -> bool:
    """Whether the directory that a process sees as `seen` is ours, also from within a container."""
    try:
        mine = os.stat(ours)
        theirs = os.stat(f"/proc/{pid}/root{os.path.abspath(seen)}")
    except FileNotFoundError:
        return not os.path.exists(ours) and os.path.normpath(seen) == ours
    except OSError:  # we may not look; names are what is left
        return os.path.normpath(seen) == ours
    return (theirs.st_dev, theirs.st_ino) == (mine.st_dev, mine.st_ino)


def _named(pid: int) -> str:
    return f"PID {pid} ({name_of(pid)}, {user_name(uid_of(pid) or 0)})"


def _is_server(pid: int) -> bool:
    return name_of(pid) == "nvidia-cuda-mps"
