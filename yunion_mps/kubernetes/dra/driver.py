"""The DRA driver mps.yunion.io: answers the kubelet, publishes the devices, and serves both sockets.

Source: k8s.io/kubelet/pkg/apis: dra/v1/api.proto, dra-health/v1/api.proto, pluginregistration/v1/api.proto.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple

from yunion_mps.core.errors import UnreachableError, YunionError
from yunion_mps.core.models import CDI_KIND
from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import first_of
from yunion_mps.core.text import printable
from yunion_mps.host.log import Failures
from yunion_mps.kubernetes.api.credentials import ApiCredentials, ApiServerError
from yunion_mps.kubernetes.api.server import ApiServer, Backoff
from yunion_mps.kubernetes.daemon_watch import RESTART_S
from yunion_mps.kubernetes.dra.claims import GONE_S, ClaimLeases, ClaimName
from yunion_mps.kubernetes.dra.host_watch import HOST_TIMES, DraHost, HostTimes
from yunion_mps.kubernetes.dra.resource_objects import AllocatedDevice
from yunion_mps.kubernetes.dra.slice_devices import DRIVER, OfferedDevice, requested_by
from yunion_mps.kubernetes.dra.slices import INTERVAL_S, SlicePublisher
from yunion_mps.kubernetes.features import GpuKind, labels_of
from yunion_mps.kubernetes.kubelet import dra_api
from yunion_mps.kubernetes.kubelet.directory import KubeletDirectory
from yunion_mps.kubernetes.kubelet.grpc import Method, RpcError, RpcServer, answered_by, streamed_by
from yunion_mps.kubernetes.kubelet.protos.dra_health_pb2 import (
    HEALTHY,
    UNHEALTHY,
    DeviceHealth,
    DeviceIdentifier,
    NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
)
from yunion_mps.kubernetes.kubelet.protos.dra_pb2 import (
    Claim,
    Device,
    NodePrepareResourceResponse,
    NodePrepareResourcesRequest,
    NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse,
    NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
)
from yunion_mps.kubernetes.kubelet.protos.plugin_registration_pb2 import (
    InfoRequest,
    PluginInfo,
    RegistrationStatus,
    RegistrationStatusResponse,
)
from yunion_mps.kubernetes.metrics import API_SERVER, DAEMON, DONE, KUBELET, REFUSED, Counts, ResourceHealth

log = logging.getLogger(__name__)

#: How long the API server has for a claim, in s: the kubelet waits for 45 s (pkg/kubelet/cm/dra/plugin,
#: defaultClientCallTimeout).
_CLAIM_S = 10.0
#: How often the health is sent to the kubelet, which forgets it after 30 s (pkg/kubelet/cm/dra/healthinfo.go,
#: DefaultHealthTimeout), in s.
_HEALTH_S = 10.0
_RECONCILE_S = 60.0
_MAX_MESSAGE = 1024
_SOCKET = "dra.sock"
_REGISTRATION = f"{DRIVER}-reg.sock"


class DraDriver:
    """Answers the kubelet, for DraService, which serves its methods."""

    def __init__(self, host: DraHost, claims: ClaimLeases, node: str, counts: Counts) -> None:
        self._host = host
        self._claims = claims
        self._pool = node
        self._counts = counts

    def methods(self) -> list[Method]:
        """Return the driver's methods: an older kubelet calls the older version of each."""
        return [
            answered_by(dra_api.PREPARE, self._prepare),
            answered_by(dra_api.PREPARE_BETA, self._prepare),
            answered_by(dra_api.UNPREPARE, self._unprepare),
            answered_by(dra_api.UNPREPARE_BETA, self._unprepare),
            streamed_by(dra_api.WATCH_HEALTH, self._watch_health),
            streamed_by(dra_api.WATCH_HEALTH_ALPHA, self._watch_health),
        ]

    async def _prepare(self, request: NodePrepareResourcesRequest) -> NodePrepareResourcesResponse:
        answers = await asyncio.gather(*map(self._prepare_claim, request.claims))
        uids = [claim.uid for claim in request.claims]
        return NodePrepareResourcesResponse(claims=dict(zip(uids, answers)))

    async def _prepare_claim(self, reference: Claim) -> NodePrepareResourceResponse:
        claim = ClaimName(reference.namespace, reference.name, reference.uid)
        began_s = time.perf_counter()
        result = REFUSED
        try:
            allocated = await self._claims.allocated(claim)
            requested = requested_by(allocated, await self._host.known(), self._pool)
            lease = await self._claims.take(claim, requested)
            result = DONE
        except YunionError as error:
            log.warning("%s: its pod cannot start yet: %s", claim.lease, error.message)
            _count(error, self._counts)
            return NodePrepareResourceResponse(error=_error_text(error))
        except Exception as error:  # the other claims of the call do not depend on this one
            log.exception("%s: cannot be prepared", claim.lease)
            return NodePrepareResourceResponse(error=_error_text(_internal(error)))
        finally:
            self._counts.note_start(DRIVER, result, time.perf_counter() - began_s)
        log.info("%s: leased %s", claim.lease, ", ".join(lease["devices"]))
        return NodePrepareResourceResponse(devices=_prepared(allocated, f"{CDI_KIND}={lease['id']}"))

    async def _unprepare(self, request: NodeUnprepareResourcesRequest) -> NodeUnprepareResourcesResponse:
        answers = await asyncio.gather(*map(self._unprepare_claim, request.claims))
        uids = [claim.uid for claim in request.claims]
        return NodeUnprepareResourcesResponse(claims=dict(zip(uids, answers)))

    async def _unprepare_claim(self, reference: Claim) -> NodeUnprepareResourceResponse:
        try:
            await self._claims.release(reference.uid)
        except YunionError as error:
            _count(error, self._counts)
            return NodeUnprepareResourceResponse(error=_error_text(error))
        except Exception as error:  # as above
            log.exception("claim %s cannot be unprepared", reference.uid)
            return NodeUnprepareResourceResponse(error=_error_text(_internal(error)))
        return NodeUnprepareResourceResponse()

    async def _watch_health(self, _: NodeWatchResourcesRequest) -> AsyncIterator[NodeWatchResourcesResponse]:
        while True:
            changed = self._host.changed
            if self._host.offered is not None:
                now_s = int(time.time())
                devices = [_health_of(device, self._pool, now_s) for device in self._host.offered]
                yield NodeWatchResourcesResponse(devices=devices)
            await first_of(changed.wait(), asyncio.sleep(_HEALTH_S))


