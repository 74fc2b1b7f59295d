"""The driver: its versions, programs, libraries and device nodes."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from yunion_mps.containers.nodes import capability_nodes, missing_nodes
from yunion_mps.core.errors import DriverError, HostError
from yunion_mps.core.models import Gpu
from yunion_mps.core.reasons import (
    DEVICE_NODES,
    DRIVER_ERROR,
    GPU_GONE,
    GPU_OTHER_DRIVER,
    PROGRAM_MISSING,
)
from yunion_mps.core.text import list_of
from yunion_mps.doctor.checks import (
    WITHOUT_MPS,
    Finding,
    Findings,
    Host,
    SkipError,
    host_check,
    ok,
    problem,
    warning,
)
from yunion_mps.host.files import read_text
from yunion_mps.host.proc import environment_of
from yunion_mps.mps.processes import PROGRAM, SERVER, find_control_program, server_path

#: /proc/driver/nvidia/version: `Kernel Module  535.261.03`, `Open Kernel Module for x86_64  550.54.15`.
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d{3}[\d.]*\d)")
#: NVIDIA's control program contains its release as a separate string (535, 550).
_PROGRAM_VERSION = re.compile(r"\0(\d{3}\.\d{2,3}(?:\.\d{2})?)\0")
_LIBRARY_VERSION = re.compile(r"\.so\.(\d{3}\.[\d.]*\d)$")

_LIBRARY = "libcuda.so.1"
#: Where drivers install libraries, besides those in the loader's cache.
_LIBRARY_FOLDERS = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib/*-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/run/nvidia/driver/usr/lib/*-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
)

#: The parts of the driver whose versions are compared.
_KERNEL_MODULE = "kernel module"
_DRIVER_LIBRARY = "library"
_PROGRAMS = "programs"
_PARTS = (_KERNEL_MODULE, _DRIVER_LIBRARY, _PROGRAMS)

_NOT_NEEDED = "not needed while enable_cuda_mps is false"
_UPDATE = "finish the driver update (all packages in the same version), then reboot"


@host_check("driver", DRIVER_ERROR)
def driver(host: Host) -> Findings:
    """The driver, and whether its kernel module, library and programs have the same version."""
    try:
        version = host.inventory().driver.version
    except DriverError as error:
        if host.is_mps_disabled():
            raise SkipError(f"{error.message}; {_NOT_NEEDED}") from None
        return [problem(error.message, error.hint)]
    findings = []
    known_parts = set()
    for part, message, other_version in _versions(host):
        known_parts.add(part)
        if other_version != version:
            level = warning if other_version.partition(".")[0] == version.partition(".")[0] else problem
            text = f"{message} is version {other_version}, but the driver is version {version}"
            findings.append(level(text, _UPDATE))
    return findings or [ok(_describe_versions(version, known_parts, needs_program=host.uses_mps()))]


def _describe_versions(version: str, known_parts: Collection[str], *, needs_program: bool) -> str:
    """Say which parts of the driver match, and of which the version is not known."""
    matching: list[str] = []
    unknown: list[str] = []
    for part in _PARTS:
        if part in known_parts:
            matching.append(part)
        elif part != _PROGRAMS or needs_program:
            unknown.append(part)
    text = f"version {version}"
    if matching:
        is_one = len(known_parts) == 1 and _PROGRAMS not in known_parts
        verb = "matches" if is_one else "match"
        text += f"; {list_of(matching)} {verb}"
    if unknown:
        text += f"; not known: the version of the {list_of(unknown)}"
    return text


@host_check("programs", PROGRAM_MISSING)
def programs(host: Host) -> Findings:
    """NVIDIA's control program, the server where the control daemon looks for it, and libcuda."""
    if host.is_mps_disabled():
        raise SkipError(_NOT_NEEDED)
    if not host.uses_mps():
        return _library_findings(host) or [ok(f"{_LIBRARY} is installed; {WITHOUT_MPS}")]
    try:
        program = find_control_program()
    except HostError as error:
        return [problem(error.message, error.hint)]
    findings: list[Finding] = []
    pids = host.control_pids()
    searched = {environment_of(pid).get("PATH") for pid in pids}
    searched.discard(None)
    if not searched:
        searched = {server_path(program)}
    for path in searched:
        if not shutil.which(SERVER, path=path):
            text = f"{SERVER} is not on the control daemon's PATH ({path}): every client is refused"
            findings.append(problem(text, f"install it, or link it into {os.path.dirname(program)}"))
    for pid in pids:
        if _is_deleted(pid):
            text = (
                f"the executable of the control daemon (PID {pid}) was replaced or removed after it started"
            )
            hint = "once its jobs have ended: systemctl restart yunion-mps-daemon"
            findings.append(warning(text, hint))
    findings += _library_findings(host)
    return findings or [ok(f"{program}, {SERVER} and {_LIBRARY} are installed")]


def _library_findings(host: Host) -> list[Finding]:
    if _libraries(host):
        return []
    text = f"{_LIBRARY} was not found: without it, neither MPS servers nor CUDA programs can start"
    hint = "install the driver's libraries (libcuda1, libnvidia-compute-*, nvidia-driver-cuda-libs)"
    return [warning(text, hint)]


