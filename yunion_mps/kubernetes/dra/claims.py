"""Prepares resource claims: each gets a lease of its own, which its containers share until it is unprepared.

The lease is named after the claim and does not expire. The kubelet unprepares a claim after the last pod that
uses it; `reconcile` releases the leases of claims that it has forgotten, as when it has lost its state.

Source: k8s.io/kubelet/pkg/apis/dra/v1/api.proto, NodePrepareResources and NodeUnprepareResources.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from yunion_mps.core.enums import IDLE, IN_USE, KUBERNETES, OVER_BUDGET
from yunion_mps.core.errors import HostError, NotFoundError, UnreachableError, YunionError
from yunion_mps.core.paths import Paths
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.http.operation import Operation
from yunion_mps.http.operations import END_LEASE, GET_LEASES, TAKE_LEASE
from yunion_mps.http.parameters import Value
from yunion_mps.kubernetes.api.objects import InvalidObjectError, Resource
from yunion_mps.kubernetes.api.server import ApiServer, MissingObjectError
from yunion_mps.kubernetes.daemon_watch import RESTART_S, call_patiently
from yunion_mps.kubernetes.dra.resource_objects import API_VERSION, SINCE, AllocatedDevice, ResourceClaim
from yunion_mps.kubernetes.dra.slice_devices import DRIVER, ClaimRequest
from yunion_mps.kubernetes.kubelet.pod_resources_api import list_containers

if TYPE_CHECKING:
    from yunion_mps.answers import LeaseDetailsJson, LeaseRecordJson

log = logging.getLogger(__name__)

T = TypeVar("T")

CLAIMS = Resource(f"/apis/{API_VERSION}", "resourceclaims", ResourceClaim, SINCE)
#: How long a lease has to be unneeded before `reconcile` releases it, in s.
GONE_S = 120.0
#: The names of claims' leases begin with this, which tells them from other leases that do not expire.
_PREFIX = "claim:"
_LEASE_NAME = re.compile(
    _PREFIX + r"(?P<namespace>[^/@]+)/(?P<name>[^/@]+)@(?P<uid>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})"
)


class ClaimName(NamedTuple):
    namespace: str
    name: str
    uid: str

    @property
    def lease(self) -> str:
        """Return the name of its lease, which `yunion-mps who` shows."""
        return f"{_PREFIX}{self.namespace}/{self.name}@{self.uid}"

    @classmethod
    def of(cls, lease: LeaseRecordJson) -> ClaimName | None:
        """Return the claim of a lease, None if it has another holder, which may be root on the host."""
        match = _LEASE_NAME.fullmatch(lease["name"] or "")
        if not match or lease["binding"] != "name" or lease["expires"] is not None:
            return None
        return cls(namespace=match["namespace"], name=match["name"], uid=match["uid"])


def is_claim_lease(lease: LeaseRecordJson) -> bool:
    return ClaimName.of(lease) is not None


class ClaimLeases:
    """The leases of resource claims; the driver takes and releases them as the kubelet asks."""

    def __init__(
        self,
        server: ApiServer,
        paths: Paths,
        gone_s: float = GONE_S,
        refusal: str = "",
        restart_s: float = RESTART_S,
    ) -> None:
        """Take and release no lease yet.

        gone_s: how long a lease is kept after no pod uses its claim any longer
        refusal: why no claim gets a new lease; empty if claims get leases
        restart_s: how long a request waits for a daemon that restarts
        """
        self._server = server
        self._refusal = refusal
        self._paths = paths
        self._daemon = AsyncDaemonClient(paths)
        self._gone_s = gone_s
        self._restart_s = restart_s
        #: A lock for each claim, by uid, so that its lease is not released while it is being taken.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        #: Since when a lease has been unneeded (monotonic), by its id.
        self._gone_since_s: dict[str, float] = {}

    async def allocated(self, claim: ClaimName) -> Sequence[AllocatedDevice]:
        """Return the devices of this driver that are allocated to the claim.

        Raises NotFoundError if it has none any longer, HostError if it asks for what is not supported, and
        ApiServerError.

        Source: Kubernetes API, ResourceClaim, DeviceAllocationResult.
        """
        stored = await self._server.get(CLAIMS, claim.name, claim.namespace)
        if stored["metadata"]["uid"] != claim.uid:
            message = f"{claim.namespace}/{claim.name}: replaced by another claim of the same name"
            raise NotFoundError(message, "delete the pod")
        devices = stored.get("status", {}).get("allocation", {}).get("devices", {})
        if any(config.get("opaque", {}).get("driver") == DRIVER for config in devices.get("config", ())):
            message = f"{claim.namespace}/{claim.name}: config has parameters for {DRIVER}, which takes none"
            hint = "remove them from the claim or its DeviceClass, then delete the claim and the pod"
            raise HostError(message, hint)
        allocated = [result for result in devices.get("results", ()) if result["driver"] == DRIVER]
        if not allocated:
            raise NotFoundError(f"{claim.namespace}/{claim.name}: no devices are allocated", "delete the pod")
        if any(result.get("adminAccess") for result in allocated):
            message = f"{claim.namespace}/{claim.name}: adminAccess is not supported"
            raise HostError(message, "to see all devices of a node, run on it: yunion-mps who")
        return allocated

    async def take(self, claim: ClaimName, request: ClaimRequest) -> LeaseRecordJson:
        """Take the claim's lease, or return the one that it has; raises YunionError."""
        async with self._lock(claim.uid):
            for lease in await self._leases_of(claim.uid):
                if _satisfies(lease, request):
                    return lease
                if lease["state"] in (IN_USE, OVER_BUDGET):
                    text = f"{claim.lease} now has other devices, but a process still uses the previous ones"
                    raise HostError(text, "see: yunion-mps who")
                await self._call(END_LEASE, lease=lease["id"])
            if self._refusal:
                text = f"claims are not prepared on this node: {self._refusal}"
                raise HostError(text, "delete the pod, so that it is scheduled to another node")
            # Devices of GPUs that do not enforce budgets are included, because the operator has offered them.
            return await self._call(
                TAKE_LEASE,
                **_members(request),
                holder={"kind": "name", "name": claim.lease, "ttl_s": 0},
                cdi=True,
                reserved_for=KUBERNETES,
                allow_unlimited=True,
            )

    async def release(self, uid: str) -> None:
        """End the claim's lease if there is one; raises YunionError."""
        async with self._lock(uid):
            for lease in await self._leases_of(uid):
                await self._end(lease)

    async def may_exist(self) -> bool:
        """Return whether a claim has a lease; True if the daemon does not answer."""
        try:
            leases = (await self._daemon.call(GET_LEASES))["leases"]
        except YunionError:
            return True
        return any(is_claim_lease(lease) for lease in leases)

    async def reconcile(self) -> None:
        """Release the leases that no pod has needed for `gone_s`.

        A lease is kept if a process uses its devices, if the kubelet lists a container with its claim, or if
        the API server has reserved the claim for a pod. If the API server does not answer, all are kept; a
        claim that cannot be read keeps its own lease, and one that cannot be ended does not keep the others.

        Raises YunionError and RpcError if the daemon, the API server or the kubelet cannot be asked, and the
        first error of a lease that cannot be ended.
        """
        leases = await self._leases_of_claims()
        if not leases:
            self._gone_since_s.clear()
            return
        listed = await self._listed()
        now_s = time.monotonic()
        unneeded_since_s: dict[str, float] = {}
        for lease, claim in leases:
            is_needed = lease["state"] != IDLE or (claim.namespace, claim.name) in listed
            if not is_needed and not await self._is_reserved(claim):
                unneeded_since_s[lease["id"]] = self._gone_since_s.get(lease["id"], now_s)
        self._gone_since_s = unneeded_since_s
        failure: YunionError | None = None
        for lease, claim in leases:
            if lease["id"] in unneeded_since_s and now_s - unneeded_since_s[lease["id"]] >= self._gone_s:
                async with self._lock(claim.uid):
                    log.warning("%s: no pod uses this claim any longer: releasing its lease", claim.lease)
                    try:
                        await self._end(lease)
                    except UnreachableError:
                        raise
                    except YunionError as error:
                        failure = failure or error
        if failure:
            raise failure

    def _lock(self, uid: str) -> asyncio.Lock:
        return self._locks.setdefault(uid, asyncio.Lock())

    async def _is_reserved(self, claim: ClaimName) -> bool:
        try:
            stored = await self._server.get(CLAIMS, claim.name, claim.namespace)
        except MissingObjectError:
            return False
        except InvalidObjectError as error:
            log.warning("%s: its lease is kept: %s", claim.lease, error.message)
            return True
        return stored["metadata"]["uid"] == claim.uid and bool(stored.get("status", {}).get("reservedFor"))

    async def _listed(self) -> set[tuple[str, str]]:
        """Return the namespaces and names of the claims of all containers on this node."""
        names: set[tuple[str, str]] = set()
        for container in await list_containers(self._paths):
            for claim in container.dynamic_resources:
                names.add((claim.claim_namespace, claim.claim_name))
        return names

    async def _call(self, operation: Operation[T], **arguments: Value) -> T:
        return await call_patiently(self._daemon, operation, self._restart_s, **arguments)

    async def _leases(self) -> list[LeaseDetailsJson]:
        return (await self._call(GET_LEASES))["leases"]

    async def _leases_of_claims(self) -> list[tuple[LeaseDetailsJson, ClaimName]]:
        leases: list[tuple[LeaseDetailsJson, ClaimName]] = []
        for lease in await self._leases():
            claim = ClaimName.of(lease)
            if claim:
                leases.append((lease, claim))
        return leases

    async def _leases_of(self, uid: str) -> list[LeaseDetailsJson]:
        return [lease for lease, claim in await self._leases_of_claims() if claim.uid == uid]

    async def _end(self, lease: LeaseRecordJson) -> None:
        try:
            await self._call(END_LEASE, lease=lease["id"])
        except NotFoundError:  # another process released it
            return
        log.info("%s: %s released", lease["name"], ", ".join(lease["devices"]))


def _members(request: ClaimRequest) -> dict[str, Value]:
    """Return those arguments of TAKE_LEASE that say what is leased."""
    members: dict[str, Value] = {}
    if request.devices:
        members["devices"] = list(request.devices)
    if request.memory_mib:
        members["gpu"] = request.gpu
        members["memory_mib"] = request.memory_mib
    if request.thread_percentage:
        members["thread_percentage"] = request.thread_percentage
    return members


def _satisfies(lease: LeaseRecordJson, request: ClaimRequest) -> bool:
    """Return whether it is a lease of what is requested."""
    if request.devices:
        return set(lease["devices"]) == set(request.devices)
    if request.thread_percentage not in (0, lease["thread_percentage"]):
        return False
    memory_mib = sum(budget["memory_mib"] or 0 for budget in lease["budgets"])
    return lease["gpus"] == [request.gpu] and memory_mib >= request.memory_mib