class DriverTimes(NamedTuple):
    """Timeouts and intervals of the driver, in s."""

    host: HostTimes = HOST_TIMES
    #: How long a claim waits for a daemon that restarts.
    restart_s: float = RESTART_S
    #: How long a lease has to be unneeded before it is released.
    gone_s: float = GONE_S
    #: The least time between writes of slices, unless a device's health has changed.
    slices_s: float = INTERVAL_S
    #: How often the driver checks that its sockets exist and, while it refuses claims, whether a claim still
    #: has a lease.
    poll_s: float = 1.0


DRIVER_TIMES = DriverTimes()


class DraService:
    """Serves the driver's sockets, publishes the devices and releases leftover leases."""

    def __init__(
        self,
        credentials: ApiCredentials,
        node: str,
        paths: Paths,
        counts: Counts,
        refusal: str = "",
        times: DriverTimes = DRIVER_TIMES,
    ) -> None:
        """Serve nothing yet.

        node: the node's name
        refusal: why the driver publishes nothing and only ends leases; empty if it serves
        times: its periods and deadlines
        """
        self._host = DraHost(paths, counts, times.host)
        server = ApiServer(credentials, _CLAIM_S)
        self._claims = ClaimLeases(
            server, paths, gone_s=times.gone_s, refusal=refusal, restart_s=times.restart_s
        )
        self._slices = SlicePublisher(ApiServer(credentials), node, counts, times.slices_s)
        self._poll_s = times.poll_s
        self._is_refusing = bool(refusal)
        self._counts = counts
        self._endpoint = os.path.join(paths.dra_directory, _SOCKET)
        self._registration = os.path.join(paths.plugins_registry, _REGISTRATION)
        self._directories = (os.path.dirname(paths.dra_directory), paths.plugins_registry)
        self._driver = RpcServer(DraDriver(self._host, self._claims, node, counts).methods())
        self._registrar = RpcServer(
            [
                answered_by(dra_api.GET_INFO, self._get_info),
                answered_by(dra_api.NOTIFY, self._notify),
            ]
        )
        self._failures = Failures(log, counts.errors)

    @property
    def health(self) -> ResourceHealth:
        return self._host.health

    @property
    def status(self) -> str:
        """Return what is offered and published, or why the kubelet cannot reach the driver."""
        return self._failures.cause or f"{DRIVER}: {self._host.status}; {self._slices.status}"

    @property
    def changes(self) -> Sequence[asyncio.Event]:
        """Return the events that are set when the labels may have changed."""
        return [self._host.changed]

    def labels(self) -> dict[str, str]:
        """Return the node's labels for Node Feature Discovery."""
        shares = Counter[GpuKind]()
        pools: set[str] = set()
        for device in self._host.offered or ():
            if device.is_pool:
                pools.add(device.gpu)
            else:
                shares[GpuKind(device.gpu, device.sharing)] += 1
        return labels_of(shares, pools)

    async def run(self) -> None:
        """Run without end; raises what is not a failure of another program."""
        await first_of(self._host.run(), self._slices.run(), self._offer(), self._serve(), self._reconcile())

    async def run_while_used(self) -> None:
        """Run as `run` does, but return once no claim has a lease."""
        if await self._claims.may_exist():
            await first_of(self.run(), self._wait_unused())

    async def _wait_unused(self) -> None:
        while await self._claims.may_exist():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(self._poll_s)

    async def _offer(self) -> None:
        while True:
            changed = self._host.changed
            offered = self._host.offered
            if self._is_refusing or (offered is None and self._host.failure):
                offered = ()  # an earlier driver may have published devices
            if offered is not None:
                self._slices.offer(offered)
            await changed.wait()

    async def _serve(self) -> None:
        """Serve both sockets. The kubelet finds the one in its registry, now and after each of its starts.

        Raises HostError if one of the kubelet's directories is removed or replaced.
        """
        while True:
            directories: list[KubeletDirectory] = []
            try:
                directories.extend(map(KubeletDirectory, self._directories))
                os.makedirs(os.path.dirname(self._endpoint), mode=0o750, exist_ok=True)
                await self._driver.open(self._endpoint)
                await self._registrar.open(self._registration)
                self._failures.clear()
                while self._driver.is_reachable and self._registrar.is_reachable:
                    await asyncio.sleep(self._poll_s)
                    _check(directories)
                log.warning("%s: a socket was removed; creating it again", DRIVER)
            except OSError as error:
                _check(directories)
                self._failures.report(f"{error.filename or self._endpoint}: {error.strerror or error}")
                await asyncio.sleep(self._poll_s)
            finally:
                for directory in directories:
                    directory.close()
                await asyncio.gather(self._registrar.close(), self._driver.close())

    async def _reconcile(self) -> None:
        backoff = Backoff(_RECONCILE_S / 4, _RECONCILE_S)
        failures = Failures(log)
        while True:
            try:
                await self._claims.reconcile()
                failures.clear()
            except (YunionError, RpcError) as error:
                _count(error, self._counts)
                failures.report(f"cannot compare leases with claims: {error}")
            await backoff.wait()

    async def _get_info(self, _: InfoRequest) -> PluginInfo:
        return PluginInfo(
            type=dra_api.PLUGIN_TYPE,
            name=DRIVER,
            endpoint=self._endpoint,
            supported_versions=dra_api.SERVICES,
        )

    async def _notify(self, status: RegistrationStatus) -> RegistrationStatusResponse:
        self._counts.registrations[DRIVER, DONE if status.plugin_registered else REFUSED] += 1
        if status.plugin_registered:
            log.info("the kubelet registered %s", DRIVER)
        else:
            log.warning("the kubelet refused to register %s: %s", DRIVER, status.error)
        return RegistrationStatusResponse()


