"""Everything that is wrong on the host, worst first, each with its hint. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from yunion_mps import reasons
from yunion_mps.enums import NOTICE, PENDING, PROBLEM, PROBLEM_LEVELS, SERVER_FAULT, UNAVAILABLE, WARNING
from yunion_mps.models import Gpu
from yunion_mps.mps.states import APPLYING, BACKOFF, FAILED, READY, STARTING, STOPPED, STOPPING
from yunion_mps.reasons import Reason, hint_of
from yunion_mps.service.holdings import ID_LENGTH, Holding, ProcessUse, gpu_of

if TYPE_CHECKING:
    from yunion_mps import answers

_COMMAND_LENGTH = 40
_EVENTS = "see what happened: yunion-mps events --since 1h"
#: Hints by state, for domains that are not ready: the state says more than the reason.
_DOMAIN_HINTS = {
    STOPPED: "wait for it to start, or start it: yunion-mps reload",
    STARTING: f"wait a moment; {_EVENTS}",
    APPLYING: f"wait a moment; {_EVENTS}",
    BACKOFF: f"wait for the automatic restart; {_EVENTS}",
    FAILED: "correct the cause; it is retried every minute, or at once with: yunion-mps reload",
    STOPPING: "list the jobs it waits for: yunion-mps who --clients; end one: yunion-mps terminate PID",
}


def of_service(
    service: answers.ServiceFields,
    gpus: Iterable[answers.Gpu],
    warnings: Iterable[tuple[Reason, Gpu | None]],
) -> Iterator[answers.StatusProblem]:
    if service["notice"]:
        yield _problem(NOTICE, service["notice_code"], service["notice"])
    for domain in service["domains"]:
        if domain["state"] != READY and domain["reason_code"] != reasons.LIMITS_PENDING:
            text = f"domain {domain['name']} is {domain['state']}: {domain['reason']}"
            yield _problem(PROBLEM, domain["reason_code"], text, _DOMAIN_HINTS.get(domain["state"], ""))
    for gpu in gpus:
        if gpu["state"] == UNAVAILABLE and gpu["reason_code"] != reasons.DOMAIN_NOT_READY:
            code = gpu["reason_code"]
            name = f" ({gpu['name']})" if gpu["name"] else ""
            hint = hint_of(code, gpu=gpu["uuid"] or gpu["pci_address"])
            yield _problem(PROBLEM, code, f"GPU {gpu['addr']}{name}: {gpu['reason']}", hint, gpu=gpu["addr"])
    for warning, its_gpu in warnings:
        yield _problem(WARNING, warning.code, warning, gpu=its_gpu and its_gpu.address)
    for domain in service["domains"]:
        if domain["pending"]:
            yield _problem(PENDING, reasons.LIMITS_PENDING, f"{domain['name']}: {domain['pending']}")


def of_devices(devices: Iterable[answers.Device]) -> Iterator[answers.StatusProblem]:
    """Devices that wait for leases of a former division, or belong to one, by GPU."""
    pending: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        if device["state"] == PENDING:
            pending.setdefault((gpu_of(device["addr"]), device["reason"]), []).append(device["addr"])
    for (gpu, reason), addresses in pending.items():
        number = "1 device" if len(addresses) == 1 else f"{len(addresses)} devices"
        text = f"GPU {gpu}: {number} pending: {reason}"
        yield _problem(PENDING, reasons.LEASES_PENDING, text, gpu=gpu, devices=addresses)


def of_uses(holdings: Iterable[Holding], clients: answers.ClientList) -> Iterator[answers.StatusProblem]:
    """MPS servers that failed, clients that wait for another user's, use outside MPS or over budget."""
    for server in clients["servers"]:
        if server["state"] == SERVER_FAULT:
            text = f"MPS server (PID {server['pid']}), domain {server['domain']}: its jobs have failed"
            yield _problem(PROBLEM, reasons.SERVER_FAILED, text, pid=server["pid"])
    for waiting in clients["waiting"]:
        client = _describe_process(
            ProcessUse(waiting["pid"], waiting["user"], waiting["command"], waiting["started"], None)
        )
        whose = f"the MPS server (PID {waiting['server']}) of {waiting['server_user']}"
        text = f"{client} waits for {whose}, domain {waiting['domain']}"
        yield _problem(WARNING, reasons.CLIENT_WAITING, text, pid=waiting["pid"])
    for holding in holdings:
        if holding.outside_mps:
            for process in holding.processes:
                memory = f" ({process.memory_mib} MiB)" if process.memory_mib is not None else ""
                text = f"{_describe_process(process)} uses GPU {holding.gpu}{memory} without MPS"
                text += ", so no budget limits it"
                yield _problem(
                    PROBLEM, reasons.PROCESS_OUTSIDE_MPS, text, gpu=holding.gpu or None, pid=process.pid
                )
        elif holding.over_mib:
            largest = max(holding.processes, key=lambda process: process.memory_mib or 0)
            more = len(holding.processes) - 1
            processes = _describe_process(largest) + (f" and {more} more" if more else "")
            text = f"{holding.named} uses {holding.used_mib} of {holding.budget_mib} MiB: {processes}"
            yield _problem(
                PROBLEM,
                reasons.OVER_BUDGET,
                text,
                gpu=holding.gpu,
                devices=holding.devices,
                pid=largest.pid,
            )


def of_leases(
    leases: Iterable[answers.LeaseRecord],
    domains: Iterable[answers.Domain],
    gpus: Iterable[answers.Gpu],
) -> Iterator[answers.StatusProblem]:
    """Leases whose environment names a control daemon that is gone, as after a reload.

    Without a control daemon, CUDA runs without MPS and without limits. Leases on a lost GPU do not count: no
    process starts there, and when the GPU returns, its control daemon uses the same directory.
    """
    directories = {domain["pipe_directory"] for domain in domains}
    lost = {gpu["addr"] for gpu in gpus if gpu["state"] == UNAVAILABLE}
    for lease in leases:
        directory = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        if directory not in {"", *directories} and lost.isdisjoint(lease["gpus"]):
            name = lease["id"][:ID_LENGTH]
            whose = f"lease {name} of {lease['user']} ({', '.join(lease['devices'])})"
            text = f"{whose}: its control daemon is gone; processes started with it have no limits"
            hint = hint_of(reasons.LEASE_OUTDATED, lease=name)
            yield _problem(PROBLEM, reasons.LEASE_OUTDATED, text, hint, devices=lease["devices"])


def by_severity(problems: Iterable[answers.StatusProblem]) -> list[answers.StatusProblem]:
    return sorted(problems, key=lambda problem: PROBLEM_LEVELS.index(problem["level"]))


def _problem(
    level: str,
    code: str,
    text: str,
    hint: str = "",
    *,
    gpu: str | None = None,
    devices: Sequence[str] = (),
    pid: int | None = None,
) -> answers.StatusProblem:
    return {
        "level": level,
        "code": code,
        "text": text,
        "hint": hint or hint_of(code, pid=pid),
        "gpu": gpu,
        "devices": list(devices),
        "pid": pid,
    }


def _describe_process(process: ProcessUse) -> str:
    """Return for example `PID 4260 of alice (python train.py)`."""
    command = process.shown.strip()
    short = command if len(command) <= _COMMAND_LENGTH else f"{command[: _COMMAND_LENGTH - 3]}..."
    return f"PID {process.pid} of {process.user or 'an unknown user'}" + (f" ({short})" if short else "")
