"""Files: the directories where clients find the control daemon, and what makes them unusable."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from yunion_mps.core.enums import ABOUT_PIPE_DIRECTORY
from yunion_mps.core.reasons import ACCESS_DENIED, DISK_FULL, PIPE_DIRECTORY, SHM_SMALL, SOCKETS_REMOVED
from yunion_mps.core.text import count
from yunion_mps.doctor.checks import (
    Finding,
    Findings,
    Host,
    finding_of,
    host_check,
    invisible,
    ok,
    problem,
    warning,
)
from yunion_mps.host.files import open_regular, read_text
from yunion_mps.inventory.gpu_events import kernel_records
from yunion_mps.mps.directory_access import find_access_problems

#: A control daemon empties its log at 1 MiB; NVIDIA's server log and the sockets need little more.
_LEAST_FREE_BYTES = 16 << 20
#: Each server creates small files there, and its clients' queues some more; containers get 64 MiB by default
#: (docker run and podman-run(1), --shm-size).
_LEAST_SHM_BYTES = 64 << 20
_LEAST_SHM_FREE_BYTES = 8 << 20

#: Types of tmpfiles.d(5) that clean up by age, and types that exclude a path from it.
_CLEANING = "dDeqQvC"
_KEEPING = "xX"

_LAST_LOG_BYTES = 1 << 20
_DAY_S = 86_400.0

#: `type=AVC msg=audit(1788000060.5:43): avc:  denied  { connectto } for  pid=7 comm="nvidia-cuda-mps" ...`
_DENIED = re.compile(r'avc: +denied +\{ ([\w ]+) \}|apparmor="DENIED" operation="(\w+)"')
_MPS = re.compile(r"nvidia-cuda-mps|nvidia-mps|yunion-mps")
_TIME = re.compile(r"audit\((\d+)\.")
_HINTS = {
    "AppArmor": "allow it in the named profile, then: systemctl reload apparmor",
    "SELinux": "ausearch -m avc -c nvidia-cuda-mps | audit2allow -M yunion-mps; review "
    "yunion-mps.te, then: semodule "
    "-i yunion-mps.pp; for files moved from elsewhere: restorecon -Rv DIRECTORY",
}
_DETAIL = re.compile(r'\b(comm|path|name|scontext|tcontext|tclass|profile)="?([^"\s]+)')


@host_check("pipe directory", PIPE_DIRECTORY)
def pipe_directory(host: Host) -> Findings:
    """Check whether all users can reach the sockets, and no other user can replace the control daemon."""
    findings = [finding_of(condition) for condition in host.conditions(ABOUT_PIPE_DIRECTORY)]
    reported = {finding.what for finding in findings}
    missing = []
    directories = [domain.pipe_directory for domain in host.mps_domains()]
    group = host.config()[0].cuda_mps_pipe_group
    for directory in directories:
        try:
            problems = find_access_problems(host.paths.root, directory, group)
            findings += [problem(text, hint) for text, hint in problems if text not in reported]
        except FileNotFoundError:
            missing.append(directory)
    if findings:
        return findings
    if missing:
        return [ok(f"{_summary(missing)}: will be created when the daemon starts")]
    users = f"only the group {group}" if group else "all users"
    return [ok(f"{_summary(directories)}: {users} have access")]


def _summary(directories: Sequence[str]) -> str:
    if len(directories) == 1:
        return directories[0]
    return f"{directories[0]} and {len(directories) - 1} more"


@host_check("socket cleanup", SOCKETS_REMOVED, "no cleanup program removes old sockets")
def socket_cleanup(host: Host) -> Findings:
    """Check whether something removes sockets by age, as systemd-tmpfiles does in /tmp on many systems."""
    rules = list(_tmpfiles_rules(host))
    for domain in host.mps_domains():
        directory = "/" + os.path.relpath(domain.pipe_directory, host.paths.root)
        rule = _cleaning_rule(directory, rules)
        if rule:
            text = f"systemd-tmpfiles removes files older than {rule.age} from {rule.path}"
            hint = f"echo 'x {directory}' >/etc/tmpfiles.d/yunion-mps-pipe.conf"
            yield warning(f"{text}, including the sockets in {directory}", hint)


class _TmpfilesRule(NamedTuple):
    """A line of tmpfiles.d(5)."""

    #: The letter of its type.
    kind: str
    path: str
    #: Empty if nothing is removed by age.
    age: str


def _cleaning_rule(directory: str, rules: Sequence[_TmpfilesRule]) -> _TmpfilesRule | None:
    """Return the first rule that removes files from the directory by age; None if none does."""
    if any(rule.kind in _KEEPING and _covers(rule.path, directory) for rule in rules):
        return None
    for rule in rules:
        if rule.kind in _CLEANING and rule.age and _is_below(directory, rule.path):
            return rule
    return None


def _tmpfiles_rules(host: Host) -> Iterator[_TmpfilesRule]:
    """Yield the lines of tmpfiles.d(5); a file in /etc hides one of the same name."""
    files: dict[str, str] = {}
    for folder in ("/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/lib/tmpfiles.d"):
        for file in glob.glob(host.paths.under(f"{folder}/*.conf")):
            files.setdefault(os.path.basename(file), file)
    for file in files.values():
        for line in read_text(file).splitlines():
            fields = line.split()
            if len(fields) > 1 and not line.startswith("#"):
                age = fields[5] if len(fields) > 5 and fields[5] != "-" else ""
                yield _TmpfilesRule(kind=fields[0][0], path=fields[1], age=age)


def _covers(pattern: str, directory: str) -> bool:
    parents = [directory]
    while parents[-1] != "/":
        parents.append(os.path.dirname(parents[-1]))
    return any(fnmatch.fnmatch(parent, pattern.removesuffix("/*")) for parent in parents)


def _is_below(directory: str, path: str) -> bool:
    return directory == path or directory.startswith(path.rstrip("/") + "/")


@host_check("disk space", DISK_FULL, "the pipe and log directories have free space")
def disk_space(host: Host) -> Findings:
    checked = set()
    directories: set[str] = set()
    for domain in host.mps_domains():
        directories.update((domain.pipe_directory, domain.log_directory))
    for path in sorted(directories):
        directory = path
        while not os.path.exists(directory):
            directory = os.path.dirname(directory)
        system = os.statvfs(directory)
        device = os.stat(directory).st_dev
        if device in checked:
            continue
        checked.add(device)
        free = system.f_bavail * system.f_frsize
        if system.f_flag & os.ST_RDONLY:
            hint = f"find its file system (findmnt -T {directory}), then: mount -o remount,rw MOUNTPOINT"
            yield problem(f"{directory} is read-only", hint)
        elif free < _LEAST_FREE_BYTES:
            text = f"{directory} has only {free >> 20} MiB free: the control daemon cannot write its log"
            yield problem(text, f"free disk space: df -h {directory}")
        elif system.f_files and not system.f_favail:
            yield problem(f"{directory} has no free inodes", f"remove files, and check: df -i {directory}")


@host_check("/dev/shm", SHM_SMALL)
def shm(host: Host) -> Findings:
    directory = host.paths.under("/dev/shm")
    try:
        info = os.stat(directory)
        system = os.statvfs(directory)
    except OSError as error:
        text = f"{directory}: {error.strerror}; MPS servers and clients need it for shared memory"
        return [problem(text, f"mount -t tmpfs -o mode=1777 tmpfs {directory}")]
    free = system.f_bavail * system.f_frsize
    size = system.f_blocks * system.f_frsize
    findings = []
    if info.st_mode & 0o1777 != 0o1777:
        mode = stat.S_IMODE(info.st_mode)
        text = f"{directory} has mode {mode:o}, so MPS servers of other users cannot create files there"
        findings.append(problem(text, f"chmod 1777 {directory}"))
    if size < _LEAST_SHM_BYTES:
        text = f"{directory} has only {size >> 20} MiB in total, too little for many clients"
        findings.append(warning(text, f"mount -o remount,size=1G {directory}; docker run --shm-size 1g"))
    if free < _LEAST_SHM_FREE_BYTES or (system.f_files and not system.f_favail):
        available = f"{free >> 20} MiB and {system.f_favail} inodes free"
        text = f"{directory} is full ({available}): no MPS server can start"
        hint = f"list its largest files (ls -laS {directory}), and remove those that no process uses"
        findings.append(problem(text, hint))
    return findings or [ok(f"{free >> 20} of {size >> 20} MiB free")]


@host_check("SELinux and AppArmor", ACCESS_DENIED)
def denials(host: Host) -> Findings:
    """Denials within the last day."""
    under = host.paths.under
    enforcing = read_text(under("/sys/fs/selinux/enforce")).strip()
    apparmor = read_text(under("/sys/module/apparmor/parameters/enabled")).strip() == "Y"
    if not enforcing and not apparmor:
        return [ok("neither is active")]
    texts, readable = _read_logs(under("/var/log/audit/audit.log"), host.paths.kernel_log)
    oldest_s = time.time() - _DAY_S
    directories = [domain.pipe_directory for domain in host.domains()]
    lines: list[str] = []
    for line in texts:
        is_ours = _MPS.search(line) or any(directory in line for directory in directories)
        time_of_line = _TIME.search(line)
        is_recent = time_of_line is None or int(time_of_line[1]) >= oldest_s
        if is_ours and is_recent and _DENIED.search(line):
            lines.append(line)
    if lines:
        return [_summarise_denials(lines, permissive=enforcing == "0")]
    if not readable:
        raise invisible("the logs of denials (audit.log, dmesg)")
    state = "AppArmor is active"
    if enforcing == "1":
        state = "SELinux is enforcing"
    elif enforcing == "0":
        state = "SELinux is permissive"
    return [ok(f"{state}; no denials for MPS in the last day")]


def _summarise_denials(lines: list[str], *, permissive: bool) -> Finding:
    last = lines[-1]
    operation = next(word for word in _DENIED.search(last).groups() if word)  # type: ignore[union-attr]
    details = ", ".join(f"{key} {value}" for key, value in _DETAIL.findall(last))
    module = "AppArmor" if "apparmor=" in last else "SELinux"
    times = count(len(lines), "time")
    text = f"{module} denied MPS the operation {operation.strip()!r} ({times} in the last day; {details})"
    if permissive:
        return warning(f"{text}: it would be denied in enforcing mode", _HINTS[module])
    return problem(text, _HINTS[module])


def _read_logs(audit: str, kernel: str) -> tuple[list[str], bool]:
    """Return the lines of both logs, and whether at least one of them could be read."""
    lines: list[str] = []
    readable = False
    try:
        with open_regular(audit) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_LOG_BYTES))
            lines += file.read().decode(errors="replace").splitlines()
            readable = True
    except OSError:
        pass
    records = kernel_records(kernel)
    for record in records or []:
        lines += record.decode(errors="replace").splitlines()
    return lines, readable or records is not None
