"""The state of the host and of its leases, and everything that is wrong, each problem with its hint.

Both depend on what the processes on the GPUs do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from yunion_mps import reasons
from yunion_mps.addresses import gpu_of, physical_gpu
from yunion_mps.enums import (
    IDLE,
    NOT_SHARED,
    NOTICE,
    PENDING,
    PROBLEM,
    PROBLEM_LEVELS,
    READY,
    SERVER_FAULT,
    TIME_SLICING,
    UNAVAILABLE,
    WARNING,
)
from yunion_mps.leases.request import Candidates
from yunion_mps.models import Condition, Gpu, MissingGpu, Owner
from yunion_mps.reasons import Reason, hint_of
from yunion_mps.service.clients import ClientService
from yunion_mps.service.holdings import (
    ID_LENGTH,
    Holding,
    ProcessUse,
    holdings,
    lease_states,
    reasons_by_gpu,
)
from yunion_mps.service.leases import LeaseService
from yunion_mps.service.queries import Queries
from yunion_mps.users import describe_servers

if TYPE_CHECKING:
    from yunion_mps import answers

_COMMAND_LENGTH = 40


class StatusService:
    def __init__(self, queries: Queries, leases: LeaseService, clients: ClientService) -> None:
        self._queries = queries
        self._leases = leases
        self._clients = clients

    async def status(self) -> answers.Status:
        """The status, with the processes that use the GPUs now; with the last known ones if a call hangs."""
        clients = await self._clients.clients(seen=True)
        return self.of(clients)

    def of(self, clients: answers.ClientList) -> answers.Status:
        gpus, devices = self._queries.gpus()["gpus"], self._queries.all_devices()
        leases, waiting = self._leases.leases(brief=True), self._leases.waiting()
        held = _used(devices, leases, clients)
        service = self._queries.service({address for holding in held for address in holding.devices})
        problems = [
            *_service_problems(service, gpus, self._queries.warnings(), clients),
            *_missing_gpus(self._queries.missing()),
            *_host_problems(self._queries.conditions()),
            *_failing_users(self._queries.candidates()),
            *_device_problems(devices),
            *_whole_gpu_problems(gpus, devices, self._queries.waits_for_leases()),
            *_use_problems(held, clients, self._queries.terminating_gpus()),
            *_waiting_users(waiting),
            *_unleased_use(held, gpus),
            *_lease_problems(leases, devices, service["domains"], gpus),
        ]
        problems.sort(key=lambda problem: PROBLEM_LEVELS.index(problem["level"]))
        outside = sum(client["mps"] is False for client in clients["clients"])
        is_troubled = any(problem["level"] == PROBLEM for problem in problems)
        state = self._queries.state
        return {
            "state": "degraded" if is_troubled and state == "ready" else state,
            "problems": problems,
            **service,
            "leases": {"total": len(leases), "waiting": len(waiting)},
            "clients": len(clients["clients"]) - outside,
            "outside_mps": outside,
            "errors": clients["errors"],
        }

    async def job_problems(self) -> list[answers.StatusProblem] | None:
        """The jobs that exceed their budgets or wait for an MPS server now; None if not all are known."""
        clients = await self._clients.clients(seen=True)
        if clients["errors"]:
            return None
        held = _used(self._queries.all_devices(), self._leases.leases(brief=True), clients)
        problems = _use_problems(held, clients, self._queries.terminating_gpus())
        return [one for one in problems if one["code"] in (reasons.OVER_BUDGET, reasons.CLIENT_WAITING)]

    async def leases(self) -> answers.LeaseList:
        """All leases with their states, and the queued requests."""
        clients = await self._clients.clients(seen=True)
        leases = self._with_states(self._leases.leases(), clients)
        waiting = self._leases.waiting()
        return {"leases": leases, "waiting": waiting, "errors": clients["errors"], "total": len(leases)}

    async def lease(self, name: str, caller: Owner) -> answers.LeaseDetails:
        """The lease of this id or name, with its state; raises NotFoundError.

        A job may be about to start with it, so the driver is asked whether its MIG instances still exist.
        """
        found = self._leases.lease(name, caller)  # an unknown name is refused even if the driver hangs
        await self._leases.follow_destroyed(self._leases.ledger.leases.get(found["id"]))
        clients = await self._clients.clients(seen=True)
        (lease,) = self._with_states([self._leases.lease(name, caller)], clients)
        return lease

    def _with_states(
        self, leases: list[answers.LeaseRecord], clients: answers.ClientList
    ) -> list[answers.LeaseDetails]:
        """The leases with their states and, if their devices are unavailable or pending, the reason.

        If not all clients are known, a lease that seems idle may be in use: its state is None.
        """
        devices = self._queries.all_devices()
        states = lease_states(_used(devices, leases, clients))
        seeming = {IDLE: None} if clients["errors"] else {}
        by_address = {device["addr"]: device for device in devices}
        details: list[answers.LeaseDetails] = []
        for lease in leases:
            state = states[lease["id"]]
            own = [by_address[name] for name in lease["devices"] if name in by_address]
            reason = "; ".join(f"GPU {gpu}: {text}" for gpu, text in reasons_by_gpu(own))
            code = next((device["reason_code"] for device in own if device["reason"]), "")
            details.append(
                {**lease, "state": seeming.get(state, state), "reason": reason, "reason_code": code}
            )
        return details


def _used(
    devices: Iterable[answers.Device],
    leases: Iterable[answers.LeaseRecord],
    clients: answers.ClientList,
) -> list[Holding]:
    """The holdings that are in use; idle devices are skipped first, because there may be thousands."""
    names = {name for lease in leases for name in lease["devices"]}
    for client in clients["clients"]:
        names.update(name.strip() for name in (client["device"] or "").split(","))
    listed = [device for device in devices if device["addr"] in names]
    return [holding for holding in holdings(listed, leases, clients["clients"]) if holding.in_use]


def _service_problems(
    service: answers.ServiceFields,
    gpus: Iterable[answers.Gpu],
    warnings: Iterable[tuple[Reason, Gpu | None]],
    clients: answers.ClientList,
) -> Iterator[answers.StatusProblem]:
    if service["notice"]:
        yield _problem(NOTICE, service["notice_code"], service["notice"])
    for domain in service["domains"]:
        if domain["state"] != READY and domain["reason_code"] != reasons.LIMITS_PENDING:
            text = f"domain {domain['name']} is {domain['state']}: {domain['reason']}"
            hint = hint_of(domain["reason_code"], log_directory=domain["log_directory"])
            yield _problem(PROBLEM, domain["reason_code"], text, hint)
    for gpu in gpus:
        code = gpu["reason_code"]
        hint = hint_of(code, gpu=gpu["parent"] or gpu["uuid"] or gpu["pci_address"])
        if gpu["state"] == UNAVAILABLE and code not in reasons.OF_DOMAINS:
            name = f" ({gpu['name']})" if gpu["name"] else ""
            yield _problem(PROBLEM, code, f"GPU {gpu['addr']}{name}: {gpu['reason']}", hint, gpu=gpu["addr"])
        elif gpu["state"] == PENDING:
            level = PENDING if code in reasons.LAYOUT_WAITS else PROBLEM
            yield _problem(level, code, f"GPU {gpu['addr']}: {gpu['reason']}", hint, gpu=gpu["addr"])
    for warning, its_gpu in warnings:
        yield _problem(WARNING, warning.code, warning, gpu=its_gpu and its_gpu.address)
    for domain in service["domains"]:
        if domain["pending"]:
            text, hint = f"{domain['name']}: {domain['pending']}", _idle_hint(domain, clients)
            yield _problem(PENDING, reasons.LIMITS_PENDING, text, hint)


def _missing_gpus(missing: Iterable[MissingGpu]) -> Iterator[answers.StatusProblem]:
    for entry in missing:
        yield _problem(PROBLEM, entry.reason.code, f"path {entry.path} ({entry.place}): {entry.reason}")


def _host_problems(conditions: Iterable[Condition]) -> Iterator[answers.StatusProblem]:
    for condition in conditions:
        yield _problem(PROBLEM, condition.reason.code, condition.reason, condition.hint)


def _failing_users(candidates: Candidates) -> Iterator[answers.StatusProblem]:
    """Users whose MPS servers do not start, by domain: their problem alone, as long as others' do."""
    for domain, users in candidates.failing_users.items():
        for reason in users.values():
            text = f"domain {domain}: {reason}; its devices are unavailable for this user"
            hint = hint_of(reason.code, log_directory=candidates.domains[domain].log_directory)
            yield _problem(WARNING, reason.code, text, hint)


