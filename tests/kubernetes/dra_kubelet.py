"""A kubelet that uses DRA drivers, by grpcio, the driver, and the claims of a cluster.

with Cluster() as cluster, DraKubelet(host, cluster) as kubelet, DriverInThread(host, cluster):
    kubelet.register()
    claim = kubelet.allocate("trainer", ["00-06-0-1"])
    kubelet.prepare(claim)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from yunion_mps.core.paths import Paths
from yunion_mps.core.tasks import cancel
from yunion_mps.kubernetes.api.credentials import Kubeconfig
from yunion_mps.kubernetes.dra.driver import DraService, DriverTimes
from yunion_mps.kubernetes.dra.slice_devices import DRIVER
from yunion_mps.kubernetes.kubelet import dra_api as api
from yunion_mps.kubernetes.kubelet.grpc import AnswerT, RequestT, Rpc
from yunion_mps.kubernetes.kubelet.protos import dra_pb2
from yunion_mps.kubernetes.kubelet.protos.dra_health_pb2 import (
    NodeWatchResourcesRequest,
    NodeWatchResourcesResponse,
)
from yunion_mps.kubernetes.kubelet.protos.plugin_registration_pb2 import PluginInfo, RegistrationStatus
from yunion_mps.kubernetes.kubelet.protos.pod_resources_pb2 import (
    ContainerResources,
    DynamicResource,
    ListPodResourcesResponse,
    PodResources,
)
from yunion_mps.kubernetes.metrics import Counts

from integration.daemon_host import eventually
from kubernetes.cluster import Cluster
from kubernetes.grpc_peers import PATIENCE_S, Loop, channel, their_server
from kubernetes.kubelet import KubeletPlugin
from kubernetes.slice_rules import wrong_with
from simhost import SimHost
from simhost.host import Closes

NODE = "node-1"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
NODES = "/api/v1/nodes"
NAMESPACE = "default"
#: How long the kubelet waits for an answer about claims, in s.
CALL_S = 45.0
#: Slices are written, and sockets created again, sooner than spares an API server.
QUICK = DriverTimes(slices_s=0.1, poll_s=0.05)


class Claim(NamedTuple):
    name: str
    uid: str

    @property
    def reference(self) -> dra_pb2.Claim:
        return dra_pb2.Claim(namespace=NAMESPACE, uid=self.uid, name=self.name)


def add_node(cluster: Cluster, name: str = NODE) -> None:
    cluster.validators[SLICES] = wrong_with
    cluster.add(NODES, {"metadata": {"name": name}})


class DraKubelet(Closes):
    """A context manager. What it has prepared is in `prepared`, by the claims' uids."""

    def __init__(self, host: SimHost, cluster: Cluster, version: str = "v1") -> None:
        self._host = host
        self._registry = host.root / "var/lib/kubelet/plugins_registry"
        self._pod_resources = host.root / "var/lib/kubelet/pod-resources"
        self._pod_resources.mkdir(parents=True)
        self.cluster = cluster
        self._prepare, self._unprepare = {
            "v1": (api.PREPARE, api.UNPREPARE),
            "v1beta1": (api.PREPARE_BETA, api.UNPREPARE_BETA),
        }[version]
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(
            their_server("v1.PodResourcesLister", {"List": self._list}, self._pod_resources / "kubelet.sock")
        )
        #: The names of the claims of running containers.
        self.listed: list[str] = []
        self.endpoint = ""
        self._sent: list[object] = []

    def close(self) -> None:
        self._stack.close()

    def _list(self, _: bytes, __: Any) -> bytes:
        container = ContainerResources(name="main")
        for name in list(self.listed):
            container.dynamic_resources.append(DynamicResource(claim_name=name, claim_namespace=NAMESPACE))
        pod = PodResources(name="trainer", namespace=NAMESPACE, containers=[container])
        return ListPodResourcesResponse(pod_resources=[pod]).SerializeToString()

    def register(self) -> PluginInfo:
        """Find the driver's socket, and register it, as after each start of the kubelet."""
        path = self._registry / f"{DRIVER}-reg.sock"

        def info() -> PluginInfo | None:
            with contextlib.suppress(grpc.RpcError), channel(path) as opened:
                answer = opened.unary_unary(api.GET_INFO.path)(b"", timeout=PATIENCE_S)
                status = RegistrationStatus(plugin_registered=True).SerializeToString()
                opened.unary_unary(api.NOTIFY.path)(status, timeout=PATIENCE_S)
                return PluginInfo.FromString(answer)
            return None

        found = eventually(info, "the driver's registration")
        assert found
        self.endpoint = found.endpoint
        return found

    def call(self, rpc: Rpc[RequestT, AnswerT], request: RequestT) -> AnswerT:
        data = request.SerializeToString()
        with channel(Path(self.endpoint)) as opened:
            answer = opened.unary_unary(rpc.path)(data, timeout=CALL_S, wait_for_ready=True)
        return rpc.answer.FromString(answer)

    def _send(self, rpc: Rpc[RequestT, Any], request: RequestT) -> None:
        opened = self._stack.enter_context(channel(Path(self.endpoint)))
        # A driver that has just registered may not listen yet: a call would fail, and nothing would retry it.
        grpc.channel_ready_future(opened).result(PATIENCE_S)
        # grpcio cancels a call whose future is deleted
        self._sent.append(opened.unary_unary(rpc.path).future(request.SerializeToString(), timeout=CALL_S))

    def wait_published(self, number: int) -> list[dict[str, Any]]:
        """Wait until so many devices without a taint are in complete slices, and return those."""

        eventually(lambda: len(self.untainted()) == number, f"{number} devices in slices")
        return self.untainted()

    def untainted(self) -> list[dict[str, Any]]:
        return [one for one in self.devices() if "taints" not in one]

    def devices(self) -> list[dict[str, Any]]:
        """The devices of the newest generation, if all of its slices are there."""
        slices = self.cluster.of(SLICES)
        newest = max((one["spec"]["pool"]["generation"] for one in slices), default=0)
        valid = [one["spec"] for one in slices if one["spec"]["pool"]["generation"] == newest]
        if not valid or len(valid) != valid[0]["pool"]["resourceSliceCount"]:
            return []
        return [device for spec in valid for device in spec["devices"]]

    def allocate(
        self,
        name: str,
        devices: Sequence[str],
        consumed: Mapping[str, str] | None = None,
        requests: Sequence[str] = (),
    ) -> Claim:
        """A claim that the scheduler has allocated these devices, and reserved for a pod."""
        results = [
            {
                "request": requests[index] if requests else "gpu",
                "driver": DRIVER,
                "pool": NODE,
                "device": device,
                **({"consumedCapacity": consumed, "shareID": f"share-{index}"} if consumed else {}),
            }
            for index, device in enumerate(devices)
        ]
        status = {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "trainer", "uid": "1"}],
        }
        made = {"metadata": {"name": name, "namespace": NAMESPACE}, "status": status}
        return Claim(name, self.cluster.add(CLAIMS, made)["metadata"]["uid"])

    def prepare(self, *claims: Claim) -> dict[str, dra_pb2.NodePrepareResourceResponse]:
        request = dra_pb2.NodePrepareResourcesRequest(claims=[one.reference for one in claims])
        answer = self.call(self._prepare, request)
        assert answer.claims.keys() == {one.uid for one in claims}
        return {one.name: answer.claims[one.uid] for one in claims}

    def send_prepare(self, claim: Claim) -> None:
        """Ask the driver to prepare a claim, without waiting for its answer."""
        self._send(self._prepare, dra_pb2.NodePrepareResourcesRequest(claims=[claim.reference]))

    def send_unprepare(self, claim: Claim) -> None:
        self._send(self._unprepare, dra_pb2.NodeUnprepareResourcesRequest(claims=[claim.reference]))

    def prepared(self, claim: Claim) -> str:
        """The CDI device of a claim that can be prepared."""
        answer = self.prepare(claim)[claim.name]
        assert answer.error == ""
        (cdi,) = (name for device in answer.devices for name in device.cdi_device_ids)
        return cdi

    def refused(self, claim: Claim) -> str:
        answer = self.prepare(claim)[claim.name]
        assert answer.error
        return answer.error

    def unprepare(self, *claims: Claim) -> list[str]:
        """The errors of claims that cannot be unprepared."""
        request = dra_pb2.NodeUnprepareResourcesRequest(claims=[one.reference for one in claims])
        answer = self.call(self._unprepare, request)
        assert answer.claims.keys() == {one.uid for one in claims}
        return [one.error for one in answer.claims.values() if one.error]

    def watch_health(self, rpc: Rpc[NodeWatchResourcesRequest, NodeWatchResourcesResponse]) -> HealthWatch:
        return self._stack.enter_context(HealthWatch(self.endpoint, rpc))


