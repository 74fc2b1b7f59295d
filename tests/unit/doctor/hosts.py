"""Hosts for the doctor's checks: a tree of files, and what the driver and the daemon would say of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from yunion_mps.core.errors import DriverError, UnreachableError
from yunion_mps.core.models import Gpu, Snapshot
from yunion_mps.core.paths import Paths
from yunion_mps.doctor.checks import Finding, Host, Lazy, findings_of
from yunion_mps.doctor.report import HOST_CHECKS
from yunion_mps.service.queries import Queries

from unit import builders
from unit.http.fake_services import status_of

DRIVER = "535.261.03"
CHECKS = {check.name: check for check in HOST_CHECKS}


def _no_driver() -> Any:
    raise DriverError("no NVIDIA driver", "install it")


def _no_daemon() -> Any:
    raise UnreachableError("the daemon is not running", "start it")


def host_of(root: Path, *gpus: Gpu, snapshot: Snapshot | None = None, **keys: str) -> Host:
    """A host with these keys in host.conf; its daemon, if it runs, is at this snapshot.

    Without GPUs there is no driver, and of the one domain in host.conf only the directories are known.
    """
    write(root / "etc/machine-id", f"{builders.MACHINE_ID}\n")
    keys = {"enable_cuda_mps": "true", **keys}
    write(root / "etc/yunion/host.conf", "".join(f"{name}: {value}\n" for name, value in keys.items()))
    host = Host(Paths(str(root)), 30)
    host.inventory = Lazy(lambda: builders.inventory(*gpus, driver=DRIVER) if gpus else _no_driver())
    if snapshot:
        queries = Queries(lambda: snapshot, time.time(), 4200)
        host.status = Lazy(lambda: status_of(queries))
        host.gpus = Lazy(lambda: queries.gpus()["gpus"])
    else:
        host.status = Lazy(_no_daemon)
    host.users = Lazy(dict)
    return host


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def check_findings(host: Host, check: str) -> list[Finding]:
    return findings_of(CHECKS[check], host)


def finding_of(host: Host, check: str, level: str) -> Finding:
    """The one finding of a check; see `the`."""
    return only_finding(check_findings(host, check), level)


def only_finding(findings: Iterable[Finding], level: str) -> Finding:
    """The one finding, which has this level and, if it is bad, a hint."""
    (finding,) = findings
    assert finding.level == level, finding
    assert level in ("ok", "skipped") or finding.hint, finding
    return finding
