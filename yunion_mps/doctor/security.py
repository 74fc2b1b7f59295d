"""SELinux and AppArmor: what they have refused to NVIDIA's programs."""

from __future__ import annotations

import os
import re
import time

from yunion_mps.doctor.finding import Finding, Findings, ok, problem, skipped, warning
from yunion_mps.doctor.host import Host
from yunion_mps.inventory.events import kernel_records

_LAST_BYTES = 1 << 20
_RECENT_S = 86_400.0

#: `type=AVC msg=audit(1788000060.5:43): avc:  denied  { connectto } for  pid=7 comm="nvidia-cuda-mps" ...`
_DENIED = re.compile(r'avc: +denied +\{ ([\w ]+) \}|apparmor="DENIED" operation="(\w+)"')
_OURS = re.compile(r"nvidia-cuda-mps|nvidia-mps|yunion-mps")
_TIME = re.compile(r"audit\((\d+)\.")
_ABOUT = re.compile(r'\b(comm|path|name|scontext|tcontext|tclass|profile)="?([^"\s]+)')


def denials(host: Host) -> Findings:
    """What was refused within the last day."""
    under = host.paths.under
    enforcing = _read(under("/sys/fs/selinux/enforce")).strip()
    apparmor = _read(under("/sys/module/apparmor/parameters/enabled")).strip() == "Y"
    if not enforcing and not apparmor:
        return [ok("neither is in force here")]
    texts, readable = _logs(under("/var/log/audit/audit.log"), host.paths.kernel_log)
    oldest_s = time.time() - _RECENT_S
    places = [domain.pipe_directory for domain in host.domains()]
    lines = [
        line
        for line in texts
        if _DENIED.search(line)
        and (_OURS.search(line) or any(place in line for place in places))
        and (not (found := _TIME.search(line)) or int(found[1]) >= oldest_s)
    ]
    if lines:
        return [_told(lines, permissive=enforcing == "0")]
    if not readable:
        return [skipped("only root can read what was refused (audit.log, dmesg)", "run it as root")]
    state = {"1": "SELinux is enforcing", "0": "SELinux is permissive"}.get(enforcing, "AppArmor is in force")
    return [ok(f"{state}, and has refused MPS nothing within the last day")]


def _told(lines: list[str], *, permissive: bool) -> Finding:
    last = lines[-1]
    operation = next(word for word in _DENIED.search(last).groups() if word)  # type: ignore[union-attr]
    about = ", ".join(f"{key} {value}" for key, value in _ABOUT.findall(last))
    who = "AppArmor" if "apparmor=" in last else "SELinux"
    what = f"{who} refused MPS {operation.strip()!r} ({len(lines)} times within the last day; {about})"
    if permissive:
        return warning(f"{what}: it would be refused in enforcing mode", _remedy(who))
    return problem(what, _remedy(who))


def _remedy(who: str) -> str:
    if who == "AppArmor":
        return "allow it in the profile that is named, then: systemctl reload apparmor"
    return (
        "ausearch -m avc -c nvidia-cuda-mps | audit2allow -M yunion-mps, read what it allows, "
        "then: semodule -i yunion-mps.pp; for files of another place: restorecon -Rv DIRECTORY"
    )


def _logs(audit: str, kernel: str) -> tuple[list[str], bool]:
    """The lines of both logs, and whether one of them could be read."""
    lines: list[str] = []
    readable = False
    try:
        with open(audit, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            lines += file.read().decode(errors="replace").splitlines()
            readable = True
    except OSError:
        pass
    records = kernel_records(kernel)
    for record in records or []:
        lines += record.decode(errors="replace").splitlines()
    return lines, readable or records is not None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64)
    except OSError:
        return ""
