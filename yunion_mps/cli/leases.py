"""Leases for people: as a table, in detail, and their changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from yunion_mps.cli.devices import described, environment_text
from yunion_mps.cli.output import Column, age, age_of, cell, date_and_time, mib, notes, table, wrapped
from yunion_mps.cli.who import waiting_text
from yunion_mps.service.holdings import ID_LENGTH, folded_addresses, holder_of, in_container
from yunion_mps.units import seconds

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseList, LeaseRecord

#: Fields of a lease in CSV.
FIELDS = (
    "id", "name", "state", "reason", "binding", "devices", "gpus", "memory_mib", "thread_percentage", "user",
    "pid", "command", "container", "since", "expires", "budget_enforced", "cdi", "memory_peak_mib",
    "sm_utilization",
)  # fmt: skip
_COLUMNS = (
    Column("LEASE", lambda record: record["id"][:ID_LENGTH]),
    Column("DEVICES", "devices", short=lambda record: folded_addresses(record["devices"])),
    Column("MEMORY", lambda record: mib(sum(record["memory_mib"])), numeric=True, drop=1),
    Column("SM %", "thread_percentage", numeric=True, wide=True, drop=3),
    Column("ENFORCED", "budget_enforced", wide=True, drop=7),
    Column("HOLDER", lambda record: holder_of(record)),
    Column("STATE", "state"),
    Column("AGE", lambda record: age_of(record["since"]), drop=2),
    Column("EXPIRES", lambda record: _expires(record["expires"]), drop=4),
    Column("ENDS WITH", "binding", wide=True, drop=6),
    Column("LEASE ID", "id", wide=True, drop=5),
    Column("CDI DEVICE", "cdi", wide=True, drop=8),
    Column("PEAK", lambda record: mib(_sum(record["memory_peak_mib"])), numeric=True, wide=True, drop=9),
    Column("UTIL %", lambda record: _most(record["sm_utilization"]), numeric=True, wide=True, drop=10),
    Column(
        "COMMAND",
        lambda record: in_container(record["container"], record["command"] or ""),
        least=8,
        wide=True,
    ),
)


def leases_text(answer: LeaseList, *, wide: bool) -> str:
    """Format a table of leases, why some are unavailable or pending, queued requests, and errors."""
    text = table(_COLUMNS, answer["leases"], none="No leases.", wide=wide)
    text += "".join(
        dict.fromkeys(wrapped(record["reason"]) for record in answer["leases"] if record["reason"])
    )
    return text + waiting_text(answer["waiting"]) + notes(("Incomplete", error) for error in answer["errors"])


def lease_text(lease: LeaseRecord, state: str = "") -> str:
    enforced = "" if lease["budget_enforced"] else " (not enforced: a GPU is older than Volta)"
    ends = {
        "process": f"with its process (PID {lease['pid']})",
        "connection": f"with its connection (PID {lease['pid']})",
        "container": f"with its container ({lease['container'] or lease['pid']})",
    }
    until = lease["expires"]
    expires = until and f"at {date_and_time(until)} ({_expires(until)}), unless renewed"
    peak_mib = _sum(lease["memory_peak_mib"])
    command = in_container(lease["container"], lease["command"] or "")
    lines = {
        "Lease": lease["id"],
        "Holder": holder_of(lease),
        **({"Command": command} if command else {}),
        "Devices": ", ".join(lease["devices"]),
        **({"State": state} if state else {}),
        "Budget": f"{sum(lease['memory_mib'])} MiB, {cell(lease['thread_percentage'])} % of the SM threads"
        + enforced,
        **({"Peak memory": mib(peak_mib)} if peak_mib else {}),
        "Since": f"{date_and_time(lease['since'])} ({age_of(lease['since'])} ago)",
        "Ends": expires or ends.get(lease["binding"]),
        "CDI device": lease["cdi"],
    }
    return described(lines) + environment_text(lease["environment"])


def in_words(lease: LeaseRecord, done: str) -> str:
    """Begin a sentence about a lease: `Lease 7c1f0e7a (job-17) renewed`."""
    return f"Lease {lease['id'][:ID_LENGTH]}" + (f" ({lease['name']})" if lease["name"] else "") + f" {done}"


def _sum(mib_by_device: Sequence[int | None]) -> int | None:
    known = [number for number in mib_by_device if number is not None]
    return sum(known) if known else None


def _most(percent_by_device: Sequence[int | None]) -> int | None:
    return max((percent for percent in percent_by_device if percent is not None), default=None)


def _expires(expires: str | None) -> str | None:
    """Return for example `in 50m` until the lease expires; None if it does not expire.

    Rounded to minutes, so that a new lease of an hour expires in 1h, not in 59m.
    """
    if expires is None:
        return None
    left_s = seconds(expires) - time.time()
    return f"in {age(left_s + 30 if left_s >= 60 else left_s)}"