def _idle_hint(domain: answers.Domain, clients: answers.ClientList) -> str:
    """What ends the servers that a change waits for if none has a client; empty if a job delays it.

    The daemon ends such a server by itself, unless NVML does not list it: before Volta, and in a container
    that does not see the host's PIDs.
    """
    awaited = set(domain["waits_for"])
    named = {client["server"] for client in clients["clients"] if client["mps"] is not False}
    if not awaited or clients["errors"] or named & {*awaited, None}:
        return ""
    if not awaited <= {server["pid"] for server in clients["servers"]}:
        return ""  # a server without its control daemon is not listed
    servers = describe_servers(sorted(awaited))
    return f"wait a moment, or run: yunion-mps reload --drain; the driver lists no job of {servers}"


def _device_problems(devices: Iterable[answers.Device]) -> Iterator[answers.StatusProblem]:
    """Devices that wait for leases of a previous division, or belong to one, by GPU."""
    pending: dict[tuple[str, str], list[str]] = {}
    for device in devices:
        if device["state"] == PENDING:
            pending.setdefault((gpu_of(device["addr"]), device["reason"]), []).append(device["addr"])
    for (gpu, reason), addresses in pending.items():
        number = "1 device" if len(addresses) == 1 else f"{len(addresses)} devices"
        text = f"GPU {gpu}: {number} pending: {reason}"
        yield _problem(PENDING, reasons.LEASES_PENDING, text, gpu=gpu, devices=addresses)