@host_check("device nodes", DEVICE_NODES)
def nodes(host: Host) -> Findings:
    """The device nodes: an MPS server runs as its client's user, so all users must have access.

    Source: NVIDIA: Multi-Process Service, section "Provisioning Sequence", Server; nvidia-modprobe(1).
    """
    gpus = [gpu for gpu in host.our_gpus() if gpu.reason.code not in (GPU_GONE, GPU_OTHER_DRIVER)]
    if not gpus:
        raise SkipError("no divided GPU answers")
    unknown = list_of(gpu.address for gpu in gpus if gpu.minor is None)
    if all(gpu.minor is None for gpu in gpus):
        raise SkipError(f"the driver does not report the minor number of {unknown}")
    of_instances = missing_nodes(host.paths, gpus)
    access = _node_access(host, _needed_nodes(host, gpus, of_instances))
    if access.missing:
        hint = "create them: nvidia-modprobe -c 0 -u; at every boot: systemctl enable nvidia-persistenced"
        return [problem(f"{', '.join(access.missing)}: missing, so no CUDA program can run", hint)]
    if access.closed:
        hint = (
            "until the next boot: chmod a+rw (a+r in nvidia-caps); permanently: set the option "
            "NVreg_DeviceFileMode=0666 of the nvidia module"
        )
        return [problem(f"{', '.join(access.closed)}: accessible only to root", hint)]
    if of_instances:
        return [problem(error.message, error.hint) for error in of_instances.values()]
    return [ok(_describe_access(access.groups, unknown))]


def _describe_access(groups: Collection[int], unknown: str) -> str:
    """Say who can open the nodes, and of which GPUs that is not known."""
    text = "all exist and can be opened"
    if groups:
        text += f", but only by root and group {', '.join(map(str, sorted(groups)))}"
    if unknown:
        text += f"; not checked: that of {unknown}, whose minor number the driver does not report"
    return text


class _NodeAccess(NamedTuple):
    """Who can open device nodes."""

    #: The paths of the nodes that do not exist.
    missing: list[str]
    #: The paths of those that only root can open.
    closed: list[str]
    #: The groups to which others are open.
    groups: set[int]


def _node_access(host: Host, needed: Mapping[str, int]) -> _NodeAccess:
    """Return who can open the nodes.

    needed: the nodes below /dev, with the permissions that all users need.
    """
    missing: list[str] = []
    closed: list[str] = []
    groups: set[int] = set()
    for name, mode in needed.items():
        path = host.paths.under(f"/dev/{name}")
        try:
            info = os.stat(path)
        except OSError:
            missing.append(path)
            continue
        is_open = info.st_mode & mode == mode
        is_open_to_group = (info.st_mode >> 3) & mode == mode and info.st_gid != 0
        if not is_open and is_open_to_group:
            groups.add(info.st_gid)
        elif not is_open:
            closed.append(path)
    return _NodeAccess(missing, closed, groups)


def _needed_nodes(host: Host, gpus: Iterable[Gpu], incomplete: Collection[str]) -> dict[str, int]:
    """Return the nodes that programs need, below /dev, each with the permissions that all users need.

    Those of `incomplete` MIG instances (UUIDs) are left out.
    """
    needed = dict.fromkeys(["nvidiactl", "nvidia-uvm"], 0o6)
    for gpu in gpus:
        if gpu.minor is not None:
            needed[f"nvidia{gpu.minor}"] = 0o6
            if gpu.uuid not in incomplete:
                needed |= dict.fromkeys(capability_nodes(host.paths, gpu.minor, gpu.pci_address), 0o4)
    return needed


def library_version(path: str) -> str | None:
    """Return the release in a library's name, `535.261.03` of libcuda.so.535.261.03; None without one."""
    match = _LIBRARY_VERSION.search(os.path.realpath(path))
    return match[1] if match else None


def _versions(host: Host) -> Iterator[tuple[str, str, str]]:
    """Yield each part of the driver whose version is known, what messages call it, and the version."""
    match = _MODULE.search(read_text(host.paths.under("/proc/driver/nvidia/version")))
    if match:
        yield _KERNEL_MODULE, "the loaded kernel module", match[1]
    for path in _libraries(host):
        version = library_version(path)
        if version:
            yield _DRIVER_LIBRARY, path, version
    for pid in host.control_pids():
        yield from _program_version(f"/proc/{pid}/exe", f"the running control daemon (PID {pid})")
    try:
        yield from _program_version(find_control_program(), PROGRAM)
    except HostError:  # reported by `programs`
        return


def _program_version(path: str, name: str) -> Iterator[tuple[str, str, str]]:
    versions = set(_PROGRAM_VERSION.findall(read_text(path)))  # empty for another user's process
    if len(versions) == 1:
        yield _PROGRAMS, name, versions.pop()


def _libraries(host: Host) -> list[str]:
    """Return the libcuda that programs load here: the first that the loader's rules find."""
    under = host.paths.under
    candidates: list[str] = []
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder:
            candidates.append(os.path.join(folder, _LIBRARY))
    # The loader's cache (ldconfig(8)).
    cached = re.findall(r"(/[^\0]*/libcuda\.so\.1)\0", read_text(under("/etc/ld.so.cache")))
    candidates += cached
    for folder in _LIBRARY_FOLDERS:
        candidates += sorted(glob.glob(under(os.path.join(folder, _LIBRARY))))
    return list(filter(os.path.exists, candidates))[:1]


def _is_deleted(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith(" (deleted)")
    except OSError:
        return False
