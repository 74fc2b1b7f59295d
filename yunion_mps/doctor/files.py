"""Files: the directories where clients find the control daemon, and what keeps them from it."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence

from yunion_mps.doctor.host import Finding, Findings, Host, SkipError, check, ok, problem, warning
from yunion_mps.host.files import read_text
from yunion_mps.host.proc import user_name
from yunion_mps.inventory.events import kernel_records
from yunion_mps.reasons import ACCESS_DENIED, DISK_FULL, PIPE_DIRECTORY, SHM_SMALL, SOCKETS_REMOVED

_ALL_ENTER = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_WRITE = 0o222

#: A control daemon's log is emptied at 1 MiB; NVIDIA's server log and the sockets need little beside it.
_LEAST_FREE_BYTES = 16 << 20
#: Each server makes some small files there, a client's queues some more; containers get 64 MiB by default.
_LEAST_SHM_BYTES = 64 << 20
_LEAST_SHM_FREE_BYTES = 8 << 20

#: Types of tmpfiles.d(5) whose age cleans what lies below, and those that keep it from that.
_CLEANING, _KEEPING = "dDeqQvC", "xX"

_LAST_LOG_BYTES = 1 << 20
_DAY_S = 86_400.0

#: `type=AVC msg=audit(1788000060.5:43): avc:  denied  { connectto } for  pid=7 comm="nvidia-cuda-mps" ...`
_DENIED = re.compile(r'avc: +denied +\{ ([\w ]+) \}|apparmor="DENIED" operation="(\w+)"')
_OURS = re.compile(r"nvidia-cuda-mps|nvidia-mps|yunion-mps")
_TIME = re.compile(r"audit\((\d+)\.")
_HINTS = {
    "AppArmor": "allow it in the named profile, then: systemctl reload apparmor",
    "SELinux": "ausearch -m avc -c nvidia-cuda-mps | audit2allow -M yunion-mps; review "
    "yunion-mps.te, then: semodule "
    "-i yunion-mps.pp; for files moved from elsewhere: restorecon -Rv DIRECTORY",
}
_ABOUT = re.compile(r'\b(comm|path|name|scontext|tcontext|tclass|profile)="?([^"\s]+)')


@check("pipe directory", PIPE_DIRECTORY)
def pipe_directory(host: Host) -> Findings:
    """Whether every user can reach the sockets, and no other user can put a control daemon there."""
    found: list[Finding] = []
    missing = []
    places = [domain.pipe_directory for domain in host.domains()]
    group = host.config()[0].cuda_mps_pipe_group
    for place in places:
        try:
            found += list(_on_the_way(host.paths.root, place, group)) or list(_sockets(place))
        except FileNotFoundError:
            missing.append(place)
    if found:
        return found
    if not places:
        raise SkipError
    if missing:
        return [ok(f"{_few(missing)}: created when the daemon starts")]
    return [ok(f"{_few(places)}: {f'only the group {group}' if group else 'all users'} have access")]


def _few(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"


def _on_the_way(root: str, place: str, group: str | None) -> Iterator[Finding]:
    """What is wrong with each directory from the host's root to the place; raises FileNotFoundError."""
    path = root.rstrip("/")
    names = [name for name in place[len(path) :].split("/") if name]
    for number, name in enumerate(names):
        path = f"{path}/{name}"
        try:
            info = os.lstat(path)
        except PermissionError:  # the one above it cannot be entered, which is found
            return
        if stat.S_ISLNK(info.st_mode):
            if info.st_uid != 0:
                what = f"{path} is a symlink that belongs to {user_name(info.st_uid)}, so it is not followed"
                yield problem(what, f"check who created it (ls -l {path}), and remove it")
            info = os.stat(path)
        if not stat.S_ISDIR(info.st_mode):
            yield problem(f"{path} is not a directory", f"check what it is (ls -ld {path}), and remove it")
            return
        last = number == len(names) - 1
        yield from _directory(path, info, last=last, closed=last and group is not None)


