"""Pods and claims: the plugin's calls, a pod's start on containerd, and what the plugin itself uses."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from yunion_mps.kubernetes.kubelet import device_plugin_api as api
from yunion_mps.kubernetes.kubelet.protos.device_plugin_pb2 import (
    ContainerAllocateResponse,
    Empty,
    PreStartContainerRequest,
)

from bench.programs import memory_mib, processor_s
from bench.running import Daemon, running
from bench.values import Aim, BenchError, Line, Rounds, Samples, Settings
from containers.containerd import Containerd
from containers.image import make_image
from integration.daemon_host import eventually
from integration.lease_host import leases_of
from kubernetes.cluster import Cluster
from kubernetes.dra_kubelet import DraKubelet, DraPlugin, add_node
from kubernetes.kubelet import Kubelet, KubeletPlugin, Pod

_CALL_FLOOR = "a call of GetDevicePluginOptions"
_CLAIM_FLOOR = "a call of NodeUnprepareResources without claims"
_POD_FLOOR = "a pod without a device"
_SIZES = ((1, 4), (64, 48))
#: Each changes a device, so that the plugin gets the whole list again.
_PODS = 10


def lines(settings: Settings) -> Iterator[Line]:
    if os.geteuid() != 0:
        raise BenchError("pods are only started by root")
    with running(1) as daemon, Kubelet(daemon.host) as kubelet, KubeletPlugin(daemon.host):
        kubelet.wait_healthy(4)
        yield from _call_lines(settings, daemon, kubelet)
        with tempfile.TemporaryDirectory() as folder:
            image = make_image(Path(folder), daemon.host)
            with Containerd(daemon.host, image) as containerd:
                yield _pod_line(settings, daemon, kubelet, containerd)
    for gpus, virtual_number in _SIZES:
        yield from _plugin_lines(settings, gpus, virtual_number)
        yield from _claim_lines(settings, gpus, virtual_number)


def _call_lines(settings: Settings, daemon: Daemon, kubelet: Kubelet) -> Iterator[Line]:
    devices = kubelet.preferred(1)
    request = PreStartContainerRequest(devices_ids=devices)

    def lease_ms() -> float:
        taken_ms = _ms(lambda: kubelet.call(api.PRE_START_CONTAINER, request))
        (lease,) = leases_of(daemon)
        daemon.ask("DELETE", f"/v1/leases/{lease['id']}")
        return taken_ms

    steps = {"Allocate": lambda: _ms(lambda: kubelet.admit("pod", devices)), "PreStartContainer": lease_ms}
    for name, step in steps.items():  # one after the other, because a lease is followed by other work

        def floor_ms() -> float:
            return _ms(lambda: kubelet.call(api.GET_OPTIONS, Empty()))

        yield _call_line(settings, name, step, floor_ms, _CALL_FLOOR)


def _call_line(
    settings: Settings, name: str, step: Callable[[], float], floor: Callable[[], float], floor_name: str
) -> Line:
    rounds = Rounds("ms")
    rounds.run(settings.rounds(500, 50), [("floor", floor), (name, step)])
    measured = rounds.of(name)
    slowest_ms = statistics.quantiles(measured.values, n=100, method="inclusive")[-1]
    return Line(f"{name} (99th percentile {slowest_ms:.1f} ms)", measured, rounds.of("floor"), floor_name)


def _claim_lines(settings: Settings, gpus: int, virtual_number: int) -> Iterator[Line]:
    number = gpus * virtual_number
    with (
        running(gpus, virtual_number) as daemon,
        Cluster() as cluster,
        DraKubelet(daemon.host, cluster) as kubelet,
        DraPlugin(daemon.host, cluster) as driver,
    ):
        add_node(cluster)
        kubelet.register()
        claim = kubelet.allocate("trainer", [kubelet.wait_published(number)[0]["name"]])

        def prepare_ms() -> float:
            taken_ms = _ms(lambda: kubelet.prepared(claim))
            kubelet.unprepare(claim)
            return taken_ms

        name = f"NodePrepareResources, {number:,} devices"
        yield _call_line(settings, name, prepare_ms, lambda: _ms(kubelet.unprepare), _CLAIM_FLOOR)
        rss = Samples((memory_mib(driver.process.pid, "Rss"),), "MiB")
    yield Line(f"DRA driver's RSS, {number:,} devices", rss, None, "one process", Aim(44, "MiB"))


def _pod_line(settings: Settings, daemon: Daemon, kubelet: Kubelet, containerd: Containerd) -> Line:
    """From the pod's admission until its container's program runs, as the kubelet has both started."""
    devices = kubelet.preferred(1)

    def start(name: str) -> Pod:
        is_plain = name == "plain"
        pod = Pod(name, (), ContainerAllocateResponse()) if is_plain else kubelet.admit(name, devices)
        containerd.run_sandbox(pod)
        if pod.devices:
            kubelet.start_container(pod)
        containerd.run(pod)
        return pod

    def start_ms(name: str) -> float:
        begin_s = time.perf_counter()
        pod = start(name)
        taken_ms = (time.perf_counter() - begin_s) * 1000
        containerd.remove_pod(pod)
        eventually(lambda: not leases_of(daemon), "the end of the lease")
        return taken_ms

    rounds = Rounds("ms")
    steps = [("plain", lambda: start_ms("plain")), ("pod", lambda: start_ms("pod"))]
    rounds.run(settings.rounds(40, 5), steps)
    what = "a pod's start with a device, by containerd"
    return Line(what, rounds.of("pod"), rounds.of("plain"), _POD_FLOOR)


def _plugin_lines(settings: Settings, gpus: int, virtual_number: int) -> Iterator[Line]:
    wait_s = settings.rounds(60, 5)
    number = gpus * virtual_number
    with (
        running(gpus, virtual_number) as daemon,
        Kubelet(daemon.host) as kubelet,
        KubeletPlugin(daemon.host) as plugin,
    ):
        kubelet.wait_healthy(number)
        before_s = processor_s(plugin.process.pid)
        time.sleep(wait_s)  # what it uses while nothing changes is what is measured
        share = Samples(((processor_s(plugin.process.pid) - before_s) / wait_s * 100,), "%")
        pods = min(_PODS, number)
        for one in range(pods):
            kubelet.run_pod(f"pod-{one}", 1)
        rss = Samples((memory_mib(plugin.process.pid, "Rss"),), "MiB")
    yield Line(f"plugin's RSS, {number:,} devices, {pods} pods", rss, None, "one process", Aim(44, "MiB"))
    yield Line(f"plugin, idle for {wait_s} s, {number:,} devices", share, None, "one core", Aim(0.1, "%"))


def _ms(function: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    function()
    return (time.perf_counter() - begin_s) * 1000
