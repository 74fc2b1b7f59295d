"""The kubelet of a simulated host, by grpcio, the plugin on it, and containers as an engine starts them.

with Kubelet(host) as kubelet, KubeletPlugin(host) as plugin:
    kubelet.wait_healthy(4)
    pod = kubelet.run_pod("trainer", 1)      # preferred allocation, Allocate, PreStartContainer
    container = Container(host, pod)         # the hook of its CDI device
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from yunion_mps.core.paths import Paths
from yunion_mps.http.client import AsyncDaemonClient
from yunion_mps.kubernetes.device_plugin.container_leases import ContainerLeases
from yunion_mps.kubernetes.device_plugin.resources import ExtendedResource
from yunion_mps.kubernetes.kubelet import device_plugin_api as api
from yunion_mps.kubernetes.kubelet.device_plugin_api import HEALTHY
from yunion_mps.kubernetes.kubelet.grpc import AnswerT, RequestT, Rpc
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    ContainerPreferredAllocationRequest,
    ListAndWatchResponse,
    PreferredAllocationRequest,
    PreStartContainerRequest,
    RegisterRequest,
)
from yunion_mps.kubernetes.kubelet.protos.pod_resources_pb2 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesResponse,
    PodResources,
)

from integration.daemon_host import eventually, state_of
from kubernetes.grpc_peers import PATIENCE_S, channel, their_server
from simhost import SimHost
from simhost.host import Closes

RESOURCE, MEMORY = "yunion.io/mps", "yunion.io/mps-memory"
TIME_SLICED, INSTANCES = "yunion.io/gpu.shared", "yunion.io/gpu"


class Pod(NamedTuple):
    """A pod of one container, as the kubelet has admitted it."""

    name: str
    devices: tuple[str, ...]
    answer: ContainerAllocateResponse
    resource: str = RESOURCE

    @property
    def cdi(self) -> str:
        (device,) = self.answer.cdi_devices
        return device.name.partition("=")[2]


class Kubelet(Closes):
    """It allocates each device once, and forgets plugins when it is restarted. A context manager.

    It accepts only `resources`, and its pods request `resource`, at first the first of them.
    """

    def __init__(self, host: SimHost, *resources: str) -> None:
        self._directory = host.root / "var/lib/kubelet/device-plugins"
        self._pod_resources = host.root / "var/lib/kubelet/pod-resources"
        for path in (self._directory, self._pod_resources):
            path.mkdir(parents=True, exist_ok=True)
        self._resources = resources or (RESOURCE,)
        self.resource = self._resources[0]
        self.pods: dict[str, Pod] = {}
        self.registrations: list[RegisterRequest] = []
        #: How often it was asked which pods it has.
        self.asked_for_pods = 0
        self._lists: dict[str, list[ListAndWatchResponse]] = {}
        self._stack = contextlib.ExitStack()
        self._channels: dict[str, grpc.Channel] = {}
        self.start()

    def start(self) -> None:
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)
        self._stack = contextlib.ExitStack()
        for service, methods, path in (
            ("v1.PodResourcesLister", {"List": self._list}, self._pod_resources / "kubelet.sock"),
            ("v1beta1.Registration", {"Register": self._register}, self._directory / "kubelet.sock"),
        ):
            self._stack.enter_context(their_server(service, methods, path))

    def stop(self) -> None:
        """Stop as the kubelet does: its sockets remain."""
        for resource in self._resources:
            self._disconnect(resource)
        self._stack.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()

    def _register(self, data: bytes, context: Any) -> bytes:
        request = RegisterRequest.FromString(data)
        if request.resource_name not in self._resources:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.resource_name} is invalid")
        threading.Thread(target=self._connect, args=(request,)).start()
        return b""

    def _connect(self, request: RegisterRequest) -> None:
        self._disconnect(request.resource_name)
        lists: list[ListAndWatchResponse] = []
        self._lists[request.resource_name] = lists
        opened = self._stack.enter_context(channel(self._directory / request.endpoint))
        self._channels[request.resource_name] = opened
        # As the kubelet, which waits until it is connected.
        answers = opened.unary_stream(api.LIST_AND_WATCH.path)(b"", wait_for_ready=True)
        self._stack.callback(answers.cancel)
        threading.Thread(target=_collect, args=(answers, lists)).start()
        self.registrations.append(request)

    def _disconnect(self, resource: str) -> None:
        if resource in self._channels:
            self._channels.pop(resource).close()

    def _list(self, _: bytes, __: Any) -> bytes:
        """One entry for each device, as the kubelet answers."""
        self.asked_for_pods += 1
        answer = ListPodResourcesResponse()
        for pod in list(self.pods.values()):
            devices = [ContainerDevices(resource_name=pod.resource, device_ids=[one]) for one in pod.devices]
            container = ContainerResources(name="main", devices=devices)
            answer.pod_resources.append(
                PodResources(name=pod.name, namespace="default", containers=[container])
            )
        return answer.SerializeToString()

    # -- what it does with the plugin of `resource`

    def request(self, resource: str) -> Kubelet:
        """Itself, whose pods request this resource from now on."""
        self.resource = resource
        return self

    @property
    def channel(self) -> grpc.Channel:
        opened: grpc.Channel = eventually(lambda: self._channels.get(self.resource), "a plugin")
        return opened

    @property
    def lists(self) -> list[ListAndWatchResponse]:
        """Each list that the plugin has sent since it has registered last."""
        return self._lists.get(self.resource, [])

    def call(self, rpc: Rpc[RequestT, AnswerT], request: RequestT) -> AnswerT:
        opened: Any = self.channel
        answer = opened.unary_unary(rpc.path)(request.SerializeToString(), timeout=PATIENCE_S)
        return rpc.answer.FromString(answer)

    @property
    def health(self) -> dict[str, str]:
        """Of each device that the plugin has listed last."""
        return {one.ID: one.health for one in self.lists[-1].devices} if self.lists else {}

    @property
    def healthy(self) -> list[str]:
        return [device for device, health in self.health.items() if health == HEALTHY]

    def wait_healthy(self, number: int) -> list[str]:
        """Wait until so many devices are healthy, and return those."""
        eventually(lambda: self.lists and len(self.healthy) == number, f"{number} healthy devices")
        return self.healthy

    def wait_registered(self, times: int = 1) -> None:
        eventually(lambda: len(self.registrations) >= times, f"{times} registrations")

    def preferred(self, size: int, required: Sequence[str] = ()) -> tuple[str, ...]:
        taken = {device for pod in self.pods.values() for device in pod.devices}
        one = ContainerPreferredAllocationRequest(
            available_deviceIDs=sorted(set(self.healthy) - taken),
            must_include_deviceIDs=required,
            allocation_size=size,
        )
        request = PreferredAllocationRequest(container_requests=[one])
        answer = self.call(api.GET_PREFERRED_ALLOCATION, request)
        return tuple(answer.container_responses[0].deviceIDs)

    def allocate(self, devices: Sequence[str]) -> AllocateResponse:
        one = ContainerAllocateRequest(devices_ids=devices)
        return self.call(api.ALLOCATE, AllocateRequest(container_requests=[one]))

    def admit(self, name: str, devices: Sequence[str]) -> Pod:
        """Allocate devices to a pod, whose container is not started yet."""
        (answer,) = self.allocate(devices).container_responses
        self.pods[name] = Pod(name, tuple(devices), answer, self.resource)
        return self.pods[name]

    def start_container(self, pod: Pod) -> None:
        """Ask whether the container may start."""
        self.permit(pod.devices)

    def permit(self, devices: Sequence[str]) -> None:
        """Ask whether a container with these devices may start."""
        self.call(api.PRE_START_CONTAINER, PreStartContainerRequest(devices_ids=devices))

    def run_pod(self, name: str, size: int) -> Pod:
        pod = self.admit(name, self.preferred(size))
        self.start_container(pod)
        return pod


def _collect(answers: Any, lists: list[ListAndWatchResponse]) -> None:
    with contextlib.suppress(grpc.RpcError):
        for answer in answers:
            lists.append(ListAndWatchResponse.FromString(answer))
    lists.clear()  # the kubelet's devices are unhealthy without a plugin


class KubeletPlugin(Closes):
    """The program, with its log; it can be killed and started again. A context manager."""

    def __init__(self, host: SimHost, *arguments: str) -> None:
        self._host = host
        self._arguments = arguments
        self._log = host.root / "var/log/kubelet-plugin"
        self.start()

    def start(self) -> None:
        coverage = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        env = {**coverage, **self._host.env}
        with self._log.open("a") as log:
            command = ["yunion-mps-kubelet-plugin", *self._arguments]
            self.process = self._host.popen(command, env=env, stdout=log, stderr=log)

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.end()
        self.start()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_asking(self, function: Callable[[], object]) -> threading.Thread:
        """Call the function on a thread; returns once the plugin has sent something for it, and waits."""
        proc = Path(f"/proc/{self.process.pid}")
        before = len(os.listdir(proc / "fd"))
        thread = threading.Thread(target=function)
        thread.start()
        # It has another connection, and sleeps, which it only does once everything is sent.
        eventually(
            lambda: len(os.listdir(proc / "fd")) > before and state_of(self.process.pid) == "S", "a request"
        )
        return thread

    @property
    def socket(self) -> Path:
        directory = self._host.root / "var/lib/kubelet/device-plugins"
        return directory / ExtendedResource(RESOURCE, "devices").endpoint

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGTERM)


class Reconciler:
    """A plugin that only compares the leases with the kubelet's pods, by a clock of the test."""

    def __init__(self, host: SimHost) -> None:
        self.now_s = 0.0
        paths = Paths(str(host.root))
        self._leases = ContainerLeases(AsyncDaemonClient(paths), paths, lambda: self.now_s)

    def run(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        asyncio.run(self._leases.reconcile())

    def release_missing(self) -> None:
        """Release what the kubelet does not list now, as if it had not for two minutes."""
        self.run()
        self.run(after_s=120.0)


class Container(Closes):
    """A container's first process, whose hook has run as its CDI file says. A context manager."""

    def __init__(self, host: SimHost, pod: Pod) -> None:
        """Raises HookError if the hook refuses it."""
        edits = _edits(host, pod.cdi)
        self.environment = dict(entry.partition("=")[::2] for entry in edits["env"])
        bundle = host.root / "bundle"
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps({"process": {"env": edits["env"]}}))
        self._process = subprocess.Popen(["sleep", "1000"])
        self.pid = self._process.pid
        (hook,) = edits["hooks"]
        state = {"pid": self.pid, "id": pod.name, "bundle": str(bundle)}
        done = host.run(["yunion-mps", *hook["args"][1:]], input=json.dumps(state))
        if done.returncode:
            self.close()
            raise HookError(done.stderr)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class HookError(Exception):
    """The hook has refused a container."""


def _edits(host: SimHost, name: str) -> dict[str, Any]:
    """What the CDI files of a host say of a device; a name in no file, or in two, cannot be resolved."""
    directory = host.root / "run/cdi"
    found = [
        device["containerEdits"]
        for file in sorted(os.listdir(directory))
        for device in json.loads((directory / file).read_text())["devices"]
        if device["name"] == name
    ]
    assert len(found) == 1, name
    return dict(found[0])
