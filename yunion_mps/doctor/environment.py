"""Environments of a running process, of a command before it is started, and of all users at login."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from yunion_mps.containers.command import device_in, variables_in, words_after_run
from yunion_mps.core.enums import FREE, MPS
from yunion_mps.core.errors import DriverError, YunionError
from yunion_mps.core.models import DomainPlan
from yunion_mps.core.reasons import ENVIRONMENT, PROCESS_OUTSIDE_MPS
from yunion_mps.core.text import count, list_of
from yunion_mps.doctor import variables
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
    skipped,
    warning,
)
from yunion_mps.doctor.driver import library_version
from yunion_mps.host.files import read_text
from yunion_mps.host.proc import command_of, environment_of, process_name
from yunion_mps.host.process_info import describe_process, uid_of
from yunion_mps.mps.processes import DEFAULT_PIPE_DIRECTORY, is_server
from yunion_mps.planning.environment import DEVICE_VARIABLE

#: `export NAME=VALUE` in shells, `NAME=VALUE` for pam_env(8) and environment.d(5).
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|setenv\s+)?(\w+)[= ]\s*[\"']?([^\"'\s;#]*)", re.MULTILINE)
_MAX_SCRIPT_BYTES = 1 << 16
#: Stand in a hint for a command and a device that are not known.
_COMMAND = "COMMAND"
_DEVICE = "DEVICE"
_MAX_COMMAND = 100


class Subject(NamedTuple):
    """The environment to check, of a running process or of a command."""

    #: How findings name it.
    title: str
    variables: Mapping[str, str]
    #: None for a command.
    pid: int | None = None
    #: The command for a shell, as far as it is known.
    command: str = _COMMAND


def of_process(host: Host, pid: int) -> Findings:
    """Check the environment that the process was started with, and what it shares with the host."""
    if not os.path.exists(f"/proc/{pid}"):
        return [problem(f"there is no process with PID {pid}", "list the clients: yunion-mps who --clients")]
    if not os.access(f"/proc/{pid}/environ", os.R_OK):
        hint = "run this as root, or as the user that the process runs as"
        return [skipped(f"no permission to inspect PID {pid}", hint)]
    subject = Subject(
        title=f"PID {pid} ({process_name(pid) or command_of(pid)})",
        variables=environment_of(pid),
        pid=pid,
        command=_command_of(pid),
    )
    client = _client(host, subject)
    return list(_check(host, subject)) or [ok(f"{subject.title} has everything that {client} needs")]


def of_command(host: Host, environ: Mapping[str, str], argv: Sequence[str]) -> Findings:
    """Check the environment that the command would have; does not start it."""
    environ, argv = _without_env(dict(environ), list(argv))
    if not argv:
        hint = "add one: yunion-mps doctor -- python3 train.py"
        return [problem("there is no command after the variables", hint)]
    program = shutil.which(argv[0], path=environ.get("PATH"))
    if program is None:
        return [problem(f"{argv[0]} was not found", "give its path, or correct PATH")]
    words = words_after_run(argv)
    if words is not None:
        device = device_in(words)
        if device:
            return [ok(f"{argv[0]} gives the container the environment of {device}, or refuses to start it")]
        subject = Subject(argv[0], variables_in(words, environ))
        findings = [] if _is_without_mps(host, subject) else variables.sharing_problems(words)
        findings = [*findings, *_check(host, subject)]
        if findings:
            return findings
        client = _client(host, subject)
        return [ok(f"{argv[0]} gives the container the complete environment of {client}")]
    for path in (program, *argv[1:]):
        environ = {**environ, **_assignments_in(path)}
    if os.path.basename(argv[0]) == "yunion-mps" and argv[1:2] == ["run"]:
        text = "yunion-mps run gives the command the environment of an MPS client, or refuses to start it"
        return list(variables.misspelt(environ)) or [ok(text)]
    subject = Subject(argv[0], environ, command=_shell_words(argv))
    client = _client(host, subject)
    return list(_check(host, subject)) or [ok(f"{argv[0]} would have everything that {client} needs")]


@host_check("outside MPS", PROCESS_OUTSIDE_MPS)
def outside_mps(host: Host) -> Findings:
    """Programs that bypass MPS, or use another control daemon, on GPUs that are shared through MPS."""
    users = host.users()
    directories = [domain.pipe_directory for domain in host.domains()]
    of_the_daemon = host.conditions_of_processes(PROCESS_OUTSIDE_MPS)
    reported = {condition["pid"] for condition in of_the_daemon}
    findings = [finding_of(condition) for condition in of_the_daemon]
    total = 0
    unreadable = 0
    gpus = host.mps_gpus()
    unknown = list_of(gpu.address for gpu in gpus if gpu.uuid not in users)
    if not findings and all(gpu.uuid not in users for gpu in gpus):
        raise SkipError(f"the driver does not report the processes on {unknown}")
    for gpu in gpus:
        for pid in users.get(gpu.uuid or "", {}):
            environ = environment_of(pid)
            if is_server(pid) or uid_of(pid) is None:
                continue
            total += 1
            if not environ:
                unreadable += 1
                continue
            directory = environ.get(variables.PIPE, host.paths.under(DEFAULT_PIPE_DIRECTORY))
            is_outside = not any(is_same_directory(pid, directory, ours) for ours in directories)
            if is_outside and pid not in reported:
                text = (
                    f"{describe_process(pid)} uses GPU {gpu.address} outside yunion-mps "
                    f"(its pipe directory is {directory})"
                )
                start = f"start it with: yunion-mps run {_command_of(pid)}"
                hint = f"{start}; see why: yunion-mps doctor --pid {pid}"
                findings.append(warning(f"{text}: it has no limits", hint))
    if findings:
        return findings
    if not unreadable:
        text = "no program uses a GPU outside MPS"
        if total:
            text = f"{count(total, 'program')} on the GPUs, none outside MPS"
        return [ok(text + (f"; not known for {unknown}" if unknown else ""))]
    raise invisible(f"how {unreadable} of {total} programs use the GPUs")


def is_same_directory(pid: int, path: str, directory: str) -> bool:
    """Return whether `path`, as the process sees it, is our directory, even from within a container."""
    try:
        own_directory = os.stat(directory)
        theirs = os.stat(f"/proc/{pid}/root{os.path.abspath(path)}")
    except FileNotFoundError:
        return not os.path.exists(directory) and os.path.normpath(path) == directory
    except OSError:  # access denied; compare names instead
        return os.path.normpath(path) == directory
    return (theirs.st_dev, theirs.st_ino) == (own_directory.st_dev, own_directory.st_ino)


@host_check("login files", ENVIRONMENT, "no login file sets a variable that makes programs bypass MPS")
def of_logins(host: Host) -> Findings:
    """Variables set for all users at login that make programs bypass our control daemons."""
    for pattern in ("/etc/environment", "/etc/environment.d/*.conf", "/etc/profile.d/*.sh"):
        for path in sorted(glob.glob(host.paths.under(pattern))):
            assigned = _assignments_in(path)
            environ = {name: value for name, value in assigned.items() if name.startswith("CUDA_")}
            for finding in variables.misspelt(environ):
                yield finding._replace(what=f"{path}: {finding.what}")
            for name in (variables.PIPE, variables.VISIBLE, variables.MEMORY, variables.THREADS):
                if name not in environ:
                    continue
                if name == variables.PIPE and _domain_at(host, Subject("", environ)):
                    continue
                text = f"{path} sets {name}={environ[name]} for every user"
                yield warning(text, f"remove that line from {path}")


def _check(host: Host, subject: Subject) -> Iterator[Finding]:
    yield from variables.misspelt(subject.variables)
    domains = host.domains()
    domain = _domain_at(host, subject)
    if _is_without_mps(host, subject):
        yield from _check_device(host, subject)
    elif domain is None and domains:
        default = host.paths.under(DEFAULT_PIPE_DIRECTORY)
        served = [other.pipe_directory for other in domains]
        directory = os.path.normpath(subject.variables.get(variables.PIPE, default))
        if subject.pid is not None and directory in served and os.path.isdir(directory):
            text = (
                f"{subject.title} does not see the host's {directory}: it runs in a container, or with "
                "PrivateTmp=yes"
            )
            hint = (
                f"mount it into the container: docker run -v {directory}:{directory}; "
                "in a unit, set PrivateTmp=no, or use a directory in /run"
            )
            yield problem(text, hint)
        else:
            yield variables.not_served(subject.variables, default, served, _start_hint(host, subject))
    elif domain:
        yield from variables.check_values(subject.variables, domain, _start_hint(host, subject))
        yield from _check_device(host, subject)
    if subject.pid is not None:
        yield from _check_visibility(host, subject.pid, domain)


def _client(host: Host, subject: Subject) -> str:
    return "a job without MPS" if _is_without_mps(host, subject) else "an MPS client"


def _is_without_mps(host: Host, subject: Subject) -> bool:
    """Return whether the program finds no control daemon and sees only GPUs and instances that need none."""
    if _domain_at(host, subject):
        return False
    try:
        addresses = {str(gpu.uuid): gpu.pci_address for gpu in host.inventory().gpus}
        ways = host.ways_of_sharing()
    except YunionError:
        return False
    visible = subject.variables.get(variables.VISIBLE, "").split(",")
    return all(ways.get(addresses.get(uuid, ""), MPS) != MPS for uuid in visible)


def _start_hint(host: Host, subject: Subject) -> str:
    address = _DEVICE
    with contextlib.suppress(YunionError):
        for device in host.devices():
            if device["state"] == FREE:
                address = device["addr"]
                break
    return variables.start_hint(subject.command, address)


def _command_of(pid: int) -> str:
    """Return the process's command for a shell; COMMAND if it cannot be started again like this."""
    words = read_text(f"/proc/{pid}/cmdline", 4 * _MAX_COMMAND).split("\0")[:-1]
    return _shell_words(words) if words and shutil.which(words[0]) else _COMMAND


