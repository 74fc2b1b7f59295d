"""Convert the arguments of the clients' methods to what the API takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from yunion_mps.client.acquire import RequestMembers
from yunion_mps.errors import YunionError
from yunion_mps.http.operations import MAX_WAIT_S
from yunion_mps.http.parameters import LATEST_S
from yunion_mps.reasons import INVALID_REQUEST
from yunion_mps.units import mebibytes, rfc3339

#: The default time to live of a named lease, in s.
TTL_S = 60


class LeaseArguments(NamedTuple):
    """The members of a request except `wait_s`, and the time to live of a named lease."""

    members: RequestMembers
    wait_s: int
    ttl_s: int | None


def lease_request(
    *,
    memory: str | None,
    count: int,
    across: bool,
    devices: Sequence[str],
    gpu: str | None,
    placement: str,
    allow_unlimited: bool,
    wait_s: float,
    name: str | None,
    ttl_s: int | None,
) -> LeaseArguments:
    """The request for these arguments, without the API's defaults; raises YunionError."""
    if ttl_s is not None and name is None:
        raise _invalid("ttl_s: only a lease with a name has a time to live", "add a name, or omit ttl_s")
    if isinstance(devices, str):
        raise _invalid(
            f"devices: {devices!r} is not a list of devices", "write a list, such as ['00:06.0-1']"
        )
    if name is not None and ttl_s is None:
        ttl_s = TTL_S
    members = {
        "memory_mib": None if memory is None else _memory(memory),
        "count": count if count != 1 else None,
        "across": across or None,
        "devices": list(devices) or None,
        "gpu": gpu,
        "placement": placement if placement != "binpack" else None,
        "allow_unlimited": allow_unlimited or None,
        "holder": None if name is None else {"name": name, "ttl_s": ttl_s},
    }
    arguments = {member: value for member, value in members.items() if value is not None}
    return LeaseArguments(arguments, whole_seconds(wait_s), ttl_s)


def _memory(amount: str) -> int:
    mib = mebibytes(amount) if isinstance(amount, str) else None
    if not mib:
        raise _invalid(
            f"memory: {amount!r} is not an amount of memory", "write a number of MiB or GiB, such as '6GiB'"
        )
    return mib


def whole_seconds(wait_s: float) -> int:
    """The time to wait in whole seconds, rounded up and at most the API's; raises YunionError."""
    if not isinstance(wait_s, (int, float)) or math.isnan(wait_s):
        raise _invalid(f"wait_s: {wait_s!r} is not a number", "write seconds, or math.inf")
    if wait_s < 0:
        raise _invalid(f"wait_s: {wait_s!r} is negative", "write seconds, or math.inf")
    return MAX_WAIT_S if wait_s >= MAX_WAIT_S else math.ceil(wait_s)


def format_since(since: datetime | timedelta | None) -> str | None:
    """The start time of a query for events, as the API takes it; raises YunionError."""
    if since is None:
        return None
    moment = datetime.now(timezone.utc) - since if isinstance(since, timedelta) else since
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        hint = "write datetime.now(timezone.utc), or a timedelta that is subtracted from now"
        raise _invalid(f"since: {since!r} is not a time with a time zone", hint)
    return rfc3339(min(max(0.0, moment.timestamp()), LATEST_S))


def _invalid(message: str, hint: str) -> YunionError:
    return YunionError(message, hint, INVALID_REQUEST)
