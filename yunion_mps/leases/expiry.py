"""When a lease taken by name expires: its time to live after the last renewal, across restarts of the daemon.

Times are of the monotonic clock, which cannot be set, and stops while the host is suspended, when no holder
could renew. Pure: nothing here waits.
"""

from __future__ import annotations

from yunion_mps.models import Lease

#: How long a holder has to renew its lease after the daemon could not be reached.
RENEWAL_GRACE_S = 10.0


def renewed(lease: Lease, now_s: float) -> Lease:
    """The lease with its full time to live from now; unchanged if it was not taken by name."""
    if lease.holder.binding != "name":
        return lease
    return lease._replace(ends_s=now_s + lease.holder.ttl_s, is_extended=False)


def restored(lease: Lease, now_s: float) -> Lease:
    """The lease after a start of the daemon: with the time that it had left.

    A lease that expired while no daemon could be reached, or is about to, is extended by `RENEWAL_GRACE_S` so
    that its holder can renew it; only once until then, so that frequent restarts keep no dead job's lease.
    """
    if lease.ends_s is None:  # held by a process, or written by a version that did not store it
        return renewed(lease, now_s)
    soonest_s = now_s + min(lease.holder.ttl_s, RENEWAL_GRACE_S)
    if lease.ends_s < soonest_s and not lease.is_extended:
        return lease._replace(ends_s=soonest_s, is_extended=True)
    return lease._replace(ends_s=min(lease.ends_s, now_s + lease.holder.ttl_s))  # after a boot, a slow clock
