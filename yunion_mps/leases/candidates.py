"""What can be leased: the devices and pools in their current state, and how devices combine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from yunion_mps.errors import InfeasibleError
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import ALL, Device, DomainPlan, Pool, Snapshot
from yunion_mps.planning.division import enforces_budgets, pool_device
from yunion_mps.planning.environment import (
    client_environment,
    require_one_budget,
    whole_environment,
    why_not_honoured,
)
from yunion_mps.reasons import NO_REASON, Reason


class Candidate(NamedTuple):
    """A device in its current state: `reason` says why it is not served, empty if it is.

    `is_slice`: its GPU is divided by `slices`, so it can satisfy a request for memory.
    """

    device: Device
    reason: Reason = NO_REASON
    is_slice: bool = False


class PoolCandidate(NamedTuple):
    """A pool in its current state: `make` creates a device of a number of units in a slot."""

    pool: Pool
    gpu: str  # its address
    make: Callable[[int, int], Device]
    reason: Reason = NO_REASON


class Candidates(NamedTuple):
    """Everything that can be leased; `unenforced` has the names of GPUs without enforced budgets, by UUID.

    `domains` are the domains of all devices, by name: as they serve, or as planned if they do not serve.
    `planned` are those that are configured, whose limits may wait for MPS servers to end.
    """

    devices: Sequence[Candidate] = ()
    pools: Sequence[PoolCandidate] = ()
    unenforced: Mapping[str, str] = {}
    domains: Mapping[str, DomainPlan] = {}
    planned: Mapping[str, DomainPlan] = {}

    def why_not_combinable(self, devices: Sequence[Device]) -> str:
        """Why devices of one domain cannot be combined into one budget, empty if they can."""
        return why_not_honoured(devices, self.domains[devices[0].domain])

    def environment(self, request: LeaseRequest, devices: Sequence[Device]) -> dict[str, str]:
        """The environment for a process with the devices; raises InfeasibleError if MPS would ignore it."""
        if len({device.domain for device in devices}) > 1:
            hint = "request devices of one GPU, or serve all GPUs together: cuda_mps_scope: host"
            what = "these devices have different control daemons; a process can use only one"
            raise InfeasibleError(what, hint)
        domain = self.domains[devices[0].domain]
        if ALL in request.devices:
            return whole_environment(devices, domain)
        require_one_budget(devices, domain, self.planned.get(domain.name))
        return client_environment(devices, domain)


def candidates_of(snapshot: Snapshot, reasons: Mapping[str, Reason]) -> Candidates:
    """The devices and pools; `reasons` says, by GPU UUID, why they are unusable, empty if they are not."""
    plan, gpus = snapshot.plan, snapshot.inventory.gpus
    sliced = {gpu.uuid for status in snapshot.domains for gpu in status.plan.gpus if gpu.is_sliced}
    devices = [Candidate(one, reasons[one.gpu_uuid], one.gpu_uuid in sliced) for one in plan.devices]
    addresses = {gpu.uuid: gpu.address for gpu in gpus}
    pools = [
        PoolCandidate(
            pool,
            addresses[pool.gpu_uuid],
            partial(pool_device, plan.host_id, pool, gpus=gpus),
            reasons[pool.gpu_uuid],
        )
        for pool in plan.pools
    ]
    unenforced = {
        gpu.uuid: f"{gpu.address} ({gpu.name})" for gpu in gpus if gpu.uuid and not enforces_budgets(gpu)
    }
    serving = (status.plan for status in snapshot.domains)
    domains = {domain.name: domain for domain in (*plan.parked, *plan.domains, *serving)}
    return Candidates(devices, pools, unenforced, domains, {domain.name: domain for domain in plan.domains})
