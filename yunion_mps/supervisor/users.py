"""The users of each GPU at the moment: its leases, and the MPS servers that may have it open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from yunion_mps.models import Gpu
from yunion_mps.mps.domain import Domain
from yunion_mps.users import NO_USERS, Servers, Users, all_of


def servers_of(domain: Domain) -> Users:
    """Return the MPS servers of the domain, orphans among them."""
    pids = domain.server_pids()
    return Users(servers=(Servers(tuple(pids)),) if pids else ())


class GpuUsers:
    """What uses GPUs and MIG instances (UUIDs); `leases` has the leases of each."""

    def __init__(self, leases: Mapping[str, Users], domains: Sequence[Domain], gpus: Iterable[Gpu]) -> None:
        self._leases = leases
        self._domains = domains
        self._addresses = {str(gpu.uuid): gpu.address for gpu in gpus}

    def leases(self, uuids: Iterable[str]) -> Users:
        return all_of(self._leases.get(uuid, NO_USERS) for uuid in uuids)

    def servers(self, uuid: str) -> Users:
        """Return the servers that serve the GPU, and which other GPUs they serve."""
        domains = [domain for domain in self._domains if uuid in domain.in_effect.gpu_uuids]
        return all_of(self._with_gpus(domain) for domain in domains)

    def of(self, uuid: str) -> Users:
        return all_of([self.leases([uuid]), self.servers(uuid)])

    def by_gpu(self) -> dict[str, Users]:
        served = (uuid for domain in self._domains for uuid in domain.in_effect.gpu_uuids)
        return {uuid: users for uuid in {*self._leases, *served} if (users := self.of(uuid))}

    def _with_gpus(self, domain: Domain) -> Users:
        uuids = domain.in_effect.gpu_uuids
        gpus = tuple(self._addresses.get(uuid, uuid) for uuid in uuids) if len(uuids) > 1 else ()
        users = servers_of(domain)
        return users._replace(servers=tuple(servers._replace(gpus=gpus) for servers in users.servers))
