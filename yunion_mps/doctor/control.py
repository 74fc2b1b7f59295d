"""The control daemons: ours, and those of others that take clients or GPUs away from ours."""

from __future__ import annotations

import os
import select
import time
from typing import NamedTuple

from yunion_mps.doctor.finding import Finding, Findings, ok, problem, skipped, warning
from yunion_mps.doctor.host import DEFAULT_PIPE_DIRECTORY, Host
from yunion_mps.errors import HostError, YunionError
from yunion_mps.host.proc import all_pids, environment_of, uid_of, user_name
from yunion_mps.models import DomainPlan
from yunion_mps.mps.conversation import Probe, SilentError, peer_of
from yunion_mps.mps.diagnosis import front_end_at, why_silent
from yunion_mps.mps.processes import MARK, PROGRAM, describe_servers, orphaned_servers
from yunion_mps.mps.startup import find

#: The control daemon greets at once; the daemon itself gives it 5 s before it acts.
_GREETING_S = 2.0
_RESTART = "systemctl restart yunion-mps-daemon"


class Other(NamedTuple):
    """A control daemon that is none of our domains'. What may not be read is None."""

    pid: int
    pipe_directory: str | None
    gpus: str | None
    in_container: bool

    def __str__(self) -> str:
        """`PID 4711 (root, in a container, /tmp/nvidia-mps)`."""
        uid = uid_of(self.pid)
        about = [
            "" if uid is None else user_name(uid),
            "in a container" if self.in_container else "",
            self.pipe_directory or "",
        ]
        return f"PID {self.pid} ({', '.join(word for word in about if word)})"


def control_daemons(host: Host) -> Findings:
    """Whether the one that clients find in each directory is the daemon's own."""
    found = [_judged(host, domain) for domain in host.domains()]
    return found or [skipped("no GPU is divided here")]


def _judged(host: Host, domain: DomainPlan) -> Finding:
    place = domain.pipe_directory
    peer = peer_of(place)
    known = _known_pid(host, domain)
    if peer is None and known:
        what = f"the control daemon of domain {domain.name} (PID {known}) cannot be found in {place}"
        return problem(f"{what}: its socket was removed", _RESTART)
    if peer and known == peer.pid:
        return ok(f"PID {peer.pid} serves domain {domain.name} in {place}")
    if os.geteuid() != 0 and (peer is None or uid_of(peer.pid) != os.geteuid()):
        return skipped(f"only root sees whose control daemon runs in {place}", "run it as root")
    try:
        found = find(domain)
    except HostError as error:
        return problem(error.message, error.hint)
    if found is None:
        well = f"none runs in {place}"
        return problem(well, _RESTART) if _runs(host) else ok(f"{well}; the daemon starts it")
    pid = found.process.pid
    found.process.close()
    what = f"PID {pid} goes on in {place} without the daemon, with the limits that it was given"
    if peer is None:
        what += ", and no new job finds it, for its socket was removed"
    return warning(what, "start the daemon, which takes it over: systemctl start yunion-mps-daemon")


def _known_pid(host: Host, domain: DomainPlan) -> int | None:
    try:
        pids = [one["pid"] for one in host.status()["domains"] if one["name"] == domain.name]
    except YunionError:
        return None
    return pids[0] if pids else None


def _runs(host: Host) -> bool:
    try:
        return bool(host.status()["state"] != "disabled")
    except YunionError:
        return False


def others(host: Host) -> Findings:
    """Other control daemons on this host: in NVIDIA's default place, or for the same GPUs."""
    found = []
    for other in _others(host):
        where = other.pipe_directory
        end = f"when its jobs are done: echo quit | CUDA_MPS_PIPE_DIRECTORY={where or 'DIRECTORY'} {PROGRAM}"
        end += "; and see what starts it: systemctl list-units '*mps*'; kubectl get pods -A"
        shares = _shares_gpus(host, other)
        if shares:
            what = f"another control daemon, {other}, serves GPUs of ours: only one's server can use them"
            found.append(problem(f"{what}, and its clients have none of our limits", end))
        elif where == host.paths.under(DEFAULT_PIPE_DIRECTORY):
            what = f"another control daemon, {other}, is where programs look that name no pipe directory"
            found.append(warning(f"{what}: they get none of our limits", end))
        elif shares is None:
            what = (
                f"another control daemon runs, {other}, and it cannot be seen whether it serves GPUs of ours"
            )
            found.append(warning(what, f"look as root; {end}"))
        else:
            found.append(ok(f"another control daemon, {other}, serves other GPUs"))
    return found or [ok("no other control daemon runs here")]