def _shell_words(words: Sequence[str]) -> str:
    text = shlex.join(words)
    return text if text.isprintable() and len(text) <= _MAX_COMMAND else _COMMAND


def _domain_at(host: Host, subject: Subject) -> DomainPlan | None:
    """Return the domain whose control daemon the program finds."""
    directory = subject.variables.get(variables.PIPE, host.paths.under(DEFAULT_PIPE_DIRECTORY))
    for domain in host.domains():
        if subject.pid is None and os.path.realpath(directory) == os.path.realpath(domain.pipe_directory):
            return domain
        if subject.pid is not None and is_same_directory(subject.pid, directory, domain.pipe_directory):
            return domain
    return None


def _check_device(host: Host, subject: Subject) -> Iterator[Finding]:
    """Compare the variables with those of the device that they name, if any."""
    name = subject.variables.get(DEVICE_VARIABLE)
    if not name:
        return
    try:
        needs = host.device(name)["client_environment"]
    except YunionError:
        return
    actual: list[str] = []
    required: list[str] = []
    for key, value in needs.items():
        if subject.variables.get(key) != value:
            actual.append(f"{key}={subject.variables.get(key, '')}")
            required.append(f"{key}={value}")
    if actual:
        text = f"{DEVICE_VARIABLE} is {name}, but other variables do not match that device"
        yield warning(f"{text}: {', '.join(actual)}", f"set that device's variables: {', '.join(required)}")