def _directory(path: str, info: os.stat_result, *, last: bool, closed: bool) -> Iterator[Finding]:
    if closed and info.st_mode & stat.S_IXOTH:
        what = f"{path} is open to all users, but cuda_mps_pipe_group limits it to one group"
        yield problem(what, "systemctl reload yunion-mps-daemon")
    elif not closed and info.st_mode & _ALL_ENTER != _ALL_ENTER:
        what = f"{path} is not accessible to other users: their programs cannot reach the control daemon"
        yield problem(f"{what}, and neither can their MPS servers", f"chmod a+x {path}")
    if info.st_uid not in (0, os.geteuid()):
        what = f"{path} belongs to {user_name(info.st_uid)}, who can put another control daemon there"
        yield problem(what, f"check its contents (ls -la {path}); remove it, or choose another directory")
    elif info.st_mode & _OTHERS_WRITE and (last or not info.st_mode & stat.S_ISVTX):
        what = f"{path} is writable by other users, who can put another control daemon there"
        yield problem(what, f"chmod go-w {path}")


def _sockets(place: str) -> Iterator[Finding]:
    path = f"{place}/control"
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if mode & _ALL_WRITE != _ALL_WRITE:
        yield problem(f"other users may not connect to {path}", f"chmod a+rw {path}")


@check("cleaning", SOCKETS_REMOVED, "no cleanup program removes old sockets")
def cleaning(host: Host) -> Findings:
    """Whether something removes sockets by their age, as systemd-tmpfiles does in /tmp on many systems."""
    rules = list(_rules(host))
    for domain in host.domains():
        place = "/" + os.path.relpath(domain.pipe_directory, host.paths.root)
        kept = any(kind in _KEEPING and _covers(path, place) for kind, path, _ in rules)
        ages = [
            (path, age) for kind, path, age in rules if kind in _CLEANING and age and _is_below(place, path)
        ]
        if ages and not kept:
            path, age = ages[0]
            what = f"systemd-tmpfiles removes files older than {age} from {path}"
            hint = f"echo 'x {place}' >/etc/tmpfiles.d/yunion-mps-pipe.conf"
            yield warning(f"{what}, including the sockets in {place}", hint)


def _rules(host: Host) -> Iterator[tuple[str, str, str]]:
    """Type, path and age of each line of tmpfiles.d(5); a file of /etc hides one of the same name."""
    files: dict[str, str] = {}
    for folder in ("/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/lib/tmpfiles.d"):
        for file in glob.glob(host.paths.under(f"{folder}/*.conf")):
            files.setdefault(os.path.basename(file), file)
    for file in files.values():
        for line in read_text(file).splitlines():
            words = line.split()
            if len(words) > 1 and not line.startswith("#"):
                age = words[5] if len(words) > 5 and words[5] != "-" else ""
                yield words[0][0], words[1], age


def _covers(pattern: str, place: str) -> bool:
    parents = [place]
    while parents[-1] != "/":
        parents.append(os.path.dirname(parents[-1]))
    return any(fnmatch.fnmatch(parent, pattern.removesuffix("/*")) for parent in parents)


def _is_below(place: str, path: str) -> bool:
    return place == path or place.startswith(path.rstrip("/") + "/")


@check("disk space", DISK_FULL, "the pipe and log directories have free space")
def space(host: Host) -> Findings:
    """Room for sockets and logs."""
    seen = set()
    for place in sorted({p for d in host.domains() for p in (d.pipe_directory, d.log_directory)}):
        while not os.path.exists(place):
            place = os.path.dirname(place)
        system, device = os.statvfs(place), os.stat(place).st_dev
        if device in seen:
            continue
        seen.add(device)
        free = system.f_bavail * system.f_frsize
        if system.f_flag & os.ST_RDONLY:
            yield problem(
                f"{place} is read-only",
                f"find its file system (findmnt -T {place}), then: mount -o remount,rw MOUNTPOINT",
            )
        elif free < _LEAST_FREE_BYTES:
            what = f"{place} has only {free >> 20} MiB free: the control daemon cannot write its log"
            yield problem(what, f"free disk space: df -h {place}")
        elif system.f_files and not system.f_favail:
            yield problem(f"{place} has no free inodes", f"remove files, and check: df -i {place}")


