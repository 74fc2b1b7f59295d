"""Which lease a process belongs to: the kernel's facts come first, its environment counts only if they agree.

A process may have inherited `YUNION_MPS_LEASE` from a job that started it, have been given another job's, or
have removed it. Its ancestors, its job's unit and its container are known to the kernel, and no user can
choose those of another user's process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

from yunion_mps.containers.lookup import ContainerGroup, Containers
from yunion_mps.core.models import LEASE_VARIABLE, Lease
from yunion_mps.host.control_groups import ControlGroup, control_groups_of
from yunion_mps.host.proc import (
    group_leaders_of,
    job_unit_of,
    parent_of,
    started_ticks,
    users_of,
    variable_of,
)
from yunion_mps.host.process_info import uid_of

#: How many ancestors of a process are searched for the holder of a lease.
_MAX_ANCESTORS = 256


class Origin(Protocol):
    """What is known about where a process belongs."""

    @property
    def uid(self) -> int | None: ...
    @property
    def users(self) -> frozenset[int]:
        """The users (uids) whose process it is (`users_of`)."""

    @property
    def started(self) -> int | None:
        """Its start in clock ticks since boot."""

    @property
    def parent(self) -> int: ...
    @property
    def leaders(self) -> tuple[int, ...]:
        """The PIDs of those that made its process group and its session."""

    @property
    def unit(self) -> str:
        """Its job's unit, empty if it is in none."""

    @property
    def groups(self) -> tuple[ControlGroup, ...]: ...
    @property
    def container(self) -> ContainerGroup | None: ...
    @property
    def variable(self) -> str:
        """Its YUNION_MPS_LEASE, empty if that is not set."""


class ProcessOrigin:
    """What the kernel says about a process; each fact is read once, when it is needed."""

    def __init__(self, pid: int, containers: Containers) -> None:
        self._pid = pid
        self._containers = containers

    @cached_property
    def uid(self) -> int | None:
        return uid_of(self._pid)

    @cached_property
    def users(self) -> frozenset[int]:
        return users_of(self._pid)

    @cached_property
    def started(self) -> int | None:
        return started_ticks(self._pid)

    @cached_property
    def parent(self) -> int:
        return parent_of(self._pid)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        return group_leaders_of(self._pid)

    @cached_property
    def unit(self) -> str:
        return job_unit_of(self._pid) or ""

    @cached_property
    def groups(self) -> tuple[ControlGroup, ...]:
        return control_groups_of(self._pid)

    @cached_property
    def container(self) -> ContainerGroup | None:
        return self._containers.group_of(self._pid)

    @cached_property
    def variable(self) -> str:
        return variable_of(self._pid, LEASE_VARIABLE) or ""


class _LeasedContainer(NamedTuple):
    """A container with a lease."""

    lease: Lease
    group: ControlGroup
    #: Whether root has named it, and made its control group.
    is_attested: bool


