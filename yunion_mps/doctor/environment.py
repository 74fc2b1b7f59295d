"""The environments of programs: of one that runs, of a command that would, and of every user at login."""

from __future__ import annotations

import glob
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.doctor import variables
from yunion_mps.doctor.gpus import library_version
from yunion_mps.doctor.host import Finding, Findings, Host, SkipError, check, ok, problem, skipped, warning
from yunion_mps.errors import DriverError, YunionError
from yunion_mps.host.files import read_text
from yunion_mps.host.proc import command_of, describe_process, environment_of, name_of, uid_of
from yunion_mps.models import DomainPlan
from yunion_mps.mps.processes import DEFAULT_PIPE_DIRECTORY, is_server
from yunion_mps.overview import count
from yunion_mps.planning.environment import DEVICE_VARIABLE
from yunion_mps.reasons import ENVIRONMENT, PROCESS_OUTSIDE_MPS

#: `export NAME=VALUE` of shells, `NAME=VALUE` of pam_env(8) and environment.d(5).
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|setenv\s+)?(\w+)[= ]\s*[\"']?([^\"'\s;#]*)", re.MULTILINE)
_MAX_SCRIPT_BYTES = 1 << 16


class Subject(NamedTuple):
    """The environment that is looked at, of a process that runs (`pid`) or of a command that would."""

    title: str
    variables: Mapping[str, str]
    pid: int | None = None


def of_process(host: Host, pid: int) -> Findings:
    """The environment that the process was started with, and what it sees of the host."""
    if not os.path.exists(f"/proc/{pid}"):
        return [problem(f"there is no process {pid}", "list the clients: yunion-mps who --clients")]
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        return [
            skipped(
                f"no permission to inspect PID {pid}",
                "run this as root, or as the user that the process runs as",
            )
        ]
    subject = Subject(f"PID {pid} ({name_of(pid) or command_of(pid)})", environment_of(pid), pid)
    return list(_judged(host, subject)) or [ok(f"{subject.title} has everything that an MPS client needs")]


def of_command(host: Host, own: Mapping[str, str], words: Sequence[str]) -> Findings:
    """The environment that the command would have if it were started from here; it is not started."""
    given, words = _unpacked(dict(own), list(words))
    if not words:
        return [problem("there is no command after the variables", "yunion-mps doctor -- python3 train.py")]
    program = shutil.which(words[0], path=given.get("PATH"))
    if program is None:
        return [problem(f"{words[0]} was not found", "give its path, or correct PATH")]
    if variables.starts_container(words):
        device = variables.device_in(words)
        if device:
            return [
                ok(f"{words[0]} gives the container everything that {device} needs, or does not start it")
            ]
        found = variables.shared(words)
        subject = Subject(words[0], variables.variables_in(words, given))
        return [*found, *_judged(host, subject)] or [
            ok(f"{words[0]} gives the container everything that an MPS client needs")
        ]
    for path in (program, *words[1:]):
        given = {**given, **_assigned_in(path)}
    if (os.path.basename(words[0]), *words[1:2]) == ("yunion-mps", "run"):
        gives = ok(
            "yunion-mps run gives the command everything that an MPS client needs, or does not start it"
        )
        return list(variables.misspelt(given)) or [gives]
    found = list(_judged(host, Subject(words[0], given)))
    return found or [ok(f"{words[0]} would have everything that an MPS client needs")]


@check("outside MPS", PROCESS_OUTSIDE_MPS)
def outside_mps(host: Host) -> Findings:
    """Programs that use a GPU of ours, and not through MPS or not through ours."""
    users = host.users()
    places = [domain.pipe_directory for domain in host.domains()]
    found: list[Finding] = []
    seen = unread = 0
    for gpu in host.our_gpus():
        for pid in users.get(gpu.uuid or "", {}):
            given = environment_of(pid)
            if is_server(pid) or uid_of(pid) is None:
                continue
            seen += 1
            if not given:
                unread += 1
                continue
            place = given.get(variables.PIPE, host.paths.under(DEFAULT_PIPE_DIRECTORY))
            if not any(is_same_directory(pid, place, ours) for ours in places):
                what = (
                    f"{describe_process(pid)} uses GPU {gpu.address} outside yunion-mps "
                    f"(its pipe directory is {place})"
                )
                hint = f"start it with: yunion-mps run COMMAND; see why: yunion-mps doctor --pid {pid}"
                found.append(warning(f"{what}: it has no limits", hint))
    if found or not unread:
        return found or [
            ok(
                f"{count(seen, 'program')} on the GPUs, all through MPS"
                if seen
                else "no program uses a GPU outside MPS"
            )
        ]
    raise SkipError(f"only root can see how {unread} of {seen} programs use the GPUs", "run it as root")


def is_same_directory(pid: int, seen: str, ours: str) -> bool:
    """Whether the directory that a process sees as `seen` is ours, also from within a container."""
    try:
        mine = os.stat(ours)
        theirs = os.stat(f"/proc/{pid}/root{os.path.abspath(seen)}")
    except FileNotFoundError:
        return not os.path.exists(ours) and os.path.normpath(seen) == ours
    except OSError:  # we may not look; names are what is left
        return os.path.normpath(seen) == ours
    return (theirs.st_dev, theirs.st_ino) == (mine.st_dev, mine.st_ino)


