"""Containers with a time-sliced device or a MIG instance on the real containerd, with and without CDI."""

from __future__ import annotations

import pytest

from containers.containerd import Containerd
from integration.daemon_host import Daemon, eventually
from integration.device_nodes import nodes_in, nodes_of, nodes_of_instance, ready_daemon
from integration.lease_host import leases_of
from kubernetes.kubelet import INSTANCES, RESOURCE, TIME_SLICED, Kubelet, KubeletPlugin
from simhost.host import EACH_KIND

__all__ = ["ready_daemon"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.gpus({"kind": "h100", "count": 3}),
    pytest.mark.divided(*EACH_KIND),
]


@pytest.mark.parametrize("strategy", ["cdi", "environment"])
def test_a_container_has_the_nodes_and_variables_of_its_device_alone(
    ready_daemon: Daemon, containerd: Containerd, strategy: str
) -> None:
    host = ready_daemon.host
    (host.root / "etc/yunion/kubelet-plugin.yml").write_text(f"deviceListStrategy: {strategy}\n")
    _, sliced, split = host.gpus
    instances = {f"00:08.0-g{one.gpu_instance}": one for one in split.mig_devices()}
    with Kubelet(host, TIME_SLICED, INSTANCES, RESOURCE) as kubelet, KubeletPlugin(host):
        for resource, number in ((TIME_SLICED, 3), (INSTANCES, 2)):
            kubelet.request(resource).wait_healthy(number)
            pod = kubelet.run_pod(resource.replace("/", "-"), 1)
            container = containerd.run(pod)
            (address,) = pod.devices
            found = container.environment
            assert not [name for name in found if name.startswith("CUDA_MPS_")]
            uuid, nodes = sliced.uuid, nodes_of(sliced)
            if address in instances:
                uuid, nodes = instances[address].uuid, nodes_of_instance(host, split, instances[address])
            assert (found["CUDA_VISIBLE_DEVICES"], nodes_in(container.root)) == (uuid, nodes)
            assert [address] in [lease["devices"] for lease in leases_of(ready_daemon)]
            containerd.remove_pod(pod)
            if strategy == "cdi":  # otherwise, nothing binds the lease to the container
                eventually(lambda: not leases_of(ready_daemon), "the end of the lease")
