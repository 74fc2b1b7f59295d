"""How many leases an owner may have, and for how long without renewal: what host.conf allows."""

from __future__ import annotations

from collections.abc import Iterable

from yunion_mps.errors import HostError, NotAllowedError
from yunion_mps.leases.names import owner_name
from yunion_mps.models import Holder, Owner


def refuse_over_quota(
    holder: Holder, owners: Iterable[Owner], max_leases: int | None, max_ttl_s: int
) -> None:
    """Raise YunionError if the holder may not have one more lease, or not one with such a time to live.

    `owners` has the owner of each lease and of each queued request, because a queued request is not refused
    later. Root is not limited, because its container engine takes leases for all users.
    """
    if holder.ttl_s > max_ttl_s:
        what = f"a time to live of {holder.ttl_s:.0f} s is longer than max_lease_ttl_s allows ({max_ttl_s} s)"
        raise HostError(what, "ask for less, and renew the lease: yunion-mps lease renew")
    if max_leases is None or holder.uid == 0:
        return
    number = sum(owner == holder.owner for owner in owners)
    if number >= max_leases:
        owner = owner_name(holder.owner)
        what = f"{owner}: {number} leases and queued requests, and max_leases_per_user is {max_leases}"
        raise NotAllowedError(what, "release one: yunion-mps lease release LEASE; list them: yunion-mps who")