def _whole_gpu_problems(
    gpus: Iterable[answers.Gpu], devices: Iterable[answers.Device], waits: Mapping[str, Reason]
) -> Iterator[answers.StatusProblem]:
    """GPUs that wait for leases (`waits`), unless their devices or their layouts are pending, too."""
    reported = {gpu_of(device["addr"]) for device in devices if device["state"] == PENDING}
    reported |= {gpu["addr"] for gpu in gpus if gpu["state"] == PENDING}
    for gpu in gpus:
        if gpu["addr"] in waits and reported.isdisjoint((gpu["addr"], physical_gpu(gpu["addr"]))):
            text = f"GPU {gpu['addr']}: {waits[gpu['addr']]}"
            yield _problem(PENDING, reasons.LEASES_PENDING, text, gpu=gpu["addr"])


def _use_problems(
    held: Iterable[Holding], clients: answers.ClientList, terminating_gpus: Collection[str]
) -> Iterator[answers.StatusProblem]:
    """MPS servers that failed, clients that wait for another user's, use outside MPS or over budget."""
    for server in clients["servers"]:
        if server["state"] == SERVER_FAULT:
            text = f"MPS server (PID {server['pid']}), domain {server['domain']}: its jobs have failed"
            yield _problem(PROBLEM, reasons.SERVER_FAILED, text, pid=server["pid"])
    for waiting in clients["waiting"]:
        client = _describe_process(
            ProcessUse(waiting["pid"], waiting["user"], waiting["command"], waiting["started"], None)
        )
        whose = f"{waiting['server_user']} (PID {waiting['server']}, domain {waiting['domain']})"
        text = f"{client} is waiting for the MPS server of {whose} to exit"
        if waiting["server_user"] == waiting["user"]:  # it accepts no more clients
            text += ", because a client of another user is next"
        yield _problem(WARNING, reasons.CLIENT_WAITING, text, pid=waiting["pid"])
    for holding in held:
        if holding.outside_mps:
            for process in holding.processes:
                text = f"{_describe_use(process, holding.gpu)} outside MPS, so no budget limits it"
                yield _problem(
                    PROBLEM, reasons.PROCESS_OUTSIDE_MPS, text, gpu=holding.gpu or None, pid=process.pid
                )
        elif holding.over_mib:
            largest = max(holding.processes, key=lambda process: process.memory_mib or 0)
            more = len(holding.processes) - 1
            processes = _describe_process(largest) + (f" and {more} more" if more else "")
            text = f"{holding.named} uses {holding.used_mib} of {holding.budget_mib} MiB: {processes}"
            if holding.lease and holding.gpu in terminating_gpus:
                text += "; if this lasts, the newest process will be terminated"
            yield _problem(
                PROBLEM,
                reasons.OVER_BUDGET,
                text,
                gpu=holding.gpu,
                devices=holding.devices,
                pid=largest.pid,
            )


