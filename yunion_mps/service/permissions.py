"""Who may take a lease for a process, and change a lease; what it takes is read from the kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from yunion_mps.containers.lookup import Containers
from yunion_mps.core.errors import NotAllowedError, NotFoundError
from yunion_mps.core.models import Holder, Lease, Owner
from yunion_mps.host.control_groups import ControlGroup
from yunion_mps.host.proc import is_in_inner_pid_namespace, job_unit_of, started_ticks
from yunion_mps.host.process_info import uid_of
from yunion_mps.leases.request import find_lease, owner_name


class Caller(NamedTuple):
    """Who sends a request, as the kernel says."""

    uid: int
    pid: int
    #: The systemd unit of its job, empty if it is in none; None if the process has ended.
    unit: str | None

    @property
    def owner(self) -> Owner:
        """The owner of the leases that it takes.

        Raises NotAllowedError if its unit is unknown; root needs none.
        """
        if self.unit is None and self.uid != 0:
            message = "the process that opened this connection has ended, so its unit is unknown"
            raise NotAllowedError(message, "reconnect")
        return Owner(self.uid, self.unit or "")


def is_privileged(uid: int) -> bool:
    """Return whether the user is root, or the daemon's own."""
    return uid in (0, os.geteuid())


def refuse_unprivileged(uid: int, action: str) -> None:
    """Raise NotAllowedError unless the user is root, or the daemon's own."""
    if not is_privileged(uid):
        raise NotAllowedError(f"only root may {action}", "retry as root")


def process_holder(caller: Caller, binding: str, pid: int) -> Holder:
    """Return the holder for a process of the caller's user, or for any process if the caller is root.

    `binding` is `process` or `container`. A process's lease belongs to the process's owner, a container's
    lease to the engine that requests it, because a user of a container, even if mapped by a user namespace,
    is not a user of the host. Raises NotFoundError if there is no such process, and NotAllowedError if it is
    another user's or in another systemd unit.
    """
    hint = "a process in another PID namespace cannot be seen from here: use holder.name and holder.ttl_s"
    if pid != caller.pid and is_in_inner_pid_namespace(caller.pid):
        raise NotFoundError(f"PID {pid} belongs to the caller's PID namespace, not the daemon's", hint)
    started = started_ticks(pid) if pid else None
    uid = uid_of(pid) if pid else None
    if started is None or uid is None:
        raise NotFoundError(f"there is no process with PID {pid}", hint)
    if caller.uid != uid and not is_privileged(caller.uid):
        raise NotAllowedError(f"PID {pid} belongs to another user", "only root can take a lease for it")
    if binding == "container":
        owner = caller.owner
    else:
        unit = job_unit_of(pid)
        if unit is None:
            raise NotFoundError(f"PID {pid} has ended", "")
        owner = Owner(uid, unit)
    if caller.uid != 0 and owner.unit != caller.owner.unit:
        raise NotAllowedError(
            f"PID {pid} belongs to another systemd unit", "only root can take a lease for it"
        )
    return Holder(binding, owner.uid, pid, started, unit=owner.unit)


def awaited_container(caller: Caller, name: str) -> Holder:
    """Return the holder for a container that is about to start.

    Until its hook binds the lease, only a release ends it, so its caller must know of the container's end.
    Raises NotAllowedError unless the caller is root.
    """
    refuse_unprivileged(caller.uid, "take a lease for a container that does not run yet")
    return Holder("container", caller.uid, name=name, unit=caller.owner.unit)


def named_holder(caller: Caller, name: str, ttl_s: float) -> Holder:
    """Return the holder of a name, which expires after `ttl_s`; 0 for never.

    Raises NotAllowedError if another user than root asks for one that does not expire.
    """
    if not ttl_s:
        refuse_unprivileged(caller.uid, "take a lease that does not expire")
    return Holder("name", caller.uid, name=name, ttl_s=ttl_s, unit=caller.owner.unit)


def attested_container(holder: Holder, containers: Containers) -> ControlGroup | None:
    """Return the control group whose processes the lease's owner may terminate, whichever user they have.

    None unless root has bound the lease to the container (root's hook does so, for what a user starts with
    docker), and has made the container's control group. What the owner says about it grants no right.
    """
    if holder.binding != "container" or not holder.is_attested or holder.pid is None:
        return None
    if started_ticks(holder.pid) != holder.started:
        return None
    container = containers.group_of(holder.pid)
    return container.group if container and container.is_made_by_root else None


def find_own_lease(
    name: str, leases: Mapping[str, Lease], caller: Owner, *, of_any_unit: bool = False
) -> Lease:
    """Return the lease of this name or id that the caller may change: their own, or any if they are root.

    `of_any_unit`: a container engine may have left its job's unit by now, which a job cannot. Raises
    NotFoundError and NotAllowedError.
    """
    lease = find_lease(name, leases, caller)
    owner = lease.holder.owner
    is_owner = caller.uid == owner.uid if of_any_unit else caller == owner
    if not is_owner and not is_privileged(caller.uid):
        message = f"the lease of {lease.addresses} belongs to {owner_name(owner)}"
        raise NotAllowedError(message, "only root and its owner may end or renew it")
    return lease
