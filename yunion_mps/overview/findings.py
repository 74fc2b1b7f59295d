"""Everything that is wrong on the host, worst first, each with its hint. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import __version__, reasons
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.overview.holdings import ID_LENGTH, Holding, ProcessUse, gpu_of
from yunion_mps.reasons import hint_of
from yunion_mps.units import count

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, Gpu, LeaseRecord, Status


NOTICE, PROBLEM, WARNING, PENDING = "Notice", "Problem", "Warning", "Pending"

#: The command that makes the daemon execute the installed version.
REEXEC = "yunion-mps daemon-reexec"
_COMMAND_LENGTH = 40
_EVENTS = "see what happened: yunion-mps events --since 1h"
#: Hints by state, for domains that are not ready: the state says more than the reason.
_DOMAIN_HINTS = {
    "stopped": "wait for it to start, or start it: yunion-mps reload",
    "starting": f"wait a moment; {_EVENTS}",
    "applying": f"wait a moment; {_EVENTS}",
    "backoff": f"wait for the automatic restart; {_EVENTS}",
    "failed": "correct the cause; it is retried every minute, or at once with: yunion-mps reload",
    "stopping": "list the jobs it waits for: yunion-mps who --clients; end one: yunion-mps terminate PID",
}


class HostFinding(NamedTuple):
    """Something wrong or worth knowing; `number` counts the findings that it stands for."""

    kind: str
    code: str
    what: str
    hint: str
    number: int = 1

    @property
    def json(self) -> dict[str, str]:
        """The finding for programs, in the words of `doctor -o json`."""
        return {"level": self.kind.lower(), "code": self.code, "what": self.what, "hint": self.hint}


def _finding(
    kind: str, code: str, what: str, *, gpu: str = "GPU", pid: int | None = None, lease: str = "LEASE"
) -> HostFinding:
    return HostFinding(kind, code, what, hint_of(code, gpu=gpu, pid=pid, lease=lease))


def version_mismatch(status: Status) -> str:
    """Return how the running version differs from the installed one, as after a refused upgrade; or ""."""
    if status["version"] == __version__:
        return ""
    return f"the daemon runs version {status['version']}, but {__version__} is installed"


def of_status(status: Status, gpus: Iterable[Gpu]) -> Iterator[HostFinding]:
    if status["notice"]:
        yield _finding(NOTICE, status["notice_code"], status["notice"])
    for domain in status["domains"]:
        if domain["state"] != "ready" and domain["reason_code"] != reasons.LIMITS_PENDING:
            what = f"domain {domain['name']} is {domain['state']}: {domain['reason']}"
            code = domain["reason_code"]
            yield HostFinding(PROBLEM, code, what, _DOMAIN_HINTS.get(domain["state"]) or hint_of(code))
    for gpu in gpus:
        if gpu["state"] == "unavailable" and gpu["reason_code"] != reasons.DOMAIN_NOT_READY:
            name = f" ({gpu['name']})" if gpu["name"] else ""
            what = f"GPU {gpu['addr']}{name}: {gpu['reason']}"
            yield _finding(PROBLEM, gpu["reason_code"], what, gpu=gpu["uuid"] or gpu["pci_address"])
    if version_mismatch(status):
        yield _finding(WARNING, reasons.VERSION_DIFFERS, version_mismatch(status))
    for warning in status["warnings"]:
        yield HostFinding(WARNING, warning["code"], warning["text"], warning["hint"])
    for domain in status["domains"]:
        if domain["pending"]:
            yield _finding(PENDING, reasons.LIMITS_PENDING, f"{domain['name']}: {domain['pending']}")


def of_devices(devices: Iterable[Device]) -> Iterator[HostFinding]:
    """Findings about devices that wait for leases of a former division, or belong to one, by GPU."""
    pending = Counter((gpu_of(d["addr"]), d["reason"]) for d in devices if d["state"] == "pending")
    for (gpu, reason), number in pending.items():
        what = f"GPU {gpu}: {count(number, 'device')} pending: {reason}"
        yield _finding(PENDING, reasons.LEASES_PENDING, what)


def of_uses(holdings: Iterable[Holding], clients: ClientList) -> Iterator[HostFinding]:
    """Findings about the use of the GPUs.

    MPS servers that failed, clients that wait for another user's, use outside MPS or over budget.
    """
    for server in clients["servers"]:
        if server["state"] == SERVER_FAULT:
            what = f"MPS server (PID {server['pid']}), domain {server['domain']}: its jobs have failed"
            yield _finding(PROBLEM, reasons.SERVER_FAILED, what)
    for waiting in clients["waiting"]:
        client = _describe_process(
            ProcessUse(waiting["pid"], waiting["user"], waiting["command"], waiting["started"], None)
        )
        whose = f"the MPS server (PID {waiting['server']}) of {waiting['server_user']}"
        what = f"{client} waits for {whose}, domain {waiting['domain']}"
        yield _finding(WARNING, reasons.CLIENT_WAITING, what)
    for holding in holdings:
        if holding.outside_mps:
            for process in holding.processes:
                memory = f" ({process.memory_mib} MiB)" if process.memory_mib is not None else ""
                what = f"{_describe_process(process)} uses GPU {holding.gpu}{memory} without MPS"
                what += ", so no budget limits it"
                yield _finding(PROBLEM, reasons.PROCESS_OUTSIDE_MPS, what, pid=process.pid)
        elif holding.over_mib:
            largest = max(holding.processes, key=lambda process: process.memory_mib or 0)
            more = len(holding.processes) - 1
            processes = _describe_process(largest) + (f" and {more} more" if more else "")
            what = f"{holding.named} uses {holding.used_mib} of {holding.budget_mib} MiB: {processes}"
            yield _finding(PROBLEM, reasons.OVER_BUDGET, what, pid=largest.pid)


def of_leases(leases: Iterable[LeaseRecord], status: Status, gpus: Iterable[Gpu]) -> Iterator[HostFinding]:
    """Findings about leases whose environment names a control daemon that is gone, as after a reload.

    Without a control daemon, CUDA runs without MPS and without limits. Leases on a lost GPU do not count: no
    process starts there, and when the GPU returns, its control daemon uses the same directory.
    """
    directories = {domain["pipe_directory"] for domain in status["domains"]}
    lost = {gpu["addr"] for gpu in gpus if gpu["state"] == "unavailable"}
    for lease in leases:
        directory = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        if directory not in {"", *directories} and lost.isdisjoint(lease["gpus"]):
            whose = f"lease {lease['id'][:ID_LENGTH]} of {lease['user']} ({', '.join(lease['devices'])})"
            what = f"{whose}: its control daemon is gone; processes started with it have no limits"
            yield _finding(PROBLEM, reasons.LEASE_OUTDATED, what, lease=lease["id"][:ID_LENGTH])


def all_findings(
    status: Status,
    gpus: Sequence[Gpu],
    devices: Iterable[Device],
    leases: Iterable[LeaseRecord],
    held: Iterable[Holding],
    clients: ClientList,
) -> list[HostFinding]:
    """All findings, worst first."""
    found = [*of_status(status, gpus), *of_devices(devices), *of_uses(held, clients)]
    return by_severity([*found, *of_leases(leases, status, gpus)])


def by_severity(findings: Iterable[HostFinding]) -> list[HostFinding]:
    return sorted(findings, key=lambda finding: (NOTICE, PROBLEM, WARNING, PENDING).index(finding.kind))


def folded(findings: Sequence[HostFinding], limit: int = 3) -> list[HostFinding]:
    """Keep at most `limit` similar findings of each kind, and add one that counts the rest.

    Findings with the same code are similar, because their hints may name different processes or GPUs.
    """
    counts = Counter((finding.kind, finding.code or finding.hint) for finding in findings)
    shown: dict[tuple[str, str], list[HostFinding]] = {}
    for finding in findings:
        alike = shown.setdefault((finding.kind, finding.code or finding.hint), [])
        if len(alike) < limit:
            alike.append(finding)
        elif len(alike) == limit:
            more = counts[finding.kind, finding.code or finding.hint] - limit
            what = f"and {more} more of the same kind (all: yunion-mps status -o json)"
            hint = finding.hint if finding.hint == alike[-1].hint else hint_of(finding.code)
            alike.append(finding._replace(what=what, hint=hint, number=more))
    return [finding for alike in shown.values() for finding in alike]


def with_hints(findings: Sequence[HostFinding]) -> Iterator[tuple[HostFinding, str]]:
    """Yield each finding with its hint, or "" if the next finding has the same hint."""
    for finding, after in zip_longest(findings, findings[1:]):
        yield finding, "" if after and after.hint == finding.hint else finding.hint


def _describe_process(process: ProcessUse) -> str:
    """Return for example `PID 4260 of alice (python train.py)`."""
    command = process.shown.strip()
    short = command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 3]}..."
    return f"PID {process.pid} of {process.user or 'an unknown user'}" + (f" ({short})" if short else "")
