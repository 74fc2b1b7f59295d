"""Nobody gets devices twice: not for one name, and not for one request whose answer was lost."""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.errors import HostError
from yunion_mps.models import Holder, Lease


def given_before(leases: Iterable[Lease], holder: Holder, idempotency_key: str) -> Lease | None:
    """The lease that this very request of this holder was answered with; None where there is none."""
    if not idempotency_key:
        return None
    return next(
        (one for one in leases if (one.idempotency_key, one.holder) == (idempotency_key, holder)), None
    )


def refuse_a_second(leases: Iterable[Lease], holder: Holder, idempotency_key: str) -> None:
    """Raise HostError where the holder's owner has a lease already for the name, or for the request."""
    for lease in leases:
        if lease.holder.owner != holder.owner:
            continue
        if holder.name and lease.holder.name == holder.name:
            what = f"{holder.name} has a lease already: {lease.id}"
            raise HostError(what, "go on with that one (yunion-mps lease renew), or release it")
        if idempotency_key and lease.idempotency_key == idempotency_key:
            what = f"this request has a lease already: {lease.id}"
            raise HostError(what, "make a new request for another")