def _check_visibility(host: Host, pid: int, domain: DomainPlan | None) -> Iterator[Finding]:
    """Find what a process in a container, or with PrivateTmp=, does not share with the control daemon."""
    control = host.control_pid(domain) if domain else None
    own_file_system = _file_system_of(f"/proc/{control or os.getpid()}/root/dev/shm")
    theirs = _file_system_of(f"/proc/{pid}/root/dev/shm")
    if own_file_system is not None and theirs is not None and own_file_system != theirs:
        text = f"PID {pid} has a private /dev/shm, so it cannot share memory with its MPS server"
        yield problem(text, "start the container with --ipc=host (Kubernetes: hostIPC, or mount /dev/shm)")
    try:
        version = host.inventory().driver.version
    except DriverError:
        return
    for path in _loaded_libcuda(pid):
        loaded_version = library_version(path)
        if loaded_version and loaded_version != version:
            text = f"PID {pid} has loaded {path}, but the driver is version {version}"
            yield warning(
                text, "make it use the host's libcuda: remove compat libraries from LD_LIBRARY_PATH"
            )


def _file_system_of(path: str) -> int | None:
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def _loaded_libcuda(pid: int) -> set[str]:
    lines = read_text(f"/proc/{pid}/maps").splitlines()
    return {line.split(None, 5)[5].strip() for line in lines if "libcuda.so" in line}


def _without_env(environ: dict[str, str], argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the command, without `NAME=VALUE` words and env(1) with its options."""
    takes_options = False
    while argv:
        word, *arguments = argv
        name, equals, value = word.partition("=")
        if takes_options and word.startswith("-"):
            if word in ("-i", "-", "--ignore-environment"):
                environ = {}
            elif word in ("-u", "--unset") and arguments:
                environ.pop(arguments.pop(0), None)
            elif word in ("-C", "--chdir"):
                del arguments[:1]
        elif equals and name.isidentifier():
            environ[name] = value
            takes_options = False
        elif os.path.basename(word) == "env":
            takes_options = True
        else:
            break
        argv = arguments
    return environ, argv


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without blocking on a named pipe or a device among the command's words."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _assignments_in(path: str) -> dict[str, str]:
    """Return the CUDA variables that a shell script or file of variables sets; {} for other files."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            text = file.read(_MAX_SCRIPT_BYTES)
    except OSError:
        return {}
    if b"\0" in text:
        return {}
    first_line = text.partition(b"\n")[0]
    if first_line.startswith(b"#!") and b"sh" not in first_line:
        return {}
    all_assignments: dict[str, str] = dict(_ASSIGNMENT.findall(text.decode(errors="replace")))
    assignments: dict[str, str] = {}
    for name, value in all_assignments.items():
        if "CUDA" in name.upper() and "$" not in value:
            assignments[name] = value
    return assignments