class HealthWatch(Closes):
    """The last health that the driver has sent, by device."""

    def __init__(
        self, endpoint: str, rpc: Rpc[NodeWatchResourcesRequest, NodeWatchResourcesResponse]
    ) -> None:
        self.health: dict[str, int] = {}
        self._stack = contextlib.ExitStack()
        opened = self._stack.enter_context(channel(Path(endpoint)))
        self._answers = opened.unary_stream(rpc.path)(b"")
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for answer in self._answers:
                devices = NodeWatchResourcesResponse.FromString(answer).devices
                self.health = {one.device.device_name: one.health for one in devices}

    def close(self) -> None:
        self._answers.cancel()
        self._thread.join()
        self._stack.close()


class DraPlugin(KubeletPlugin):
    """The program with `dra: true`, and a way to the cluster."""

    def __init__(self, host: SimHost, cluster: Cluster, more: str = "dra: true\n", *arguments: str) -> None:
        """`more` are other lines of its configuration, `arguments` those of the program."""
        kubeconfig = cluster.write_kubeconfig(host.root / "etc/kubeconfig")
        options = host.root / "etc/yunion/kubelet-plugin.yml"
        options.write_text(f"kubeconfig: {kubeconfig}\nnodeName: {NODE}\n{more}")
        self.host = host
        super().__init__(host, *arguments)


class DriverInThread(Closes):
    """The driver in a thread of the test, with times of the test; it can be started again. A context manager.

    It costs no process, so it is for whatever needs no signal, no log and no command line.
    """

    def __init__(self, host: SimHost, cluster: Cluster, times: DriverTimes = QUICK) -> None:
        self.host = host
        self._credentials = Kubeconfig(str(cluster.write_kubeconfig(host.root / "etc/kubeconfig")))
        self._times = times
        self._loop: Loop | None = None
        self.start()

    def start(self) -> None:
        self._loop = Loop()
        self._loop.__enter__()
        self._running = self._loop.run(self._begin())

    async def _begin(self) -> asyncio.Task[None]:
        paths = Paths(str(self.host.root))
        service = DraService(self._credentials, NODE, paths, Counts(), times=self._times)
        return asyncio.ensure_future(service.run())

    def end(self) -> None:
        """End it; fails if it has ended by itself."""
        if self._loop is None:
            return
        has_ended = self._running.done()
        self._loop.run(cancel([self._running]))
        self._loop.__exit__()
        self._loop = None
        assert not has_ended, self._running.exception()

    close = end
