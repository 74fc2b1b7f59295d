"""What a request for devices means on this host, and what a process gets with them."""

from __future__ import annotations

from yunion_mps.errors import HostError, YunionError
from yunion_mps.leases.impossible import refuse_impossible
from yunion_mps.leases.matching import least
from yunion_mps.leases.names import gpu_named
from yunion_mps.leases.offers import Offers, domain_plans
from yunion_mps.leases.request import LeaseRequest
from yunion_mps.models import ALL, LEASE_VARIABLE, Device, Lease
from yunion_mps.planning import client_environment, whole_environment, why_not_honoured
from yunion_mps.service.queries import Service
from yunion_mps.service.state import domain_names
from yunion_mps.supervisor import Supervisor


class LeaseRequests:
    """Knows the devices by name, and the control daemons that serve them."""

    def __init__(self, supervisor: Supervisor, service: Service) -> None:
        self._supervisor = supervisor
        self._service = service

    def environment(
        self, request: LeaseRequest, devices: tuple[Device, ...], lease_id: str
    ) -> dict[str, str]:
        """The environment of a process with the devices; raises HostError where it would not be honoured."""
        names = {device.domain for device in devices}
        if len(names) > 1:
            hint = "take devices of one GPU; cuda_mps_scope: host has one control daemon for all GPUs"
            raise HostError("these devices are of several control daemons, and a process has only one", hint)
        domain = domain_plans(self._supervisor.snapshot())[names.pop()]
        if request.device == ALL:
            return {**whole_environment(devices, domain), LEASE_VARIABLE: lease_id}
        why = why_not_honoured(devices, domain)
        if why:
            more = f"cuda_mps_combine: {len(devices)}"
            hint = f"take them on different GPUs (--across), or set {more} in host.conf"
            raise HostError(f"{len(devices)} devices cannot be one budget: {why}", hint)
        return {**client_environment(devices, domain), LEASE_VARIABLE: lease_id}

    def refuse_moved(self, lease: Lease) -> None:
        """Raise HostError where another control daemon than the lease's environment says serves its devices.

        Where CUDA finds no control daemon it goes on without one, and without limits.
        """
        snapshot = self._supervisor.snapshot()
        name = domain_names(snapshot.plan).get(lease.devices[0].gpu_uuid)
        places = [status.plan.pipe_directory for status in snapshot.domains if status.plan.name == name]
        if lease.environment["CUDA_MPS_PIPE_DIRECTORY"] not in places:
            addresses = ", ".join(device.addr for device in lease.devices)
            what = f"the control daemon of {addresses} is another one since the lease was given"
            raise HostError(what, f"take a new one, after: yunion-mps lease release {lease.id}")

    def possible(self, request: LeaseRequest, offers: Offers) -> LeaseRequest:
        """The request with whole names; raises YunionError if it is infeasible."""
        request = self._resolved(request)
        every = tuple(one.device for one in offers.devices)
        refusal = None
        for devices in [every] if request.device == ALL and every else least(request, offers):
            try:
                self.environment(request, devices, "")
            except HostError as error:
                refusal = error
            else:
                refusal = None
                break
        if refusal:
            raise refusal
        refuse_impossible(request, offers)
        return request

    def refusal(self, request: LeaseRequest, offers: Offers) -> YunionError | None:
        """Why it could not be met if everything were free, None where it could."""
        try:
            self.possible(request, offers)
        except YunionError as error:
            return error
        return None

    def _resolved(self, request: LeaseRequest) -> LeaseRequest:
        """The request with whole names for unique beginnings; raises NotFoundError where there are none."""
        device, gpu = request.device, request.gpu
        if device and device != ALL:
            device = self._service.device(device.removeprefix("0000:"))["addr"]
        if gpu:
            gpus = self._supervisor.snapshot().inventory.gpus
            gpu = gpu_named(gpu.removeprefix("0000:"), gpus).address
        return request._replace(device=device, gpu=gpu)
