"""The driver, and NVIDIA's programs and libraries that must be of the same release."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterator

from yunion_mps.doctor.host import NO_GPU, Host, SkipError, read
from yunion_mps.doctor.report import Finding, Findings, check, ok, problem, skipped, warning
from yunion_mps.errors import DriverError, HostError
from yunion_mps.host.proc import environment_of
from yunion_mps.mps.processes import PROGRAM, SERVER, find_control_program, server_path

#: /proc/driver/nvidia/version: `Kernel Module  535.261.03`, `Open Kernel Module for x86_64  550.54.15`.
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d{3}[\d.]*\d)")
#: NVIDIA's control program holds its release as a string of its own (535, 550).
_IN_PROGRAM = re.compile(rb"\0(\d{3}\.\d{2,3}(?:\.\d{2})?)\0")
_IN_NAME = re.compile(r"\.so\.(\d{3}\.[\d.]*\d)$")

_LIBRARY = "libcuda.so.1"
#: Where drivers put libraries, beside what the loader's cache tells.
_LIBRARY_FOLDERS = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib/*-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/run/nvidia/driver/usr/lib/*-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
)

_OFF = "nothing here needs it while enable_cuda_mps is false"
_UPDATE = "finish the driver's update (all of its packages in one version), then reboot"


@check("driver")
def driver(host: Host) -> Findings:
    """Whether it answers, and whether its kernel module, library and programs are of one version."""
    try:
        version = host.inventory().driver.version
    except DriverError as error:
        if host.is_off():
            return [skipped(f"{error.message}; {_OFF}")]
        return [problem(error.message, error.hint)]
    found = [
        (warning if other.partition(".")[0] == version.partition(".")[0] else problem)(
            f"{what} is of {other}, the driver of {version}", _UPDATE
        )
        for what, other in _versions(host)
        if other != version
    ]
    return found or [ok(f"{version}, and so are its module, library and programs")]


@check("programs")
def programs(host: Host) -> Findings:
    """NVIDIA's control program, its server where the control daemon looks for it, and libcuda."""
    if host.is_off():
        return [skipped(_OFF)]
    try:
        program = find_control_program()
    except HostError as error:
        return [problem(error.message, error.hint)]
    found: list[Finding] = []
    pids = host.control_pids()
    searched = {environment_of(pid).get("PATH") for pid in pids} - {None} or {server_path(program)}
    for path in searched:
        if not shutil.which(SERVER, path=path):
            what = f"{SERVER} is not where the control daemon looks for it ({path}): every client is refused"
            found.append(problem(what, f"install it, or link it into {os.path.dirname(program)}"))
    for pid in pids:
        if _is_deleted(pid):
            what = f"the control daemon (PID {pid}) runs a program that was replaced or removed since"
            hint = "when its jobs are done: systemctl restart yunion-mps-daemon"
            found.append(warning(what, hint))
    if not _libraries(host):
        what = f"{_LIBRARY} was not found: without it no MPS server starts, and no CUDA program"
        hint = "install the driver's libraries (libcuda1, libnvidia-compute-*, nvidia-driver-cuda-libs)"
        found.append(warning(what, hint))
    return found or [ok(f"{program} and {SERVER} are there, and {_LIBRARY} is")]


@check("device nodes")
def nodes(host: Host) -> Findings:
    """The device nodes: an MPS server runs as its client's user, so all users must be able to open them."""
    minors = {f"nvidia{gpu.minor}" for gpu in host.our_gpus() if gpu.minor is not None}
    if not minors:
        raise SkipError(NO_GPU)
    missing, closed, groups = [], [], set()
    for name in ["nvidiactl", "nvidia-uvm", *sorted(minors)]:
        path = host.paths.under(f"/dev/{name}")
        try:
            info = os.stat(path)
        except OSError:
            missing.append(path)
            continue
        if info.st_mode & 0o006 != 0o006:
            if info.st_mode & 0o060 == 0o060 and info.st_gid != 0:
                groups.add(info.st_gid)
            else:
                closed.append(path)
    if missing:
        hint = "make them: nvidia-modprobe -c 0 -u; at every boot, enable nvidia-persistenced"
        return [problem(f"{', '.join(missing)}: missing, so no CUDA program runs", hint)]
    if closed:
        hint = "for now: chmod a+rw; for good, the option NVreg_DeviceFileMode=0666 of the nvidia module"
        return [problem(f"{', '.join(closed)}: users other than root may not open it", hint)]
    few = f", for the groups {', '.join(str(gid) for gid in sorted(groups))} only" if groups else ""
    return [ok(f"they are there, and can be opened{few}")]


def library_version(path: str) -> str | None:
    """The release in a library's name, `535.261.03` of libcuda.so.535.261.03; None if it has none."""
    found = _IN_NAME.search(os.path.realpath(path))
    return found[1] if found else None


def _versions(host: Host) -> Iterator[tuple[str, str]]:
    """Each part of the driver whose version can be seen, and the version."""
    found = _MODULE.search(read(host.paths.under("/proc/driver/nvidia/version")).decode(errors="replace"))
    if found:
        yield "the loaded kernel module", found[1]
    for path in _libraries(host):
        version = library_version(path)
        if version:
            yield path, version
    for pid in host.control_pids():
        yield from _program(f"/proc/{pid}/exe", f"the running control daemon (PID {pid})")
    try:
        yield from _program(find_control_program(), PROGRAM)
    except HostError:  # `programs` finds that
        return


def _program(path: str, what: str) -> Iterator[tuple[str, str]]:
    versions = set(_IN_PROGRAM.findall(read(path)))  # none in another user's process
    if len(versions) == 1:
        yield what, versions.pop().decode()


def _libraries(host: Host) -> list[str]:
    """The libcuda that a program gets here: the first that the loader's rules find."""
    under = host.paths.under
    named = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    candidates = [os.path.join(folder, _LIBRARY) for folder in named]
    # What the loader's cache (ldconfig(8)) names.
    cached = re.findall(rb"(/[^\0]*/libcuda\.so\.1)\0", read(under("/etc/ld.so.cache")))
    candidates += [name.decode(errors="replace") for name in cached]
    for folder in _LIBRARY_FOLDERS:
        candidates += sorted(glob.glob(under(os.path.join(folder, _LIBRARY))))
    return [path for path in candidates if os.path.exists(path)][:1]


def _is_deleted(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith(" (deleted)")
    except OSError:
        return False
