"""The leases of the kubelet's containers: taken before a container starts, released if it never does.

The kubelet allocates devices to containers; a lease tells the daemon. Its name is made of the resource's name
and the kubelet's ids, the engines' hook binds it (container_hook), and it ends with the container.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from yunion_mps.containers.nodes import INSTANCE_CAPABILITIES, capability_nodes
from yunion_mps.core.enums import IN_USE, KUBERNETES, OVER_BUDGET
from yunion_mps.core.errors import HostError, NothingFreeError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operations import END_LEASE, GET_GPUS, GET_LEASES, TAKE_LEASE
from yunion_mps.http.parameters import Value
from yunion_mps.kubernetes.daemon_watch import RESTART_S, call_patiently
from yunion_mps.kubernetes.device_plugin.lease_names import is_container_lease, lease_name
from yunion_mps.kubernetes.device_plugin.resources import ExtendedResource
from yunion_mps.kubernetes.kubelet.grpc import RpcError
from yunion_mps.kubernetes.kubelet.pod_resources_api import list_containers
from yunion_mps.kubernetes.kubelet.protos.pod_resources_pb2 import ContainerResources

if TYPE_CHECKING:
    from yunion_mps.answers import GpuJson, LeaseDetailsJson, LeaseRecordJson

log = logging.getLogger(__name__)


#: How long the kubelet must not list a container before its lease is released, in s: a kubelet that has just
#: started lists no pods.
_MISSING_S = 120.0
#: The driver's device nodes that CUDA needs in addition to the GPUs'.
_DRIVER_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")


class ContainerLeases:
    """The leases of containers, of all resources; `clock` is monotonic, in s."""

    def __init__(
        self, daemon: AsyncDaemonClient, paths: Paths, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._daemon = daemon
        self._paths = paths
        self._clock = clock
        #: Whether a lease may be waiting for its container; otherwise, the kubelet is not asked.
        self._awaits_containers = True
        #: Since when the kubelet has not listed a lease's container, by the name of the lease.
        self._missing_s: dict[str | None, float] = {}
        #: The kubelet's device ids of the leases taken since the plugin started, by lease name.
        self._ids: dict[str, frozenset[str]] = {}

    async def all(self) -> Sequence[LeaseDetailsJson]:
        """Return all leases, including those of other programs; raises YunionError."""
        leases = (await self._daemon.call(GET_LEASES))["leases"]
        container_leases = [lease for lease in leases if is_container_lease(lease)]
        self._awaits_containers = any(lease["pid"] is None for lease in container_leases)
        return leases

    async def ours(self) -> Sequence[LeaseDetailsJson]:
        """Return the leases of the kubelet's containers, started or not; raises YunionError."""
        return [lease for lease in await self.all() if is_container_lease(lease)]

    async def preview(self, resource: ExtendedResource, ids: Sequence[str]) -> LeaseRecordJson:
        """Return the container's lease as it would be taken now; raises YunionError."""
        arguments = _arguments(resource, ids)
        return await self._daemon.call(TAKE_LEASE, None, **arguments, dry_run=True)

    async def device_nodes(self, gpus: Iterable[str]) -> list[str]:
        """Return the driver's nodes for these GPUs and MIG instances (UUIDs).

        Whether they exist is not checked, because a plugin in a pod does not see the host's nodes.

        Raises YunionError if the daemon does not answer, or if an instance's capabilities are missing.
        """
        listed = {gpu["uuid"]: gpu for gpu in (await self._daemon.call(GET_GPUS))["gpus"]}
        nodes = list(_DRIVER_NODES)
        for uuid in gpus:
            if uuid in listed:
                nodes += self._nodes_of(listed[uuid])
        return list(dict.fromkeys(nodes))

    def _nodes_of(self, gpu: GpuJson) -> list[str]:
        """Return the nodes of a GPU or a MIG instance; raises HostError if its capabilities are missing."""
        minor = gpu["device_minor"]
        address = gpu["pci_address"]
        capabilities = [] if minor is None else capability_nodes(self._paths, minor, address)
        if gpu["parent"] and len(capabilities) < INSTANCE_CAPABILITIES:
            place = self._paths.capabilities
            message = f"the capabilities of MIG instance {address} are missing from {place}"
            raise HostError(message, "wait until the instance exists again, or use deviceListStrategy: cdi")
        if minor is None:
            return []
        return [f"/dev/nvidia{minor}"] + [f"/dev/{name}" for name in capabilities]

    async def take(self, resource: ExtendedResource, ids: Sequence[str]) -> LeaseRecordJson:
        """Take the container's lease, or return the one that it has; raises YunionError."""
        arguments = _arguments(resource, ids)
        try:
            lease = await call_patiently(self._daemon, TAKE_LEASE, RESTART_S, **arguments)
        except NothingFreeError:
            # The kubelet has allocated the devices again, so no earlier container will start with them.
            await self._release_awaited(lambda lease: not self._held(lease).isdisjoint(ids))
            lease = await call_patiently(self._daemon, TAKE_LEASE, RESTART_S, **arguments)
        self._ids[resource.lease_name(ids)] = frozenset(ids)
        return lease

    def permit(self, lease: LeaseRecordJson) -> None:
        """Keep the lease for a while, because the container is about to start."""
        self._missing_s.pop(lease["name"], None)

    async def reconcile(self) -> None:
        """Release the leases of containers that have not started, and that the kubelet no longer lists.

        Raises YunionError and RpcError; the time without an answer does not count.
        """
        if not self._awaits_containers:
            return
        try:
            leases = await self.ours()  # before the kubelet is asked
            listed = await self._listed() if self._awaits_containers else {}
        except (YunionError, RpcError):
            self._missing_s.clear()
            raise
        now_s = self._clock()
        missing_s: dict[str | None, float] = {}
        for lease in leases:
            if not self._is_needed(lease, listed):
                missing_s[lease["name"]] = self._missing_s.get(lease["name"], now_s)
        self._missing_s = missing_s
        await self._release_awaited(
            lambda lease: self._missing_s.get(lease["name"], now_s) <= now_s - _MISSING_S
        )
        names = {lease["name"] for lease in leases}
        self._ids = {name: ids for name, ids in self._ids.items() if name in names}

    def _is_needed(self, lease: LeaseDetailsJson, listed: Mapping[str, frozenset[str]]) -> bool:
        """Return whether a process uses it, or the kubelet lists a container that has its devices.

        The kubelet does not list init containers, which share devices with the other containers of their pod.
        """
        if lease["state"] in (IN_USE, OVER_BUDGET) or lease["name"] in listed:
            return True
        held = self._held(lease)
        return any(not held.isdisjoint(ids) for ids in listed.values())

    async def _listed(self) -> dict[str, frozenset[str]]:
        """Return the kubelet's ids of each container and resource, by lease name.

        Raises RpcError, as list_containers does.
        """
        listed: dict[str, frozenset[str]] = {}
        for container in await list_containers(self._paths):
            for resource, ids in _ids_by_resource(container).items():
                listed[lease_name(resource, ids)] = frozenset(ids)
        return listed

    def _held(self, lease: LeaseRecordJson) -> frozenset[str]:
        """Return the kubelet's ids of a lease; those of memory are known only if this process took it."""
        return self._ids.get(lease["name"] or "", frozenset(lease["devices"]))

    async def _release_awaited(self, is_stale: Callable[[LeaseRecordJson], bool]) -> None:
        for lease in await self.ours():
            if lease["pid"] is None and is_stale(lease):
                log.info("%s: released, because its pod is gone", ", ".join(lease["devices"]))
                await call_patiently(self._daemon, END_LEASE, RESTART_S, lease=lease["id"])


def _ids_by_resource(container: ContainerResources) -> dict[str, list[str]]:
    """Return the ids of all resources, because a pod keeps its devices when its resource is renamed."""
    ids: dict[str, list[str]] = {}
    for devices in container.devices:
        ids.setdefault(devices.resource_name, []).extend(devices.device_ids)
    return ids


def _arguments(resource: ExtendedResource, ids: Sequence[str]) -> dict[str, Value]:
    """Return the arguments of TAKE_LEASE.

    Like the hook, it takes devices of GPUs that do not enforce budgets: the operator has offered them.
    """
    source: Mapping[str, Any] = resource.lease_source(ids)
    holder = {"kind": "container", "name": resource.lease_name(ids)}
    return {**source, "reserved_for": KUBERNETES, "allow_unlimited": True, "cdi": True, "holder": holder}
