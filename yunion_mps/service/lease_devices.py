"""The devices that can be leased on this host now, and the environment that a process gets with them."""

from __future__ import annotations

from yunion_mps.errors import HostError
from yunion_mps.leases.allocator import (
    Candidates,
    candidates_of,
    domain_plans,
    refuse_infeasible,
    smallest_groups,
)
from yunion_mps.leases.request import LeaseRequest, gpu_named
from yunion_mps.models import ALL, Device, Lease
from yunion_mps.planning import client_environment, whole_environment, why_not_honoured
from yunion_mps.service.queries import Queries
from yunion_mps.service.state import domain_names
from yunion_mps.supervisor import Supervisor


class LeaseDevices:
    """The devices by name, and the control daemons that serve them."""

    def __init__(self, supervisor: Supervisor, service: Queries) -> None:
        self._supervisor = supervisor
        self._service = service
        self._known, self._known_version = Candidates(), -1

    def candidates(self) -> Candidates:
        """The devices and pools as they are now."""
        snapshot = self._supervisor.snapshot()
        if self._known_version != snapshot.version:
            self._known = candidates_of(snapshot, self._service.reasons())
            self._known_version = snapshot.version
        return self._known

    def feasible(self, request: LeaseRequest) -> LeaseRequest:
        """The request with whole names; raises YunionError if it is infeasible."""
        device, gpu = request.device, request.gpu
        if device and device != ALL:
            device = self._service.device(device.removeprefix("0000:"))["addr"]
        if gpu:
            gpus = self._supervisor.snapshot().inventory.gpus
            gpu = gpu_named(gpu.removeprefix("0000:"), gpus).address
        request = request._replace(device=device, gpu=gpu)
        candidates = self.candidates()
        every = tuple(one.device for one in candidates.devices)
        refusal = None
        for devices in [every] if device == ALL and every else smallest_groups(request, candidates):
            try:
                self.environment(request, devices)
            except HostError as error:
                refusal = error
            else:
                refusal = None
                break
        if refusal:
            raise refusal
        refuse_infeasible(request, candidates)
        return request

    def environment(self, request: LeaseRequest, devices: tuple[Device, ...]) -> dict[str, str]:
        """The environment of a process with the devices; raises HostError if it would not be honoured."""
        names = {device.domain for device in devices}
        if len(names) > 1:
            hint = "take devices of one GPU; cuda_mps_scope: host has one control daemon for all GPUs"
            raise HostError("these devices are of several control daemons, and a process has only one", hint)
        domain = domain_plans(self._supervisor.snapshot())[names.pop()]
        if request.device == ALL:
            return whole_environment(devices, domain)
        why = why_not_honoured(devices, domain)
        if why:
            more = f"cuda_mps_combine: {len(devices)}"
            hint = f"take them on different GPUs (--across), or set {more} in host.conf"
            raise HostError(f"{len(devices)} devices cannot be one budget: {why}", hint)
        return client_environment(devices, domain)

    def refuse_unserved(self, lease: Lease) -> None:
        """Raise HostError if a device is not served now, or not by the control daemon of its environment.

        If CUDA finds no control daemon it goes on without one, and without limits.
        """
        reasons = self._service.reasons()
        for device in lease.devices:
            why = reasons.get(device.gpu_uuid, "its GPU is not there any more")
            if why:
                raise HostError(f"device {device.addr} cannot be used now: {why}", "see: yunion-mps status")
        snapshot = self._supervisor.snapshot()
        name = domain_names(snapshot.plan).get(lease.devices[0].gpu_uuid)
        served = [status.plan.pipe_directory for status in snapshot.domains if status.plan.name == name]
        if lease.environment["CUDA_MPS_PIPE_DIRECTORY"] not in served:
            addresses = ", ".join(device.addr for device in lease.devices)
            what = f"the control daemon of {addresses} is another one since the lease was given"
            raise HostError(what, f"take a new one, after: yunion-mps lease release {lease.id}")
