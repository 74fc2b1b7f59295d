"""Which user each control daemon serves: MPS serves one user at a time, except in multiuser mode. Pure.

A control daemon serves a user who has a lease on its devices, or jobs on its MPS server. A job of anybody
else would wait without a word until these have ended, and delay the next jobs of the first user as well
(measured with releases 535 and 550). So its devices are granted only to that user.

Source: nvidia-cuda-mps-control(1), section "DESCRIPTION"; NVIDIA: Multi-Process Service, section
"Provisioning Sequence", Server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from yunion_mps.core.models import DomainPlan, Lease, ServedUser
from yunion_mps.core.reasons import OTHER_USER, Reason
from yunion_mps.core.units import rfc3339
from yunion_mps.host.proc import user_name


def served_users(
    leases: Iterable[Lease], jobs: Mapping[str, Sequence[ServedUser]], domains: Mapping[str, DomainPlan]
) -> dict[str, list[ServedUser]]:
    """Return the users whom each control daemon serves, by domain name, those with leases first.

    A user is listed with the first of their leases. Domains that serve nobody, or all users at once, are
    left out. A lease whose user is not known, such as a pod's, counts once its jobs have begun.

    jobs: the users with jobs on the MPS servers of each domain.
    """
    served: dict[str, list[ServedUser]] = {}
    with_lease: set[tuple[str, int]] = set()
    for lease in leases:
        domain = lease.devices[0].domain
        uid = lease.holder.user_uid
        if domain and uid is not None and (domain, uid) not in with_lease:
            with_lease.add((domain, uid))
            served.setdefault(domain, []).append(ServedUser(uid, lease.since_s, lease))
    for domain, users in jobs.items():
        served.setdefault(domain, []).extend(users)
    return {name: users for name, users in served.items() if name in domains and not domains[name].multiuser}


def why_not_served(users: Iterable[ServedUser], uid: int) -> Reason | None:
    """Return why a control daemon that serves these users does not serve this one now; None if it does."""
    for other in users:
        if other.uid != uid and other.is_next:
            text = f"its control daemon serves one user at a time, next {user_name(other.uid)}, for whose"
            text += f" client the MPS server (PID {other.server}) ends once its own have ended"
            return Reason(text, OTHER_USER)
        if other.uid != uid:
            text = f"its control daemon serves one user at a time, now {user_name(other.uid)}"
            since = f"{rfc3339(other.since_s)[:19]}Z"  # to the second
            return Reason(f"{text} ({other.because_of}, since {since})", OTHER_USER)
    return None


def next_for(uid: int) -> Reason:
    """Return the reason for users whose request is later than one of this user."""
    text = f"its control daemon serves one user at a time, next {user_name(uid)}, whose request is earlier"
    return Reason(text, OTHER_USER)
