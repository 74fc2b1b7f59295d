"""The conditions that depend on leases, and on what processes do now; pure.

With those of the snapshot they are the one list of what is wrong or pending on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from yunion_mps.core import reasons
from yunion_mps.core.addresses import gpu_of, physical_gpu
from yunion_mps.core.conditions import Condition, with_known_causes
from yunion_mps.core.enums import (
    ABOUT_DIVISION,
    ABOUT_DOMAIN,
    ABOUT_GPU,
    ABOUT_LEASE,
    ABOUT_MIG_LAYOUT,
    ABOUT_PROCESS,
    ABOUT_REQUEST,
    ABOUT_SERVER,
    ABOUT_WAY_OF_SHARING,
    BROKEN,
    IMPAIRED,
    NOT_SHARED,
    PENDING,
    SERVER_FAULT,
    TIME_SLICING,
    UNAVAILABLE,
)
from yunion_mps.core.models import Gpu, Snapshot
from yunion_mps.core.reasons import Reason, hint_of
from yunion_mps.core.text import count
from yunion_mps.core.waits import describe_servers, users_awaited
from yunion_mps.observe.holdings import ID_LENGTH, Holding, ProcessUse, start_order
from yunion_mps.supervisor.host_conditions import gpu_name

if TYPE_CHECKING:
    from yunion_mps import answers

_COMMAND_LENGTH = 40
_DEVICE_IS_GONE = (reasons.MIG_INSTANCE_GONE, reasons.MIG_FOREIGN_INSTANCE, reasons.LEASE_OUTDATED)


class Activity(NamedTuple):
    """What leases and processes do now, as the API answers it."""

    #: The holdings that are in use.
    held: Sequence[Holding]
    clients: answers.ClientListJson
    leases: Sequence[answers.LeaseRecordJson] = ()
    waiting: Sequence[answers.QueuedRequestJson] = ()
    #: The GPUs (addresses) where `over_budget: terminate` applies.
    terminating_gpus: Collection[str] = ()


# -- with leases


def conditions_with_leases(
    snapshot: Snapshot, devices: Iterable[answers.DeviceJson], serving: Collection[str]
) -> tuple[Condition, ...]:
    """Return the snapshot's conditions as they are with the leases, and the devices that wait for leases.

    `devices` are all devices, and `serving` has the UUIDs of the GPUs that serve some, themselves or by an
    instance.
    """
    gpus = {gpu.address: gpu for gpu in snapshot.inventory.gpus}
    gpu_kinds = (ABOUT_GPU, ABOUT_MIG_LAYOUT)
    of_gpus = [condition for condition in snapshot.conditions if condition.kind in gpu_kinds]
    divisions = [_unless_of_layout(division, of_gpus) for division in _pending_devices(devices)]
    causes = {division.gpu: division.follows_from or division.identifier for division in divisions}
    for condition in of_gpus:
        gpu = gpus[condition.subject]
        if not gpu.reason and gpu.uuid in serving:
            causes.setdefault(condition.subject, condition.identifier)
    conditions = []
    changes = []
    for condition in snapshot.conditions:
        if condition.kind == ABOUT_WAY_OF_SHARING:
            changes.append(_unless_reported(condition, causes))
        elif is_pending_setting(condition):
            changes.append(unless_awaited(condition, divisions))
        elif condition.kind == ABOUT_MIG_LAYOUT and gpus[condition.subject].uuid not in serving:
            conditions.append(_serves_nothing(condition, gpus[condition.subject]))
        else:
            conditions.append(condition)
    return with_known_causes([*conditions, *divisions, *changes])


def _serves_nothing(condition: Condition, gpu: Gpu) -> Condition:
    """Return the condition of a pending layout on a GPU without a device that can be used meanwhile."""
    return condition._replace(status=BROKEN, name=gpu_name(gpu))


def _unless_of_layout(division: Condition, of_gpus: Iterable[Condition]) -> Condition:
    """Mark the condition of devices as one that follows from a layout if that waits for the same leases."""
    for condition in of_gpus:
        is_of_gpu = condition.kind == ABOUT_MIG_LAYOUT and condition.gpu == physical_gpu(division.gpu)
        if is_of_gpu and division.waits_for and condition.waits_for.includes(division.waits_for):
            return division._replace(follows_from=condition.identifier)
    return division


def _unless_reported(condition: Condition, causes: Mapping[str, str]) -> Condition:
    """Mark the condition of a GPU that waits as one that follows from its devices' or its layout's, if any.

    causes: the identifiers of these, by the address of the GPU or instance
    """
    cause = causes.get(condition.subject) or causes.get(physical_gpu(condition.subject), "")
    return condition._replace(follows_from=cause) if cause else condition


def is_pending_setting(condition: Condition) -> bool:
    """Return whether it is about a setting of a GPU that waits for what uses the GPU."""
    return condition.reason.code in reasons.SETTING_WAITS


def unless_awaited(condition: Condition, divisions: Iterable[Condition]) -> Condition:
    """Mark the condition of a setting as one that follows from devices that wait for the same leases."""
    for division in divisions:
        is_same_gpu = physical_gpu(division.gpu) == condition.gpu
        if is_same_gpu and division.waits_for == condition.waits_for and not condition.follows_from:
            return condition._replace(follows_from=division.follows_from or division.identifier)
    return condition


def _pending_devices(devices: Iterable[answers.DeviceJson]) -> Iterator[Condition]:
    """Yield the devices that wait for leases of a previous division, or belong to one, by GPU."""
    pending: dict[tuple[str, str], list[answers.DeviceJson]] = {}
    for device in devices:
        if device["state"] == PENDING:
            pending.setdefault((gpu_of(device["addr"]), device["reason"]), []).append(device)
    for (gpu, reason), some in pending.items():
        addresses = tuple(device["addr"] for device in some)
        yield condition_of_wait(gpu, reason, len(some))._replace(devices=addresses)


def condition_of_wait(gpu: str, reason: str, number: int) -> Condition:
    """Return the condition of `number` devices of a GPU (address) that are pending for this reason."""
    return Condition(
        kind=ABOUT_DIVISION,
        subject=gpu,
        status=PENDING,
        reason=Reason(reason, reasons.LEASES_PENDING),
        waits_for=users_awaited(reason),
        name=f"GPU {gpu}: {count(number, 'device')} pending",
        gpu=gpu,
    )


# -- with processes


def conditions_with_activity(
    conditions: Iterable[Condition],
    activity: Activity,
    service: answers.ServiceFieldsJson,
    gpus: Sequence[answers.GpuJson],
    devices: Iterable[answers.DeviceJson],
) -> list[Condition]:
    """Return the conditions, with those that follow from what leases and processes do now."""
    domains = {domain["name"]: domain for domain in service["domains"]}
    current = []
    for condition in conditions:
        if condition.kind == ABOUT_DOMAIN and condition.status == PENDING:
            advice = _idle_hint(domains[condition.subject], activity.clients)
            current.append(condition._replace(advice=advice))
        else:
            current.append(condition)
    return [
        *current,
        *conditions_of_use(activity),
        *_waiting_users(activity.waiting),
        *_unleased_use(activity.held, gpus),
        *_lease_conditions(activity.leases, devices, service["domains"], gpus),
    ]


def _idle_hint(domain: answers.DomainJson, clients: answers.ClientListJson) -> str:
    """Return what ends the servers that a change waits for if none has a client; empty if a job delays it.

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