@check("/dev/shm", SHM_SMALL)
def shm(host: Host) -> Findings:
    """The shared memory in which servers and clients meet."""
    place = host.paths.under("/dev/shm")
    try:
        info, system = os.stat(place), os.statvfs(place)
    except OSError as error:
        what = f"{place}: {error.strerror}: MPS servers and clients share memory there"
        return [problem(what, f"mount -t tmpfs -o mode=1777 tmpfs {place}")]
    free, size = (number * system.f_frsize for number in (system.f_bavail, system.f_blocks))
    found = []
    if info.st_mode & 0o1777 != 0o1777:
        what = (
            f"{place} has mode {stat.S_IMODE(info.st_mode):o}: not every user's server can create its files"
        )
        found.append(problem(what, f"chmod 1777 {place}"))
    if size < _LEAST_SHM_BYTES:
        what = f"{place} has only {size >> 20} MiB in total, too little for many clients"
        found.append(warning(what, f"mount -o remount,size=1G {place}; docker run --shm-size 1g"))
    if free < _LEAST_SHM_FREE_BYTES or (system.f_files and not system.f_favail):
        what = (
            f"{place} is full ({free >> 20} MiB and {system.f_favail} inodes free): no MPS server can start"
        )
        found.append(
            problem(what, f"list its largest files (ls -laS {place}), and remove those that no process uses")
        )
    return found or [ok(f"{free >> 20} of {size >> 20} MiB free")]


@check("SELinux and AppArmor", ACCESS_DENIED)
def denials(host: Host) -> Findings:
    """What was refused within the last day."""
    under = host.paths.under
    enforcing = read_text(under("/sys/fs/selinux/enforce")).strip()
    apparmor = read_text(under("/sys/module/apparmor/parameters/enabled")).strip() == "Y"
    if not enforcing and not apparmor:
        return [ok("neither is active")]
    texts, readable = _logs(under("/var/log/audit/audit.log"), host.paths.kernel_log)
    oldest_s = time.time() - _DAY_S
    places = [domain.pipe_directory for domain in host.domains()]
    lines = [
        line
        for line in texts
        if _DENIED.search(line)
        and (_OURS.search(line) or any(place in line for place in places))
        and (not (found := _TIME.search(line)) or int(found[1]) >= oldest_s)
    ]
    if lines:
        return [_denial(lines, permissive=enforcing == "0")]
    if not readable:
        raise SkipError("only root can read the logs of denials (audit.log, dmesg)", "run it as root")
    state = {"1": "SELinux is enforcing", "0": "SELinux is permissive"}.get(enforcing, "AppArmor is active")
    return [ok(f"{state}, and denied MPS nothing within the last day")]


def _denial(lines: list[str], *, permissive: bool) -> Finding:
    last = lines[-1]
    operation = next(word for word in _DENIED.search(last).groups() if word)  # type: ignore[union-attr]
    about = ", ".join(f"{key} {value}" for key, value in _ABOUT.findall(last))
    who = "AppArmor" if "apparmor=" in last else "SELinux"
    what = f"{who} denied MPS {operation.strip()!r} ({len(lines)} times within the last day; {about})"
    if permissive:
        return warning(f"{what}: it would be denied in enforcing mode", _HINTS[who])
    return problem(what, _HINTS[who])


def _logs(audit: str, kernel: str) -> tuple[list[str], bool]:
    """The lines of both logs, and whether one of them could be read."""
    lines: list[str] = []
    readable = False
    try:
        with open(audit, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_LOG_BYTES))
            lines += file.read().decode(errors="replace").splitlines()
            readable = True
    except OSError:
        pass
    records = kernel_records(kernel)
    for record in records or []:
        lines += record.decode(errors="replace").splitlines()
    return lines, readable or records is not None