class Attribution:
    """Attributes processes to leases, as of one moment; each list of processes makes one."""

    def __init__(self, leases: Iterable[Lease], look: Callable[[int], Origin]) -> None:
        """`look` returns what is known about a process (PID); it is called once for each."""
        self._look = look
        self._origins: dict[int, Origin] = {}
        self._by_id: dict[str, Lease] = {}
        #: The leases whose holder is a running process, by PID.
        self._by_pid: dict[int, list[Lease]] = {}
        self._by_unit: dict[str, list[Lease]] = {}
        self._containers: list[_LeasedContainer] = []
        for lease in leases:
            self._add(lease)

    @classmethod
    def by_kernel(cls, leases: Iterable[Lease], containers: Containers) -> Attribution:
        """Return one that asks the kernel about processes."""
        return cls(leases, partial(ProcessOrigin, containers=containers))

    def _add(self, lease: Lease) -> None:
        holder = lease.holder
        self._by_id[lease.id] = lease
        if holder.unit:
            self._by_unit.setdefault(holder.unit, []).append(lease)
        if holder.pid is None or self._origin(holder.pid).started != holder.started:
            return
        self._by_pid.setdefault(holder.pid, []).append(lease)
        if holder.binding in ("container", "name"):
            container = self._origin(holder.pid).container
            if container:
                is_attested = bool(container.is_made_by_root) and (holder.uid == 0 or holder.is_attested)
                self._containers.append(_LeasedContainer(lease, container.group, is_attested))

    def lease_of(self, pid: int, gpus: Collection[str] = ()) -> str | None:
        """Return the id of the process's lease, None if it has none, or if it is not clear which one.

        `gpus` are the addresses of the GPUs that it uses: they decide between several leases of its holder.
        """
        origin = self._origin(pid)
        named = self._by_id.get(origin.variable)
        if named and not _may_use(origin, named):
            named = None
        known = self._known_leases(pid)
        if named and known and named not in known:
            is_its_own = _is_on_all(named, gpus) and self._is_deliberate(origin, known)
            named = named if is_its_own else None
        if named:
            return named.id
        if len(known) > 1:
            known = [lease for lease in known if _is_on(lease, gpus)]
        return known[0].id if len(known) == 1 else None

    def _known_leases(self, pid: int) -> list[Lease]:
        """Return the leases that the kernel's facts show: of its container, its nearest holder or its unit.

        An ancestor outside its container says less than the container. A holder or a unit has no process of
        another user, such as one that became root below a user's shell.
        """
        origin = self._origin(pid)
        holder = self._nearest_holder(pid)
        around = self._containers_around(pid)
        if holder is not None and (not around or around[0].group.contains(self._origin(holder).groups)):
            return [lease for lease in self._by_pid[holder] if _is_of_its_user(origin, lease)]
        if around:
            return [container.lease for container in around]
        of_unit = self._by_unit.get(origin.unit, [])
        if len(of_unit) == 1 and _is_of_its_user(origin, of_unit[0]):
            return of_unit
        return []

    def _nearest_holder(self, pid: int) -> int | None:
        """Return the PID of the holder of a lease from which the process descends; of several, the nearest.

        The kernel shows this by its ancestors and, even after the end of its parent, by its process group and
        session: no process that does not descend from their leader can be in these. Its parent is then init,
        or a subreaper (prctl(2)), which may hold a lease itself, from which that leader descends.
        """
        nearest = self._holder_above(pid)
        for leader in self._origin(pid).leaders:
            if leader in self._by_pid and (nearest is None or self._descends(leader, nearest)):
                return leader
        return nearest

    def _holder_above(self, pid: int) -> int | None:
        """Return the PID of the process, or of its nearest ancestor, that holds a lease."""
        for ancestor in self._with_ancestors(pid):
            if ancestor in self._by_pid:
                return ancestor
        return None

    def _descends(self, pid: int, ancestor: int) -> bool:
        """Return whether the process descends from this other one."""
        return pid != ancestor and ancestor in self._with_ancestors(pid)

    def _with_ancestors(self, pid: int) -> Iterator[int]:
        """Yield the PID of the process, and those of its ancestors but init."""
        ancestor = pid
        for _ in range(_MAX_ANCESTORS):
            yield ancestor
            if ancestor <= 1:
                return
            ancestor = self._origin(ancestor).parent

    def _containers_around(self, pid: int) -> list[_LeasedContainer]:
        """Return the innermost container with a lease that the process is in, once for each of its leases.

        The process need not descend from the container's first one, as with `docker exec`. For a process of
        another user than the lease's, only what root attests counts.
        """
        origin = self._origin(pid)
        innermost = 0
        around: list[_LeasedContainer] = []
        for container in self._containers:
            if not container.group.contains(origin.groups):
                continue
            if not container.is_attested and container.lease.holder.uid not in origin.users:
                continue
            depth = len(container.group.path)
            if depth > innermost:
                innermost = depth
                around = []
            if depth == innermost:
                around.append(container)
        return around

    def _is_deliberate(self, origin: Origin, known: Sequence[Lease]) -> bool:
        """Return whether the job, whose lease is not the one that the variable names, set the variable.

        It was not if the holder had it as well: then both have inherited it.
        """
        for lease in known:
            if lease.holder.pid is not None and self._origin(lease.holder.pid).variable == origin.variable:
                return False
        return True

    def _origin(self, pid: int) -> Origin:
        if pid not in self._origins:
            self._origins[pid] = self._look(pid)
        return self._origins[pid]


def _may_use(origin: Origin, lease: Lease) -> bool:
    """Return whether the lease may be that of the process, as far as its user and its unit tell.

    Root's processes may have any user's lease, as in a container.
    """
    uid = lease.holder.user_uid
    unit = lease.holder.unit
    if unit and origin.unit and unit != origin.unit:
        return False
    return uid is None or origin.uid in (0, None) or uid in origin.users


def _is_of_its_user(origin: Origin, lease: Lease) -> bool:
    """Return whether the process is the lease's user's; a lease of root may have any user's processes."""
    uid = lease.holder.user_uid
    return not uid or origin.uid is None or uid in origin.users


def _is_on_all(lease: Lease, gpus: Collection[str]) -> bool:
    own = {device.gpu_address for device in lease.devices}
    return own.issuperset(gpus)


def _is_on(lease: Lease, gpus: Collection[str]) -> bool:
    return any(device.gpu_address in gpus for device in lease.devices)