def conditions_of_use(activity: Activity) -> Iterator[Condition]:
    """Yield MPS servers that failed, clients that wait for another user's, use outside MPS or over budget."""
    for server in activity.clients["servers"]:
        if server["state"] == SERVER_FAULT:
            yield _failed_server(server)
    for waiting in activity.clients["waiting"]:
        yield _waiting_client(waiting)
    for holding in activity.held:
        if holding.outside_mps:
            for process in holding.processes:
                text = f"{_describe_use(process, holding.gpu)} outside MPS, so no budget limits it"
                yield _of_process(process.pid, text, reasons.PROCESS_OUTSIDE_MPS, BROKEN, holding.gpu)
        elif holding.over_mib:
            yield _over_budget(holding, activity.terminating_gpus)


def _of_process(pid: int | None, text: str, code: str, status: str, gpu: str = "") -> Condition:
    subject = str(pid or "")
    return Condition(ABOUT_PROCESS, subject, status, Reason(text, code), gpu=gpu, pid=pid)


def _failed_server(server: answers.MpsServerJson) -> Condition:
    pid = server["pid"]
    text = f"MPS server (PID {pid}), domain {server['domain']}: its jobs have failed"
    return Condition(ABOUT_SERVER, str(pid), BROKEN, Reason(text, reasons.SERVER_FAILED), pid=pid)


def _waiting_client(waiting: answers.WaitingClientJson) -> Condition:
    process = ProcessUse(waiting["pid"], waiting["user"], waiting["command"], waiting["started"], None)
    client = _describe_process(process)
    whose = f"{waiting['server_user']} (PID {waiting['server']}, domain {waiting['domain']})"
    text = f"{client} is waiting for the MPS server of {whose} to exit"
    if waiting["server_user"] == waiting["user"]:  # it accepts no more clients
        text += ", because a client of another user is next"
    return _of_process(waiting["pid"], text, reasons.CLIENT_WAITING, IMPAIRED)


