"""What is wrong on the host, the worst first, each with its remedy. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps import __version__
from yunion_mps.overview import count
from yunion_mps.overview.holdings import Holding, ProcessUse

if TYPE_CHECKING:
    from yunion_mps.answers import ClientList, Gpu, LeaseRecord, Status


NOTICE, PROBLEM, WARNING, PENDING = "Notice", "Problem", "Warning", "Pending"

_EVENTS = "see what happened: yunion-mps events --since 1h"
_LOOK_CLOSER = "look closer: yunion-mps doctor"
_END_IT = "ask its owner, or end it: yunion-mps clients terminate PID"
_PENDING_REMEDY = "see who: yunion-mps clients; wait for them: yunion-mps reload --drain"
WAITING_REMEDY = "wait for the other user's jobs, or serve all users at once: cuda_mps_multiuser: true"
#: What makes the daemon the version that is installed.
REEXEC = "yunion-mps daemon-reexec"
_FORMER_REMEDY = "it takes effect by itself; see whose leases they are: yunion-mps who"
_MOVED_REMEDY = "end it, and run its job with a new one: yunion-mps lease release LEASE"
_COMMAND_LENGTH = 40
#: So much of a lease's id tells it from the others.
_ID_LENGTH = 8
#: By the state of a domain that does not serve.
_DOMAIN = {
    "stopped": "it starts by itself, else: yunion-mps reload",
    "starting": f"wait a moment; {_EVENTS}",
    "applying": f"wait a moment; {_EVENTS}",
    "backoff": f"it is started again by itself; {_EVENTS}",
    "failed": "correct that; it is tried again every minute, or at once by: yunion-mps reload",
    "wedged": "see whose jobs wait for it: yunion-mps clients; ended, they let it be started again",
    "stopping": "it waits for its jobs: yunion-mps clients; end one: yunion-mps clients terminate PID",
}
#: By words of the daemon's warnings, which have no reason codes yet; a test holds that each warning has one.
_WARNINGS = (
    ("budgets are not enforced", "nothing enforces them on such a GPU; see who uses more: yunion-mps who"),
    ("its compute mode is", "set it: yunion-mps reload; keep it as it is: cuda_mps_compute_mode: keep"),
    ("multiuser", "install a newer nvidia-cuda-mps-control, or set cuda_mps_multiuser: false"),
    ("goes on without it", "correct that line, then: yunion-mps reload"),
    ("metrics", "make its directory one that root can write, or name another; it is tried again by itself"),
    ("containers find", "make it a directory that root can write; it is tried again by itself"),
    ("containers get", "generate it again: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"),
    ("cannot be looked at", "raise the limit: systemctl show yunion-mps-daemon | grep -E 'Limit|Tasks'"),
    ("events are", "make room where the state file is: df -h /var/lib/yunion-mps"),
)


class Finding(NamedTuple):
    """Something that is wrong, or must be known; `number` of the same sort if they were folded."""

    kind: str
    what: str
    remedy: str
    number: int = 1


def other_version(status: Status) -> str:
    """What to say if another version runs than is installed, as after an upgrade that it refused."""
    if status["version"] == __version__:
        return ""
    return f"{status['version']} of the daemon runs, and {__version__} is installed"


def of_status(status: Status, gpus: Iterable[Gpu]) -> Iterator[Finding]:
    """What the daemon says of itself, its domains and its GPUs."""
    if status["notice"]:
        yield Finding(NOTICE, status["notice"], _notice_remedy(status))
    for domain in status["domains"]:
        if domain["state"] != "ready" and domain["reason"] != domain["pending"]:
            what = f"domain {domain['name']} is {domain['state']}: {domain['reason']}"
            yield Finding(PROBLEM, what, _DOMAIN.get(domain["state"], _LOOK_CLOSER))
    for gpu in gpus:
        if gpu["state"] == "unavailable" and not gpu["reason"].startswith("its domain is"):
            name = f" ({gpu['name']})" if gpu["name"] else ""
            yield Finding(PROBLEM, f"GPU {gpu['addr']}{name}: {gpu['reason']}", _gpu_remedy(gpu))
    if other_version(status):
        yield Finding(WARNING, other_version(status), f"run that one, which ends no job: {REEXEC}")
    for warning in status["warnings"]:
        remedy = next((remedy for mark, remedy in _WARNINGS if mark in warning), _LOOK_CLOSER)
        yield Finding(WARNING, warning, remedy)
    for domain in status["domains"]:
        if domain["pending"]:
            what = f"{domain['name']}: {domain['pending']}"
            yield Finding(PENDING, what, _PENDING_REMEDY)


def of_uses(holdings: Iterable[Holding], clients: ClientList) -> Iterator[Finding]:
    """What is wrong with the use of the GPUs.

    MPS servers that have failed, clients that wait for another user's, use past MPS or over budget, and
    devices that wait for leases of a former division.
    """
    pending: Counter[tuple[str, str]] = Counter()
    for server in clients["servers"]:
        if server["state"] == "FAULT":
            what = f"MPS server (PID {server['pid']}), domain {server['domain']}: its jobs have failed"
            yield Finding(PROBLEM, what, "it serves again once they have ended: yunion-mps clients")
    for one in clients["waiting"]:
        who = _named(ProcessUse(one["pid"], one["user"], one["command"], one["started"], None))
        whose = f"the MPS server (PID {one['server']}) of {one['server_user']}"
        yield Finding(WARNING, f"{who} waits for {whose}, domain {one['domain']}", WAITING_REMEDY)
    for holding in holdings:
        if holding.past_mps:
            for process in holding.processes:
                has = f" with {process.memory_mib} MiB" if process.memory_mib is not None else ""
                what = f"past MPS on GPU {holding.gpu}{has}, where no budget holds: {_named(process)}"
                yield Finding(PROBLEM, what, _END_IT)
        elif holding.over_mib:
            most = max(holding.processes, key=lambda process: process.memory_mib or 0)
            more = len(holding.processes) - 1
            processes = _named(most) + (f" and {more} more" if more else "")
            what = f"{holding.named} has {holding.used_mib} of {holding.budget_mib} MiB: {processes}"
            yield Finding(PROBLEM, what, _END_IT)
        if holding.pending:
            pending[holding.gpu, holding.pending] += len(holding.devices)
    for (gpu, why), number in pending.items():
        yield Finding(PENDING, f"GPU {gpu}: {count(number, 'device')} pending: {why}", _FORMER_REMEDY)


def of_leases(leases: Iterable[LeaseRecord], status: Status, gpus: Iterable[Gpu]) -> Iterator[Finding]:
    """Leases whose environment names a control daemon that is gone, as after a reload.

    If CUDA finds none it goes on without one, and without limits. On a GPU that is lost nothing starts, and
    when it is back its control daemon has its place again.
    """
    places = {domain["pipe_directory"] for domain in status["domains"]}
    lost = {gpu["addr"] for gpu in gpus if gpu["state"] == "unavailable"}
    for lease in leases:
        place = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        if place not in {"", *places} and lost.isdisjoint(lease["gpus"]):
            whose = f"lease {lease['id'][:_ID_LENGTH]} of {lease['user']} ({', '.join(lease['devices'])})"
            what = f"{whose}: the control daemon that it was given with is gone; what starts has no limits"
            yield Finding(PROBLEM, what, _MOVED_REMEDY)


def everything(
    status: Status,
    gpus: Sequence[Gpu],
    leases: Iterable[LeaseRecord],
    held: Iterable[Holding],
    clients: ClientList,
) -> list[Finding]:
    """All that is wrong, the worst first."""
    found = [*of_status(status, gpus), *of_uses(held, clients), *of_leases(leases, status, gpus)]
    return sorted(found, key=lambda one: (NOTICE, PROBLEM, WARNING, PENDING).index(one.kind))


def folded(findings: Sequence[Finding], most: int = 3) -> list[Finding]:
    """The same, but of those with the same remedy at most so many, and how many more there are."""
    counts = Counter((one.kind, one.remedy) for one in findings)
    shown: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        alike = shown.setdefault((one.kind, one.remedy), [])
        if len(alike) < most:
            alike.append(one)
        elif len(alike) == most:
            more = counts[one.kind, one.remedy] - most
            what = f"and {more} more like that (all: yunion-mps status -o json)"
            alike.append(one._replace(what=what, number=more))
    return [one for alike in shown.values() for one in alike]


def with_remedies(findings: Sequence[Finding]) -> Iterator[tuple[Finding, str]]:
    """Each finding with its remedy, which is empty if the next one has the same."""
    for one, after in zip_longest(findings, findings[1:]):
        yield one, "" if after and after.remedy == one.remedy else one.remedy


def _named(process: ProcessUse) -> str:
    """`PID 4260 of alice (python train.py)`."""
    command = process.shown.strip()
    short = command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 3]}..."
    return f"PID {process.pid} of {process.user or 'an unknown user'}" + (f" ({short})" if short else "")


def _notice_remedy(status: Status) -> str:
    if status["state"] == "disabled":
        return "to offer them: set enable_cuda_mps: true there, then: yunion-mps reload"
    return "see each GPU's reason: yunion-mps gpus; then: yunion-mps reload"


def _gpu_remedy(gpu: Gpu) -> str:
    if gpu["mig_enabled"]:
        return f"turn it off: nvidia-smi -i {gpu['uuid']} -mig 0; then: yunion-mps reload"
    if "does not serve it" in gpu["reason"]:
        return "wait for its jobs, or see whose they are: yunion-mps clients"
    return "when it is repaired or reset: yunion-mps reload; " + _LOOK_CLOSER