def _waiting_users(waiting: Iterable[answers.QueuedRequest]) -> Iterator[answers.StatusProblem]:
    """Requests that wait for control daemons to serve their user."""
    for request in waiting:
        if request["reason_code"] == reasons.OTHER_USER:
            text = f"the request of {request['user']} waits: {request['reason']}"
            yield _problem(WARNING, reasons.OTHER_USER, text, pid=request["pid"])


def _unleased_use(held: Iterable[Holding], gpus: Iterable[answers.Gpu]) -> Iterator[answers.StatusProblem]:
    """Processes without a device on GPUs and MIG instances that are shared without MPS.

    On GPUs that are shared through MPS, such processes have the control daemon's default limits.
    """
    without_mps = {gpu["addr"] for gpu in gpus if gpu["sharing"] in (TIME_SLICING, NOT_SHARED)}
    for holding in held:
        if holding.devices or holding.gpu not in without_mps:
            continue
        for process in holding.processes:
            text = f"{_describe_use(process, holding.gpu)} without a lease, so no budget covers its memory"
            yield _problem(WARNING, reasons.PROCESS_WITHOUT_LEASE, text, gpu=holding.gpu, pid=process.pid)


def _lease_problems(
    leases: Iterable[answers.LeaseRecord],
    devices: Iterable[answers.Device],
    domains: Iterable[answers.Domain],
    gpus: Iterable[answers.Gpu],
) -> Iterator[answers.StatusProblem]:
    """Leases whose device or control daemon is gone, as after a reload.

    Without a control daemon, CUDA runs without MPS and without limits. Leases on a lost GPU do not count: no
    process starts there, and when the GPU returns, its control daemon uses the same directory.
    """
    directories = {domain["pipe_directory"] for domain in domains}
    lost = {gpu["addr"] for gpu in gpus if gpu["state"] == UNAVAILABLE}
    missing = {
        device["addr"]: (device["reason"], device["reason_code"])
        for device in devices
        if device["reason_code"] in _DEVICE_IS_GONE
    }
    for lease in leases:
        name = lease["id"][:ID_LENGTH]
        whose = f"lease {name} of {lease['user']} ({', '.join(lease['devices'])})"
        if address := next((one for one in lease["devices"] if one in missing), ""):
            why, code = missing[address]
            hint = hint_of(code, gpu=physical_gpu(address), lease=name)
            yield _problem(PROBLEM, code, f"{whose}: {why}", hint, devices=lease["devices"])
            continue
        directory = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        if directory not in {"", *directories} and lost.isdisjoint(lease["gpus"]):
            text = f"{whose}: its control daemon is gone; processes started with this lease have no limits"
            hint = hint_of(reasons.LEASE_OUTDATED, lease=name)
            yield _problem(PROBLEM, reasons.LEASE_OUTDATED, text, hint, devices=lease["devices"])


_DEVICE_IS_GONE = (reasons.MIG_INSTANCE_GONE, reasons.MIG_FOREIGN_INSTANCE, reasons.LEASE_OUTDATED)


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


def _describe_use(process: ProcessUse, gpu: str) -> str:
    """Return for example `PID 4260 of alice (python train.py) uses GPU 00:06.0 (700 MiB)`."""
    memory = f" ({process.memory_mib} MiB)" if process.memory_mib is not None else ""
    return f"{_describe_process(process)} uses GPU {gpu}{memory}"
