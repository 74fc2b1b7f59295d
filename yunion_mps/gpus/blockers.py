"""Blockers: the one answer to the question who keeps a GPU as it is.

These are leases, MPS servers, control daemons and other processes. They are known from the ledger (at a stop,
from the state file: `recorded_ledger` of `leases/storage`), from domains, and from the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from copy import copy
from typing import NamedTuple

from yunion_mps.core.enums import NOT_SHARED, SHARING, TIME_SLICING
from yunion_mps.core.models import DomainPlan, Gpu
from yunion_mps.core.waits import NO_USERS, Servers, Users, all_of
from yunion_mps.leases.ledger import UNKNOWN, Hold, Ledger
from yunion_mps.mps.domain import Domain
from yunion_mps.mps.processes import MpsProcess

#: The ways of sharing whose jobs no control daemon serves; that of a row that cannot be read may be one.
WITHOUT_MPS = frozenset({TIME_SLICING, NOT_SHARED, UNKNOWN})


class Needs(NamedTuple):
    """What has to end before a step can be carried out on a GPU."""

    #: The ways of sharing whose leases the step waits for.
    leases: frozenset[str] = frozenset()
    #: Whether it waits for the GPU's MPS servers, and for control daemons that were left running.
    servers: bool = False
    #: Whether it waits for a control daemon that serves the GPU, although that may have no servers.
    control_daemons: bool = False
    #: Whether it waits for all other processes on the GPU.
    processes: bool = False
    #: Whether leases and processes do not matter on a GPU that MPS serves: then they are MPS' clients.
    spares_mps: bool = False
    #: Whether what uses a MIG instance of the GPU counts, too.
    instances: bool = True


#: To destroy a MIG instance, or to switch MIG mode on; processes are asked for one by one. Leases of
#: instances that another program has destroyed with the mode must not keep it from being switched on again.
UNUSED = Needs(leases=frozenset({*SHARING, UNKNOWN}), servers=True, instances=False)


class KeptBy(NamedTuple):
    """What keeps a GPU as it is; false if nothing does."""

    users: Users = NO_USERS
    #: Whether a control daemon does that may have no servers at the moment.
    control_daemon: bool = False
    #: Whether a process of ours does that an earlier daemon left running.
    left: bool = False

    def __bool__(self) -> bool:
        return bool(self.users) or self.control_daemon or self.left


class _Served(NamedTuple):
    """The GPUs of a control daemon, and its MPS servers."""

    plan: DomainPlan
    users: Users
    pids: tuple[int, ...]


def servers_of(domain: Domain, gpus: Iterable[str] = ()) -> Users:
    """Return the MPS servers of the domain, orphans among them; `gpus` (addresses) are named with them."""
    return _servers(tuple(domain.server_pids()), gpus)


def _servers(pids: tuple[int, ...], gpus: Iterable[str]) -> Users:
    return Users(servers=(Servers(pids, tuple(gpus)),) if pids else ())


def blocks(running: DomainPlan, plan: DomainPlan) -> bool:
    """Whether a running domain has to end before another one can start as planned."""
    has_its_gpus = not set(running.gpu_uuids).isdisjoint(plan.gpu_uuids)
    return has_its_gpus or running.pipe_directory == plan.pipe_directory


def gpus_of(processes: Iterable[MpsProcess]) -> set[str]:
    uuids: set[str] = set()
    for process in processes:
        uuids.update(process.gpu_uuids)
    return uuids


class Blockers:
    """What keeps GPUs and MIG instances (UUIDs) as they are, at one moment."""

    def __init__(
        self,
        *,
        holds: Iterable[Hold] = (),
        leases: Mapping[str, Users] = {},
        domains: Iterable[Domain] = (),
        gpus: Collection[Gpu] = (),
        left: Collection[str] = (),
        processes: Mapping[str, Collection[int]] = {},
    ) -> None:
        """Describe that moment.

        holds: what leases keep as it is
        leases: the same leases, as texts, by the UUID of the GPU
        domains: the control daemons that are supervised
        gpus: the GPUs and MIG instances; without any, the GPUs of leased instances are not known
        left: the GPUs of control daemons and MPS servers that an earlier daemon left running
        processes: the PIDs of all processes that use each GPU; empty if the driver does not answer
        """
        self._ways: dict[str, set[str]] = {}
        for hold in holds:
            self._ways.setdefault(hold.gpu_uuid, set()).add(hold.sharing)
        self._leases = leases
        self._served: list[_Served] = []
        for domain in domains:
            pids = tuple(domain.server_pids())
            self._served.append(_Served(domain.in_effect, _servers(pids, ()), pids))
        self._left = frozenset(left)
        self._processes = processes
        self._addresses = {str(gpu.uuid): gpu.address for gpu in gpus}
        self._parts: dict[str, list[str]] = {}
        for gpu in gpus:
            self._parts.setdefault(gpu.parent or str(gpu.uuid), []).append(str(gpu.uuid))

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        *,
        domains: Iterable[Domain] = (),
        gpus: Collection[Gpu] = (),
        left: Collection[str] = (),
        processes: Mapping[str, Collection[int]] = {},
    ) -> Blockers:
        """Return what keeps GPUs as they are, with the leases of a ledger."""
        return cls(
            holds=ledger.holds(),
            leases=ledger.users_by_gpu(),
            domains=domains,
            gpus=gpus,
            left=left,
            processes=processes,
        )

    def with_processes(self, processes: Mapping[str, Collection[int]]) -> Blockers:
        """Return the same with these PIDs of all processes that use each GPU."""
        blockers = copy(self)
        blockers._processes = processes  # noqa: SLF001 - it is of the same class
        return blockers

    def against(self, uuid: str, needs: Needs) -> KeptBy:
        """Return what keeps the GPU (UUID) as it is, of what a step `needs`.

        What uses a MIG instance of the GPU may count as well, except a control daemon without servers: the
        compute mode that it needs is that of the instance.
        """
        parts = {uuid, *self._parts.get(uuid, ())} if needs.instances else {uuid}
        serving = [served for served in self._served if not parts.isdisjoint(served.plan.gpu_uuids)]
        serves_it = any(uuid in served.plan.gpu_uuids for served in serving)
        users = []
        if needs.servers:
            users += [served.users for served in serving]
        if not (needs.spares_mps and (serves_it or uuid in self._left)):
            users += self._leases_in(parts, needs.leases)
            if needs.processes:
                pids: set[int] = set()
                for part in parts:
                    pids.update(self._processes.get(part, ()))
                users.append(Users(processes=tuple(sorted(pids))))
        return KeptBy(
            all_of(users),
            control_daemon=needs.control_daemons and serves_it,
            left=needs.servers and not self._left.isdisjoint(parts),
        )

    def _leases_in(self, parts: Collection[str], ways: frozenset[str]) -> list[Users]:
        """Return the leases of the GPU's `parts` that are shared in one of these ways.

        If the GPUs are not known, because the driver has failed, the lease of an instance may be on any.
        """
        if not self._addresses:
            parts = self._ways.keys()
        held = [part for part in parts if not ways.isdisjoint(self._ways.get(part, ()))]
        return [self._leases.get(part, Users(more_leases=1)) for part in held]

    # -- what a change of the plan waits for

    def leases(self, uuids: Iterable[str]) -> Users:
        return all_of(self._leases.get(uuid, NO_USERS) for uuid in uuids)

    def servers(self, uuid: str, planned: Iterable[DomainPlan] = ()) -> Users:
        """Return the servers that serve the GPU, or have to end before one of the `planned` domains can."""
        plans = [plan for plan in planned if uuid in plan.gpu_uuids]
        servers = []
        for served in self._served:
            uuids = served.plan.gpu_uuids
            if uuid in uuids or any(blocks(served.plan, plan) for plan in plans):
                others = () if uuids == (uuid,) else uuids
                servers.append(_servers(served.pids, [self._addresses.get(other, other) for other in others]))
        return all_of(servers)

    def of_gpu(self, uuid: str, planned: Iterable[DomainPlan] = ()) -> Users:
        """Return the leases of the GPU, and its servers, with those that `planned` domains wait for."""
        return all_of([self.leases([uuid]), self.servers(uuid, planned)])

    def with_instances(self, uuid: str) -> Users:
        """Return the leases and servers of the GPU and its MIG instances."""
        return all_of(self.of_gpu(part) for part in self._parts.get(uuid, [uuid]))

    def by_gpu(self) -> dict[str, Users]:
        """Return the leases and servers of all GPUs and MIG instances that have any, by UUID."""
        uuids = set(self._leases)
        for served in self._served:
            uuids.update(served.plan.gpu_uuids)
        users = {uuid: self.of_gpu(uuid) for uuid in uuids}
        return {uuid: its_users for uuid, its_users in users.items() if its_users}
