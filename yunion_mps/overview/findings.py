"""Findings: everything that is wrong on the host, worst first, each with its hint. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import __version__, reasons
from yunion_mps.enums import SERVER_FAULT
from yunion_mps.overview import count
from yunion_mps.overview.holdings import ID_LENGTH, Holding, ProcessUse, gpu_of
from yunion_mps.reasons import hint_of

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Device, Gpu, LeaseRecord, Status


NOTICE, PROBLEM, WARNING, PENDING = "Notice", "Problem", "Warning", "Pending"

#: The command that switches the daemon to the installed version.
REEXEC = "yunion-mps daemon-reexec"
_COMMAND_LENGTH = 40
_EVENTS = "see what happened: yunion-mps events --since 1h"
#: Hints by the state of a domain that is not ready: the state is more specific than its reason.
_DOMAIN_HINTS = {
    "stopped": "wait for it to start, or start it: yunion-mps reload",
    "starting": f"wait a moment; {_EVENTS}",
    "applying": f"wait a moment; {_EVENTS}",
    "backoff": f"wait for the automatic restart; {_EVENTS}",
    "failed": "correct the cause; it is retried every minute, or at once with: yunion-mps reload",
    "stopping": "list the jobs it waits for: yunion-mps who --clients; end one: yunion-mps terminate PID",
}


class HostFinding(NamedTuple):
    """Something wrong or worth knowing; `number` counts the findings that are folded into it."""

    kind: str
    code: str
    what: str
    hint: str
    number: int = 1


def _finding(
    kind: str, code: str, what: str, *, gpu: str = "GPU", pid: int | None = None, lease: str = "LEASE"
) -> HostFinding:
    return HostFinding(kind, code, what, hint_of(code, gpu=gpu, pid=pid, lease=lease))


def version_mismatch(status: Status) -> str:
    """How the running version differs from the installed one, as after a refused upgrade; or empty."""
    if status["version"] == __version__:
        return ""
    return f"the daemon runs version {status['version']}, but {__version__} is installed"


def of_status(status: Status, gpus: Iterable[Gpu]) -> Iterator[HostFinding]:
    """Findings about the daemon, its domains and its GPUs."""
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
    """The devices of each GPU that wait for leases of a former division, or belong to one."""
    pending = Counter((gpu_of(one["addr"]), one["reason"]) for one in devices if one["state"] == "pending")
    for (gpu, why), number in pending.items():
        what = f"GPU {gpu}: {count(number, 'device')} pending: {why}"
        yield _finding(PENDING, reasons.LEASES_PENDING, what)


def of_uses(holdings: Iterable[Holding], clients: ClientList) -> Iterator[HostFinding]:
    """Findings about the use of the GPUs.

    MPS servers that have failed, clients that wait for another user's, and use outside MPS or over budget.
    """
    for server in clients["servers"]:
        if server["state"] == SERVER_FAULT:
            what = f"MPS server (PID {server['pid']}), domain {server['domain']}: its jobs have failed"
            yield _finding(PROBLEM, reasons.SERVER_FAILED, what)
    for one in clients["waiting"]:
        who = _named(ProcessUse(one["pid"], one["user"], one["command"], one["started"], None))
        whose = f"the MPS server (PID {one['server']}) of {one['server_user']}"
        what = f"{who} waits for {whose}, domain {one['domain']}"
        yield _finding(WARNING, reasons.CLIENT_WAITING, what)
    for holding in holdings:
        if holding.outside_mps:
            for process in holding.processes:
                has = f" ({process.memory_mib} MiB)" if process.memory_mib is not None else ""
                what = f"{_named(process)} uses GPU {holding.gpu}{has} without MPS, so no budget limits it"
                yield _finding(PROBLEM, reasons.PROCESS_OUTSIDE_MPS, what, pid=process.pid)
        elif holding.over_mib:
            most = max(holding.processes, key=lambda process: process.memory_mib or 0)
            more = len(holding.processes) - 1
            processes = _named(most) + (f" and {more} more" if more else "")
            what = f"{holding.named} uses {holding.used_mib} of {holding.budget_mib} MiB: {processes}"
            yield _finding(PROBLEM, reasons.OVER_BUDGET, what, pid=most.pid)


def of_leases(leases: Iterable[LeaseRecord], status: Status, gpus: Iterable[Gpu]) -> Iterator[HostFinding]:
    """Leases whose environment names a control daemon that is gone, as after a reload.

    If CUDA finds no control daemon it runs without one, and without limits. Nothing starts on a lost GPU, and
    when the GPU returns, its control daemon uses the same directory again.
    """
    places = {domain["pipe_directory"] for domain in status["domains"]}
    lost = {gpu["addr"] for gpu in gpus if gpu["state"] == "unavailable"}
    for lease in leases:
        place = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        if place not in {"", *places} and lost.isdisjoint(lease["gpus"]):
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
    """The findings by their kind, notices and problems before warnings."""
    return sorted(findings, key=lambda one: (NOTICE, PROBLEM, WARNING, PENDING).index(one.kind))


def folded(findings: Sequence[HostFinding], most: int = 3) -> list[HostFinding]:
    """At most `most` findings of each kind that are alike, and one more that counts the rest.

    They are alike by their code, because their hints may name different processes or GPUs.
    """
    counts = Counter((one.kind, one.code or one.hint) for one in findings)
    shown: dict[tuple[str, str], list[HostFinding]] = {}
    for one in findings:
        alike = shown.setdefault((one.kind, one.code or one.hint), [])
        if len(alike) < most:
            alike.append(one)
        elif len(alike) == most:
            more = counts[one.kind, one.code or one.hint] - most
            what = f"and {more} more of the same kind (all: yunion-mps status -o json)"
            hint = one.hint if one.hint == alike[-1].hint else hint_of(one.code)
            alike.append(one._replace(what=what, hint=hint, number=more))
    return [one for alike in shown.values() for one in alike]


def with_hints(findings: Sequence[HostFinding]) -> Iterator[tuple[HostFinding, str]]:
    """Each finding with its hint, which is empty if the next one has the same."""
    for one, after in zip_longest(findings, findings[1:]):
        yield one, "" if after and after.hint == one.hint else one.hint


def _named(process: ProcessUse) -> str:
    """`PID 4260 of alice (python train.py)`."""
    command = process.shown.strip()
    short = command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 3]}..."
    return f"PID {process.pid} of {process.user or 'an unknown user'}" + (f" ({short})" if short else "")