def _over_budget(holding: Holding, terminating_gpus: Collection[str]) -> Condition:
    largest = max(holding.processes, key=lambda process: process.memory_mib or 0)
    more = len(holding.processes) - 1
    processes = _describe_process(largest)
    if more:
        processes += f" and {more} more"
    text = f"{holding.named} uses {holding.used_mib} of {holding.budget_mib} MiB: {processes}"
    if holding.lease and holding.gpu in terminating_gpus:
        newest = max(holding.processes, key=lambda process: start_order(process.started, process.pid))
        victim = "the newest process"
        if more and newest.pid:
            victim = f"PID {newest.pid}, the newest process,"
        text += f"; if this lasts, {victim} will be terminated"
    condition = _of_process(largest.pid, text, reasons.OVER_BUDGET, BROKEN, holding.gpu)
    return condition._replace(devices=holding.devices)


def _waiting_users(waiting: Iterable[answers.QueuedRequestJson]) -> Iterator[Condition]:
    """Yield the requests that wait for control daemons to serve their user."""
    for request in waiting:
        if request["reason_code"] == reasons.OTHER_USER:
            reason = Reason(
                f"the request of {request['user']} waits: {request['reason']}", reasons.OTHER_USER
            )
            yield Condition(ABOUT_REQUEST, request["user"], IMPAIRED, reason, pid=request["pid"])


def _unleased_use(held: Iterable[Holding], gpus: Iterable[answers.GpuJson]) -> Iterator[Condition]:
    """Yield the processes without a device on GPUs and MIG instances that are shared without MPS.

    On GPUs that are shared through MPS, such processes have the control daemon's default limits.
    """
    without_mps = {gpu["addr"] for gpu in gpus if gpu["sharing"] in (TIME_SLICING, NOT_SHARED)}
    for holding in held:
        if holding.devices or holding.gpu not in without_mps:
            continue
        for process in holding.processes:
            text = f"{_describe_use(process, holding.gpu)} without a lease, so no budget covers its memory"
            yield _of_process(process.pid, text, reasons.PROCESS_WITHOUT_LEASE, IMPAIRED, holding.gpu)


def _lease_conditions(
    leases: Iterable[answers.LeaseRecordJson],
    devices: Iterable[answers.DeviceJson],
    domains: Iterable[answers.DomainJson],
    gpus: Iterable[answers.GpuJson],
) -> Iterator[Condition]:
    """Yield the leases whose device or control daemon is gone, as after a reload.

    Without a control daemon, CUDA runs without MPS and without limits. Leases on a lost GPU do not count: no
    process starts there, and when the GPU returns, its control daemon uses the same directory.
    """
    directories = {domain["pipe_directory"] for domain in domains}
    lost = {gpu["addr"] for gpu in gpus if gpu["state"] == UNAVAILABLE}
    missing = _devices_that_are_gone(devices)
    for lease in leases:
        address = next((name for name in lease["devices"] if name in missing), "")
        directory = lease["environment"].get("CUDA_MPS_PIPE_DIRECTORY", "")
        if address:
            reason = missing[address]
        elif directory not in {"", *directories} and lost.isdisjoint(lease["gpus"]):
            text = "its control daemon is gone; processes started with this lease have no limits"
            reason = Reason(text, reasons.LEASE_OUTDATED)
        else:
            continue
        name = lease["id"][:ID_LENGTH]
        yield Condition(
            kind=ABOUT_LEASE,
            subject=lease["id"],
            status=BROKEN,
            reason=reason,
            advice=hint_of(reason.code, gpu=physical_gpu(address), lease=name),
            name=f"lease {name} of {lease['user']} ({', '.join(lease['devices'])})",
            devices=tuple(lease["devices"]),
        )


def _devices_that_are_gone(devices: Iterable[answers.DeviceJson]) -> Mapping[str, Reason]:
    reasons_by_address = {}
    for device in devices:
        if device["reason_code"] in _DEVICE_IS_GONE:
            reasons_by_address[device["addr"]] = Reason(device["reason"], device["reason_code"])
    return reasons_by_address


def _describe_process(process: ProcessUse) -> str:
    """Return for example `PID 4260 of alice (python train.py)`."""
    command = process.shown.strip()
    if len(command) > _COMMAND_LENGTH:
        command = f"{command[: _COMMAND_LENGTH - 3]}..."
    text = f"PID {process.pid} of {process.user or 'an unknown user'}"
    return f"{text} ({command})" if command else text


def _describe_use(process: ProcessUse, gpu: str) -> str:
    """Return for example `PID 4260 of alice (python train.py) uses GPU 00:06.0 (700 MiB)`."""
    memory = f" ({process.memory_mib} MiB)" if process.memory_mib is not None else ""
    return f"{_describe_process(process)} uses GPU {gpu}{memory}"