def _shares_gpus(host: Host, other: Other) -> bool | None:
    """None where that cannot be seen: numbers count what its container shows it, or CUDA's own order."""
    ours = {uuid for domain in host.domains() for uuid in domain.gpu_uuids}
    if not ours:
        return False
    if other.gpus is None or (other.in_container and not other.gpus):
        return None
    words = [word.strip() for word in other.gpus.split(",") if word.strip()]
    if not words:
        return True
    if any(word.isdigit() for word in words):
        return None
    return any(uuid.startswith(word) for uuid in ours for word in words)


def _others(host: Host) -> list[Other]:
    ours = {pid for domain in host.domains() if (pid := host.control_pid(domain))}
    ours |= {pid for domain in host.domains() if (pid := _known_pid(host, domain))}
    found = []
    for pid in all_pids():
        if pid in ours or not _options(pid):
            continue
        environment = environment_of(pid)
        place = environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY) if environment else None
        if host.foreign_root and not (place or "").startswith(host.paths.root + "/"):
            continue
        if MARK in environment and not _listens(place, pid):
            continue  # one of ours that is being tried, or about to end
        gpus = environment.get("CUDA_VISIBLE_DEVICES", "") if environment else None
        found.append(Other(pid, place, gpus, _in_container(pid)))
    return found


def _options(pid: int) -> int | None:
    """How many options NVIDIA's control program has there: a front-end has none. None for other programs.

    By its command line, which everybody may read.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").split("\0")
    except OSError:
        return None
    if os.path.basename(words[0]) != PROGRAM:
        return None
    return sum(word.startswith("-") for word in words[1:])


def _listens(place: str | None, pid: int) -> bool:
    peer = peer_of(place) if place else None
    return peer is not None and peer.pid == pid


def _in_container(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/1/ns/mnt")
    except OSError:
        return False


def answers(host: Host) -> Findings:
    """Whether each control daemon greets who connects, and who keeps it from that."""
    found: list[Finding] = []
    asked = 0
    # To find whose connection one is takes a search of all processes' descriptors for each domain.
    front_ends = any(options == 0 for pid in all_pids() if (options := _options(pid)) is not None)
    for domain in host.domains():
        peer = peer_of(domain.pipe_directory)
        if peer is None:
            continue
        asked += 1
        try:
            took_s = _greeted(domain.pipe_directory, peer.pid)
        except SilentError as error:
            why = why_silent(peer.pid, domain.pipe_directory)
            what = f"the control daemon of domain {domain.name} (PID {peer.pid}): {error.message}"
            remedy = "end what keeps it, or: systemctl restart yunion-mps-daemon (this ends its jobs)"
            found.append(problem(f"{what}{f'; {why}' if why else ''}", remedy))
            continue
        who = front_end_at(domain.pipe_directory) if front_ends else ""
        if who:
            what = f"{PROGRAM} is open at domain {domain.name}: {who}; meanwhile no other is answered"
            found.append(warning(what, "end it: it serves one front-end at a time"))
        else:
            found.append(ok(f"domain {domain.name} greets within {took_s * 1000:.0f} ms"))
    return found if asked else [skipped("no control daemon runs")]


def _greeted(place: str, pid: int) -> float:
    """How long the greeting took, in seconds; raises SilentError where none came."""
    began_s = time.monotonic()
    probe = Probe(place, pid, began_s, _GREETING_S)
    try:
        poll = select.poll()
        poll.register(probe.fileno(), select.POLLIN)
        while not probe.poll(time.monotonic()):
            poll.poll(20)
    finally:
        probe.close()
    return time.monotonic() - began_s


def orphans(host: Host) -> Findings:
    """MPS servers that have outlived their control daemon, and keep their GPUs."""
    if os.geteuid() != 0:
        return [skipped("only root sees whose MPS servers run", "run it as root")]
    found = []
    for domain in host.domains():
        pids = orphaned_servers(domain.pipe_directory)
        if pids:
            what = f"{describe_servers(pids)} of domain {domain.name} lives on without its control daemon"
            remedy = "wait for its jobs, or end them; without jobs the daemon ends it after a while"
            found.append(warning(f"{what}, and keeps its GPUs from the next one", remedy))
    return found or [ok("every MPS server has its control daemon")]
