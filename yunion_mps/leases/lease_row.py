"""A lease's row in the state file: its text as JSON, by name, and what of it can be read again.

A newer version may have written it, or it may be damaged; the lease then keeps its devices as far as they
are known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from yunion_mps.core.enums import BINDINGS, SHARING
from yunion_mps.core.models import Device, Holder, Lease
from yunion_mps.leases.request import request_by_name

_NUMBER = (int, float)
_NONE = type(None)
#: The types of what a row says of a lease, its holder and its devices. Members that are not listed are of
#: a newer version, and ignored.
_LEASE_TYPES: Mapping[str, tuple[type, ...]] = {
    "devices": (list,),
    "holder": (dict,),
    "since_s": _NUMBER,
    "environment": (dict,),
    "idempotency_key": (str,),
    "cdi": (bool,),
    "ends_s": (*_NUMBER, _NONE),
    "is_extended": (bool,),
    "request": (str,),
    "requested_s": _NUMBER,
    "boot": (str,),
    "expires_s": (*_NUMBER, _NONE),
}
_HOLDER_TYPES: Mapping[str, tuple[type, ...]] = {
    "binding": (str,),
    "uid": (int,),
    "pid": (int, _NONE),
    "started": (int, _NONE),
    "name": (str,),
    "ttl_s": _NUMBER,
    "unit": (str,),
    "command": (str,),
    "job_uid": (int, _NONE),
    "is_attested": (bool,),
}
_DEVICE_TYPES: Mapping[str, tuple[type, ...]] = {
    "id": (str,),
    "addr": (str,),
    "gpu_uuid": (str,),
    "slot": (int,),
    "memory_limit_mib": (int, _NONE),
    "memory_total_mib": (int, _NONE),
    "thread_percentage": _NUMBER,
    "budget_enforced": (bool,),
    "domain": (str,),
    "priority": (str,),
    "reserve_mib": (int,),
    "sharing": (str,),
}
#: The largest PID and user id that Linux has.
_MAX_PID = 4_194_304
_MAX_UID = 2**32 - 2
#: The possible values of numbers; of all others, those that SQLite and the kernel can have.
_ANY_NUMBER = (-(2**62), 2**62)
_RANGES: Mapping[str, tuple[float, float]] = {
    "pid": (1, _MAX_PID),
    "uid": (0, _MAX_UID),
    "job_uid": (0, _MAX_UID),
    "started": (0, 2**62),
    "slot": (0, 2**31),
    "memory_limit_mib": (0, 2**31),
    "memory_total_mib": (0, 2**31),
    "reserve_mib": (0, 2**31),
    "thread_percentage": (0, 100),
}
#: What a device has instead of values that cannot be read: as much of its GPU as there may be.
_UNKNOWN_BUDGET: Mapping[str, Any] = {
    "slot": 0,
    "memory_limit_mib": None,
    "memory_total_mib": None,
    "thread_percentage": 100.0,
    "budget_enforced": False,
    "domain": "",
}
#: What a lease is bound to if it ends with a process of its boot.
_PROCESS_BINDINGS = tuple(binding for binding in BINDINGS if binding != "name")
#: How much of a lease's id is in the name of a holder that cannot be read.
_ID_LENGTH = 8


class LeaseRow(NamedTuple):
    """What a row says."""

    #: None if the lease has ended with its boot, or its devices are not known.
    lease: Lease | None
    #: What of the row cannot be read; empty if nothing. The holder of such a lease may still run, so the
    #: lease keeps its devices.
    problem: str = ""


def lease_text(lease: Lease, boot_id: str, ahead_s: float) -> str:
    """Return the text of a lease's row, which has the name of each value.

    boot_id: the kernel's id of this boot.
    ahead_s: the wall clock minus the monotonic one, in s.
    """
    holder = lease.holder._asdict()
    if lease.holder.job_uid is None:
        del holder["job_uid"]  # earlier versions do not know it
    if not lease.holder.is_attested:
        del holder["is_attested"]
    members = lease._asdict()
    members["devices"] = [device._asdict() for device in lease.devices]
    members["holder"] = holder
    members["boot"] = boot_id
    if lease.ends_s is not None:
        members["expires_s"] = lease.ends_s + ahead_s
    return json.dumps(members, separators=(",", ":"))


def read_lease_row(lease_id: str, text: str, boot_id: str | None, ahead_s: float) -> LeaseRow:
    """Return the lease of a row, as far as it can be read; the parameters are those of `lease_text`.

    boot_id: None if processes of every boot count
    """
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return LeaseRow(None, _describe(["JSON"]))
    members, problems = _valid_members(value, _LEASE_TYPES)
    holder, holder_problems = _valid_members(members.get("holder", {}), _HOLDER_TYPES)
    is_of_this_boot = boot_id is None or members.get("boot", boot_id) == boot_id
    has_process = holder.get("binding") in _PROCESS_BINDINGS
    if has_process and not is_of_this_boot:
        return LeaseRow(None)
    devices, device_problems = _read_devices(members.get("devices", []))
    problems += device_problems
    if devices is None:
        return LeaseRow(None, _describe(problems))
    problems += holder_problems
    problems += _unusable_members(members, holder)
    if not devices:
        return LeaseRow(None, _describe([*problems, "devices"]))
    if problems:
        lease = Lease(
            id=lease_id,
            devices=devices,
            holder=_known_process(lease_id, holder) if has_process else _unknown_holder(lease_id, holder),
            since_s=members.get("since_s", 0.0),
        )
        return LeaseRow(lease, _describe(problems))
    if not is_of_this_boot:
        _carry_over(members, holder, ahead_s)
    for name in ("boot", "expires_s", "devices", "holder"):
        members.pop(name, None)
    members["request"] = request_by_name(members.get("request", ""))
    return LeaseRow(Lease(lease_id, devices, Holder(**holder), **members))


def _describe(problems: Iterable[str]) -> str:
    return f"invalid or missing: {', '.join(dict.fromkeys(problems))}"


def _valid_members(value: Any, types: Mapping[str, tuple[type, ...]]) -> tuple[dict[str, Any], list[str]]:
    """Return the members that have their types, and the names of those that have not.

    A wrong type would crash the daemon later, after every restart.
    """
    if not isinstance(value, dict):
        return {}, ["JSON object"]
    valid: dict[str, Any] = {}
    invalid: list[str] = []
    for name, member_types in types.items():
        if name not in value:
            continue
        if _is_valid(name, value[name], member_types):
            valid[name] = value[name]
        else:
            invalid.append(name)
    return valid, invalid


def _is_valid(name: str, member: Any, types: tuple[type, ...]) -> bool:
    """Return whether the member has one of its types and a possible value; in Python, a bool is an int."""
    if isinstance(member, bool):
        return bool in types
    if not isinstance(member, types):
        return False
    if isinstance(member, (int, float)):
        lowest, highest = _RANGES.get(name, _ANY_NUMBER)
        return lowest <= member <= highest
    return True


def _missing(names: Iterable[str], members: Collection[str]) -> list[str]:
    return [name for name in names if name not in members]


def _unusable_members(members: Mapping[str, Any], holder: Mapping[str, Any]) -> list[str]:
    """Return which members of a lease and its holder are missing, or have a value of a newer version."""
    problems = _missing(("boot", "since_s", "holder", "devices"), members)
    problems += _missing(("binding", "uid"), holder)
    if holder.get("binding") not in (None, *BINDINGS):
        problems.append(f"binding ({holder['binding']})")
    environment = members.get("environment", {})
    if not all(isinstance(variable, str) for variable in environment.values()):
        problems.append("environment")
    return problems


def _read_devices(values: Iterable[Any]) -> tuple[tuple[Device, ...] | None, list[str]]:
    """Return the devices, None if one of them cannot be identified, and what of them cannot be read."""
    devices: list[Device] = []
    problems: list[str] = []
    for value in values:
        device, device_problems = _read_device(value)
        problems += device_problems
        if device is None:
            return None, problems
        devices.append(device)
    return tuple(devices), problems


def _read_device(value: Any) -> tuple[Device | None, list[str]]:
    """Return the device, None if it cannot be identified, and what of it cannot be read."""
    members, problems = _valid_members(value, _DEVICE_TYPES)
    if members.get("sharing", SHARING[0]) not in SHARING:
        problems.append(f"sharing ({members.pop('sharing')})")
    unknown = _missing(("id", "addr", "gpu_uuid"), members)
    problems += unknown
    problems += _missing(_UNKNOWN_BUDGET, members)
    if unknown:
        return None, problems
    return Device(**{**_UNKNOWN_BUDGET, **members}), problems


def _carry_over(members: dict[str, Any], holder: dict[str, Any], ahead_s: float) -> None:
    """Change what was only valid in an earlier boot: PIDs, which are reused, and monotonic times."""
    holder["pid"] = None
    holder["started"] = None
    expires_s = members.get("expires_s")
    if expires_s is not None:
        members["ends_s"] = expires_s - ahead_s


def _known_process(lease_id: str, holder: Mapping[str, Any]) -> Holder:
    """Return the holder of which at least the process can be read, so that the lease ends with it."""
    pid = holder.get("pid")
    started = holder.get("started")
    if pid is None or started is None:
        return _unknown_holder(lease_id, holder)
    return Holder("process", holder.get("uid", 0), pid, started)


def _unknown_holder(lease_id: str, holder: Mapping[str, Any]) -> Holder:
    """Return the holder of a lease that only a release by its user or root ends: its end is not known."""
    return Holder("name", holder.get("uid", 0), name=f"unreadable-{lease_id[:_ID_LENGTH]}")