@check("logins", ENVIRONMENT, "no login file sets a variable that makes programs bypass MPS")
def of_logins(host: Host) -> Findings:
    """The variables that every user gets at login, and that lead programs past our control daemons."""
    for pattern in ("/etc/environment", "/etc/environment.d/*.conf", "/etc/profile.d/*.sh"):
        for path in sorted(glob.glob(host.paths.under(pattern))):
            given = {name: value for name, value in _assigned_in(path).items() if name.startswith("CUDA_")}
            for one in variables.misspelt(given):
                yield one._replace(what=f"{path}: {one.what}")
            for name in (variables.PIPE, variables.VISIBLE, variables.MEMORY, variables.THREADS):
                if name in given and not (name == variables.PIPE and _domain_at(host, Subject("", given))):
                    what = f"{path} sets {name}={given[name]} for every user"
                    yield warning(what, f"remove that line from {path}")


def _judged(host: Host, subject: Subject) -> Iterator[Finding]:
    yield from variables.misspelt(subject.variables)
    domains = host.domains()
    domain = _domain_at(host, subject)
    if domain is None and domains:
        default = host.paths.under(DEFAULT_PIPE_DIRECTORY)
        served = [one.pipe_directory for one in domains]
        place = os.path.normpath(subject.variables.get(variables.PIPE, default))
        if subject.pid is not None and place in served and os.path.isdir(place):
            what = (
                f"{subject.title} does not see the host's {place}: it runs in a container, or with "
                "PrivateTmp=yes"
            )
            hint = (
                f"mount it into the container: docker run -v {place}:{place}; in a unit, set PrivateTmp=no, "
                "or use a directory in /run"
            )
            yield problem(what, hint)
        else:
            yield variables.no_place(subject.variables, default, served)
    elif domain:
        yield from variables.values(subject.variables, domain)
        yield from _device(host, subject)
    if subject.pid is not None:
        yield from _sees(host, subject.pid, domain)


def _domain_at(host: Host, subject: Subject) -> DomainPlan | None:
    """The domain whose control daemon the program finds."""
    place = subject.variables.get(variables.PIPE, host.paths.under(DEFAULT_PIPE_DIRECTORY))
    for domain in host.domains():
        if subject.pid is None and os.path.realpath(place) == os.path.realpath(domain.pipe_directory):
            return domain
        if subject.pid is not None and is_same_directory(subject.pid, place, domain.pipe_directory):
            return domain
    return None


def _device(host: Host, subject: Subject) -> Iterator[Finding]:
    """Whether the rest fits the device that it names, if it names one."""
    name = subject.variables.get(DEVICE_VARIABLE)
    if not name:
        return
    try:
        needs = host.device(name)["client_environment"]
    except YunionError:
        return
    differ = [key for key, value in needs.items() if subject.variables.get(key) != value]
    if differ:
        given = ", ".join(f"{key}={subject.variables.get(key, '')}" for key in differ)
        meant = ", ".join(f"{key}={needs[key]}" for key in differ)
        what = f"{DEVICE_VARIABLE} is {name}, but other variables do not match that device: {given}"
        yield warning(what, f"set what that device needs: {meant}")


def _sees(host: Host, pid: int, domain: DomainPlan | None) -> Iterator[Finding]:
    """What a process in a container, or with PrivateTmp=, does not share with the control daemon."""
    control = host.control_pid(domain) if domain else None
    mine, theirs = (_device_of(f"/proc/{one}/root/dev/shm") for one in (control or os.getpid(), pid))
    if mine is not None and theirs is not None and mine != theirs:
        what = f"PID {pid} has a private /dev/shm, so it cannot share memory with its MPS server"
        yield problem(what, "start the container with --ipc=host (Kubernetes: hostIPC, or mount /dev/shm)")
    try:
        version = host.inventory().driver.version
    except DriverError:
        return
    for path in _mapped(pid):
        other = library_version(path)
        if other and other != version:
            what = f"PID {pid} has loaded {path}, but the driver is version {version}"
            yield warning(
                what, "make it use the host's libcuda: remove compat libraries from LD_LIBRARY_PATH"
            )


def _device_of(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def _mapped(pid: int) -> set[str]:
    lines = read_text(f"/proc/{pid}/maps").splitlines()
    return {line.split(None, 5)[5].strip() for line in lines if "libcuda.so" in line}


def _unpacked(given: dict[str, str], words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The environment and the rest behind `NAME=VALUE` words and env(1) with its options."""
    takes_options = False
    while words:
        word, *rest = words
        name, equals, value = word.partition("=")
        if takes_options and word.startswith("-"):
            if word in ("-i", "-", "--ignore-environment"):
                given = {}
            elif word in ("-u", "--unset") and rest:
                given.pop(rest.pop(0), None)
            elif word in ("-C", "--chdir"):
                del rest[:1]
        elif equals and name.isidentifier():
            given[name], takes_options = value, False
        elif os.path.basename(word) == "env":
            takes_options = True
        else:
            break
        words = rest
    return given, words


def _never_waiting(path: str, flags: int) -> int:
    """A named pipe among a command's words is not waited for, nor what a device does when it is read."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _assigned_in(path: str) -> dict[str, str]:
    """CUDA's variables that a shell script or a file of variables sets; no other program does so in words."""
    try:
        with open(path, "rb", opener=_never_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            text = file.read(_MAX_SCRIPT_BYTES)
    except OSError:
        return {}
    if b"\0" in text or (text.startswith(b"#!") and b"sh" not in text.partition(b"\n")[0]):
        return {}
    found = dict(_ASSIGNMENT.findall(text.decode(errors="replace")))
    return {name: value for name, value in found.items() if "CUDA" in name.upper() and "$" not in value}
