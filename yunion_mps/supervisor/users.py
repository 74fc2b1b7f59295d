"""The users of each GPU at the moment: its leases, and the MPS servers that may have it open."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from yunion_mps.models import DomainPlan, Gpu
from yunion_mps.mps.domain import Domain
from yunion_mps.supervisor.fleet import blocks
from yunion_mps.users import NO_USERS, Servers, Users, all_of


def servers_of(domain: Domain, gpus: Iterable[str] = ()) -> Users:
    """Return the MPS servers of the domain, orphans among them; `gpus` (addresses) are named with them."""
    pids = domain.server_pids()
    return Users(servers=(Servers(tuple(pids), tuple(gpus)),) if pids else ())


class GpuUsers:
    """What uses GPUs and MIG instances (UUIDs); `leases` has the leases of each."""

    def __init__(self, leases: Mapping[str, Users], domains: Sequence[Domain], gpus: Collection[Gpu]) -> None:
        self._leases = leases
        self._domains = domains
        self._addresses = {str(gpu.uuid): gpu.address for gpu in gpus}
        self._parents = {str(gpu.uuid): gpu.parent for gpu in gpus}

    def leases(self, uuids: Iterable[str]) -> Users:
        return all_of(self._leases.get(uuid, NO_USERS) for uuid in uuids)

    def servers(self, uuid: str, planned: Iterable[DomainPlan] = ()) -> Users:
        """Return the servers that serve the GPU, or have to end before one of the `planned` domains can."""
        plans = [plan for plan in planned if uuid in plan.gpu_uuids]
        return all_of(
            self._with_gpus(domain, uuid)
            for domain in self._domains
            if uuid in domain.in_effect.gpu_uuids or any(blocks(domain, plan) for plan in plans)
        )

    def of(self, uuid: str, planned: Iterable[DomainPlan] = ()) -> Users:
        return all_of([self.leases([uuid]), self.servers(uuid, planned)])

    def with_instances(self, uuid: str, *, excluded: Collection[str] = ()) -> Users:
        """Return the users of the GPU and its MIG instances, except those `excluded` (UUIDs)."""
        parts = (part for part, parent in self._parents.items() if uuid in (part, parent))
        return all_of(self.of(part) for part in parts if part not in excluded)

    def by_gpu(self) -> dict[str, Users]:
        served = (uuid for domain in self._domains for uuid in domain.in_effect.gpu_uuids)
        return {uuid: users for uuid in {*self._leases, *served} if (users := self.of(uuid))}

    def _with_gpus(self, domain: Domain, of: str) -> Users:
        uuids = domain.in_effect.gpu_uuids
        others = () if uuids == (of,) else uuids
        return servers_of(domain, (self._addresses.get(uuid, uuid) for uuid in others))