def _check(directories: Iterable[KubeletDirectory]) -> None:
    for directory in directories:
        if not directory.is_current:
            raise directory.replaced


def _prepared(allocated: Sequence[AllocatedDevice], cdi: str) -> list[Device]:
    """Return the claim's devices.

    The CDI device is the first one's, which is for all requests, because a container has it once.
    """
    requests = [device["request"].partition("/")[0] for device in allocated]  # without a subrequest
    devices: list[Device] = []
    for device, request in zip(allocated, requests):
        is_first = not devices
        prepared = Device(
            request_names=list(dict.fromkeys(requests)) if is_first else [request],
            pool_name=device["pool"],
            device_name=device["device"],
            cdi_device_ids=[cdi] if is_first else [],
            share_id=device.get("shareID", ""),
        )
        devices.append(prepared)
    return devices


def _health_of(device: OfferedDevice, pool: str, now_s: int) -> DeviceHealth:
    """Return the device's health as the kubelet is told; `now_s` are seconds since 1970."""
    return DeviceHealth(
        device=DeviceIdentifier(pool_name=pool, device_name=device.name),
        health=HEALTHY if device.is_healthy else UNHEALTHY,
        last_updated_time=now_s,
        message=printable(device.reason)[:_MAX_MESSAGE],
    )


def _internal(error: Exception) -> YunionError:
    return YunionError(f"internal error: {error!r}")


def _error_text(error: YunionError) -> str:
    """Return what the kubelet shows in the pod's events; escaped, because it may quote a claim."""
    return printable(f"{error.message_with_hint} [{error.code}]")


def _count(error: YunionError | RpcError, counts: Counts) -> None:
    """Count a failed request by the program that was asked; the daemon's refusals do not count."""
    if isinstance(error, ApiServerError):
        counts.errors[API_SERVER] += 1
    elif isinstance(error, UnreachableError):
        counts.errors[DAEMON] += 1
    elif not isinstance(error, YunionError):
        counts.errors[KUBELET] += 1
